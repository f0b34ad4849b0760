#!/usr/bin/env bash
# Several GPUs, measured: the same losses as one GPU, resuming on another number, speed over one GPU, communication over
# sockets, what the gradients' format does to a loss curve, a rank that dies. A row per measurement, exit status 1 when
# one misses its target.
#
#     dev/gpu_ranks.sh TRAIN.bin VAL.bin FOLDER PART...
#
# PART: same resume speed-d12 speed-d48 sockets curves failure. FOLDER keeps the logs. RANKS: GPUs, default 4.
# PROGRAM: default ./train_gpt_fp8. NCCL_NVLS_ENABLE is 0 unless it is set.
# shellcheck disable=SC2317 # parts are called by their names
set -euo pipefail
cd "$(dirname "$0")/.."

[[ $# -ge 4 ]] || { sed -n '2,10p' "$0" | cut -c3-; exit 2; }
program=$(realpath "${PROGRAM:-./train_gpt_fp8}") ranks=${RANKS:-4}
train=$(realpath "$1") val=$(realpath "$2")
mkdir -p "$3"
work=$(realpath "$3")
shift 3
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
missed=0

row() { # NAME VALUE OK(1|0) TARGET
    printf '%-52s %-48s %s (%s)\n' "$1" "$2" "$([[ $3 == 1 ]] && echo ok || echo MISSED)" "$4"
    [[ $3 == 1 ]] || missed=1
}
# a CONDITION of awk on numbers: 1 or 0
holds() { awk "BEGIN { print ($1) ? 1 : 0 }" 2>/dev/null || echo 0; }

# One run: NAME RANKS FLAGS. 1 rank: without mpirun, on the GPU that CUDA_VISIBLE_DEVICES says.
go() {
    local name=$1 n=$2
    shift 2
    local launch=()
    [[ $n == 1 ]] || launch=(mpirun --allow-run-as-root --bind-to none -np "$n")
    if ! "${launch[@]}" "$program" -i "$train" -j "$val" -s 0 -t 1024 -o "$work/$name" "$@" >"$work/$name.txt" 2>&1; then
        echo "$name failed: $(grep -h '^error' "$work/$name.txt" | head -n 2)"
        missed=1
        return 1
    fi
}

# Median of KEY over the steps from FIRST on.
median() { # NAME KEY FIRST
    python3 - "$work/$1/metrics.jsonl" "$2" "$3" <<'PYTHON'
import json, statistics, sys
path, key, first = sys.argv[1:]
records = [json.loads(line) for line in open(path)]
print(statistics.median(r[key] for r in records if r["type"] == "step" and r["step"] >= int(first)))
PYTHON
}

# Largest differences of the losses and (relative) norms of two runs' steps.
differences() { # NAME NAME
    python3 - "$work/$1/metrics.jsonl" "$work/$2/metrics.jsonl" <<'PYTHON'
import json, sys
a, b = ([r for r in map(json.loads, open(path)) if r["type"] == "step"] for path in sys.argv[1:])
assert len(a) == len(b) > 0
print("%.5f %.4f" % (max(abs(x["loss"] - y["loss"]) for x, y in zip(a, b)),
                     max(abs(x["grad_norm"] - y["grad_norm"]) / x["grad_norm"] for x, y in zip(a, b))))
PYTHON
}

last_val() { sed -n 's/^s:[0-9]* tel://p' "$work/$1/main.log" | tail -n 1; }

# 20 steps on one batch, which is the same for any number of ranks (otherwise every rank draws an order of its own, as
# in llm.c), at a learning rate that does not blow up the difference of two roundings: 0.0006 makes 0.04 of it.
part_same() {
    local flags=(-e d12 -b 8 -d 32768 -x 20 -v 0 -a 1 -l 0.0001 -u 10 -c 0.1 -k constant) n kind
    CUDA_VISIBLE_DEVICES=0 go one 1 "${flags[@]}"
    CUDA_VISIBLE_DEVICES=0 go one_again 1 "${flags[@]}" -b 4
    local own
    own=$(differences one one_again)
    row "one GPU, another micro-batch: loss, norm differ by" "$own" 1 "the yardstick"
    for n in 2 4; do
        [[ $n -le $ranks ]] || continue
        for kind in "fp8 1" "fp8 0" "bf16 1" "bf16 0" "fp32 1" "fp32 0" "fp8-allreduce 1" "fp8-allreduce 0"; do
            [[ $n == "$ranks" || $kind == fp8* ]] || continue
            read -r format z <<<"$kind"
            go "same_${n}_${format}_$z" "$n" "${flags[@]}" --grad-reduce "$format" -z "$z"
            read -r loss norm <<<"$(differences one "same_${n}_${format}_$z")"
            row "$n GPUs, $format, -z $z: loss, norm differ by" "$loss $norm" "$(holds "$loss < 0.01")" "loss within 0.01"
        done
    done
    go again "$ranks" "${flags[@]}" --grad-reduce fp8
    row "$ranks GPUs, fp8, twice: main.log" "" "$(cmp -s "$work/again/main.log" "$work/same_${ranks}_fp8_1/main.log" && echo 1 || echo 0)" \
        "the same bits"
}

# A checkpoint of all ranks continued on as many, on half of them and on one; on as many with the same bits.
part_resume() {
    local flags=(-e d12 -b 4 -d 32768 -v 0 -m 2 -a 1 -l 0.0001 -u 10 -c 0.1 -k constant -n 20 -x 40) n file same
    go whole "$ranks" "${flags[@]}"
    for n in "$ranks" $((ranks / 2)) 1; do
        cp -r "$work/whole" "$work/on_$n"
        rm -r "$work/on_$n/step_00000040"
        CUDA_VISIBLE_DEVICES=$(seq -s, 0 $((n - 1))) go "on_$n" "$n" "${flags[@]}" -y 1
        if [[ $n == "$ranks" ]]; then
            same=1
            for file in model.bin $(cd "$work/whole/step_00000040" && ls shard_*); do
                cmp "$work/whole/step_00000040/$file" "$work/on_$n/step_00000040/$file" || same=0
            done
            row "$ranks GPUs, 40 steps = 20 + 20: all shards, model.bin" "" "$same" "the same bits"
        else
            read -r loss norm <<<"$(differences whole "on_$n")"
            row "$ranks GPUs, continued on $n: loss, norm differ by" "$loss $norm" "$(holds "$loss < 0.01")" "loss within 0.01"
        fi
        rm -rf "${work:?}/on_$n/step_"*
    done
    rm -rf "${work:?}/whole/step_"*
}

# Tokens per second on all GPUs over the sum of what each of them does alone, all at the same time: they share a power
# supply and a cooling, and differ by 3 to 5%. The same tokens per GPU and step.
speed() { # MODEL B TARGET
    local model=$1 b=$2 target=$3 gpu sum=0 slowest=0 ms together
    local flags=(-e "$model" -b "$b" -v 0 -x 34 -l 0.0001 -k constant --fast-accum "forward,dgrad" --fp8-lm-head 1)
    for gpu in $(seq 0 $((ranks - 1))); do
        CUDA_VISIBLE_DEVICES=$gpu go "${model}_alone_$gpu" 1 "${flags[@]}" -d 131072 &
    done
    wait
    go "${model}_together" "$ranks" "${flags[@]}" -d $((131072 * ranks))
    for gpu in $(seq 0 $((ranks - 1))); do
        ms=$(median "${model}_alone_$gpu" ms 20)
        sum=$(awk "BEGIN { print $sum + 131072000 / $ms }")
        slowest=$(awk "BEGIN { print ($ms > $slowest) ? $ms : $slowest }")
    done
    ms=$(median "${model}_together" ms 20)
    together=$(awk "BEGIN { printf \"%.0f\", 131072000 * $ranks / $ms }")
    row "$model, $ranks GPUs: tokens/s, over the sum of each alone" \
        "$together $(awk "BEGIN { printf \"%.3f (over $ranks x the slowest %.3f)\", $together / $sum, $slowest / $ms }")" \
        "$(holds "$together / $sum >= $target")" "at least $target"
    row "$model: communication ms, exposed ms, MB on the wire" "$(median "${model}_together" comm_ms 20) \
$(median "${model}_together" comm_exposed_ms 20) $(median "${model}_together" comm_bytes 20)" 1 "per step and rank"
    grep -h 'wire bytes' "$work/${model}_together.txt" || true
}
part_speed-d12() { speed d12 64 0.93; }
part_speed-d48() { speed d48 32 0.97; }

# As if between hosts: NCCL over sockets, a small batch. BF16 on the wire is a BF16 run: gradients and weights.
part_sockets() {
    local flags=(-e d12 -b 2 -d $((2048 * ranks)) -v 0 -x 24 -l 0.0001 -k constant) ms=()
    export NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_SOCKET_IFNAME=lo
    go sockets_fp8 "$ranks" "${flags[@]}"
    go sockets_bf16 "$ranks" "${flags[@]}" --precision bf16 -x 12
    unset NCCL_P2P_DISABLE NCCL_SHM_DISABLE NCCL_SOCKET_IFNAME
    ms=("$(median sockets_bf16 ms 3)" "$(median sockets_fp8 ms 18)")
    row "sockets, d12, $ranks ranks: ms per step, BF16 / FP8" \
        "$(awk "BEGIN { printf \"%.1f / %.1f = %.2f\", ${ms[0]}, ${ms[1]}, ${ms[0]} / ${ms[1]} }")" \
        "$(holds "${ms[0]} / ${ms[1]} >= 1.6")" "at least 1.6"
}

# Validation loss after 600 steps on the corpus, by the gradients' format, same seed (SEEDS, FORMATS: which).
part_curves() {
    local flags=(-e d12 -b 32 -d 131072 -x 600 -l 0.0006 -u 60 -q 0.1 -c 0.1 -v 600 -m 3) format seed truth loss
    for seed in ${SEEDS:-42}; do
        truth=
        for format in ${FORMATS:-fp32 fp8 fp8-allreduce}; do
            go "curve_${format}_$seed" "$ranks" "${flags[@]}" --grad-reduce "$format" --seed "$seed"
            loss=$(last_val "curve_${format}_$seed")
            truth=${truth:-$loss}
            row "d12, 600 steps, seed $seed, gradients in $format: loss" \
                "$loss $(awk "BEGIN { printf \"%+.4f\", $loss - $truth }")" \
                "$(holds "$loss - $truth <= 0.005 && $truth - $loss <= 0.005")" "within 0.005 of the first"
        done
    done
}

# The last rank dies, or stops: the others end with a line that names it, and nothing stays behind.
part_failure() {
    local signal seconds pid launched victim line
    for signal in KILL STOP; do
        go "dies_$signal" "$ranks" -e d12 -b 8 -d $((8192 * ranks)) -v 0 -x 100000 -n 50 -nk 2 >/dev/null &
        launched=$!
        for _ in $(seq 60); do
            [[ -e $work/dies_$signal/latest ]] && break
            sleep 1
        done
        victim=$(pgrep -f "^$program.*dies_$signal" | tail -n 1)
        SECONDS=0
        kill -"$signal" "$victim"
        wait "$launched" || true
        seconds=$SECONDS
        pid=$(pgrep -f "^$program.*dies_$signal" || true)
        line=$(grep -h '^error' "$work/dies_$signal.txt" | head -n 1 | cut -c1-160)
        row "rank stopped by $signal: the others end after" "$seconds s" "$(holds "$seconds <= 60")" "60 s"
        row "  nothing stays behind" "$pid" "$([[ -z $pid ]] && echo 1 || echo 0)" "no process"
        row "  said" "$line" "$([[ $line == *"rank $((ranks - 1))"* || $signal == KILL ]] && echo 1 || echo 0)" "the rank and the collective"
        [[ -z $pid ]] || kill -KILL "$pid"
    done
}

for part in "$@"; do
    "part_$part" || missed=1
done
exit $missed
