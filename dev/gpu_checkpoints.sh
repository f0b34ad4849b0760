#!/usr/bin/env bash
# Checkpoints on a GPU, measured: llm.c's d2 and d4 validated and continued, 40 steps against 20 + 20, one checkpoint of
# d48 beside training. About 140 s on an H200; prints a row per measurement, exit status 1 when one misses its target.
#
#     SHARED_DATA=../shared/data dev/gpu_checkpoints.sh TRAIN.bin VAL.bin [FOLDER]
#
# TRAIN.bin, VAL.bin: corpus/gpt2_train.bin and gpt2_val.bin of $SHARED_DATA, unpacked. FOLDER (default: a temporary one)
# has room for two checkpoints of d48, 44 GB. PROGRAM: default ./train_gpt_fp8.
set -euo pipefail
cd "$(dirname "$0")/.."

[[ $# -ge 2 ]] || { sed -n '2,8p' "$0" | cut -c3-; exit 2; }
program=$(realpath "${PROGRAM:-./train_gpt_fp8}") llmc=$(realpath "${SHARED_DATA:-../shared/data}")/llmc
train=$(realpath "$1") val=$(realpath "$2")
work=$(mktemp -d "${3:-${TMPDIR:-/tmp}}/checkpoints.XXXXXX")
trap 'rm -rf "$work"' EXIT
missed=0
row() { # NAME VALUE OK(1|0) TARGET
    printf '%-44s %-44s %s (%s)\n' "$1" "$2" "$([[ $3 == 1 ]] && echo ok || echo MISSED)" "$4"
    [[ $3 == 1 ]] || missed=1
}
near() { awk -v a="$1" -v b="$2" -v by="$3" 'BEGIN { d = a - b; print (a != "" && d <= by && d >= -by) ? 1 : 0 }'; }

for precision in bf16 fp8; do
    within=$([[ $precision == bf16 ]] && echo 0.005 || echo 0.02)
    for model in "d2_model_00000500 6.0755" "d4_model_00001000 5.6575"; do
        read -r file theirs <<<"$model"
        loss=$("$program" -j "$val" -e "$llmc/$file.bin" -x 0 -b 32 -t 1024 -m 14 -v 1 -s 0 --precision $precision |
            sed -n 's/^val loss //p')
        row "$file validated in $precision" "$loss, llm.c $theirs" "$(near "$loss" "$theirs" $within)" "within $within"
    done
    within=$([[ $precision == bf16 ]] && echo 0.01 || echo 0.015)
    "$program" -i "$train" -j "$val" -s 0 -b 32 -t 1024 -d 32768 -x 1000 -l 0.003 -u 50 -q 0.1 -c 0.1 -v 50 -m 14 \
        --precision $precision --resume "$llmc/d2_model_00000500.bin" -o "$work/d2" >"$work/d2.log"
    loss=$(sed -n 's/^s:1000 tel://p' "$work/d2/main.log")
    row "d2 continued 500 to 1,000 in $precision" "$loss, llm.c 5.8691" "$(near "$loss" 5.8691 $within)" "within $within"
    # sigmas above the mean of llm.c's 100 steps before
    highest=$(awk -F'[: ]' '$3 == "trl" && NR == FNR && $2 >= 400 && $2 < 500 { n++; sum += $4; squares += $4 * $4 }
        $3 == "trl" && NR != FNR && $2 < 550 { z = ($4 - sum / n) / sqrt(squares / n - (sum / n) ^ 2); if (z > most) most = z }
        END { printf "%.2f", most }' "$llmc/d2_main.log" "$work/d2/main.log")
    row "highest of its first 50 steps, in sigmas" "$highest" "$(near "$highest" 0 3)" "at most 3"
    rm -rf "$work/d2"
done

for precision in bf16 fp8; do
    flags=(-i "$val" -j "$val" -s 0 -e d12 -b 16 -t 1024 -d 32768 -l 0.0006 -u 10 -c 0.1 -k constant -v 10 -m 2 -x 40 -n 20
        --precision $precision --autotune-cache "$work/matmul.txt")
    "$program" "${flags[@]}" -o "$work/once" >"$work/once.log"
    cp -r "$work/once" "$work/twice"
    rm -r "$work/twice/step_00000040"
    "$program" "${flags[@]}" -o "$work/twice" -y 1 >"$work/twice.log"
    same=1
    for file in step_00000040/shard_00000.bin step_00000040/model.bin main.log; do
        cmp "$work/once/$file" "$work/twice/$file" || same=0
    done
    row "d12 in $precision, 40 steps = 20 + 20" "weights, moments, slots, model, main.log" $same "the same bits"
    rm -r "$work/once" "$work/twice"
done

"$program" -i "$val" -s 0 -e d48 -b 16 -t 1024 -d 16384 -v 0 -l 0.0001 -k constant --precision fp8 --fp8-lm-head 1 \
    -x 100 -n 60 --keep 1 -o "$work/d48" >"$work/d48.log"
grep '^checkpoint' "$work/d48.log"
python3 - "$work/d48/metrics.jsonl" <<'PYTHON' >"$work/d48.txt"
import json, statistics, sys
records = [json.loads(line) for line in open(sys.argv[1])]
ms = {r["step"]: r["ms"] for r in records if r["type"] == "step"}
first = next(r for r in records if r["type"] == "checkpoint")
before, beside = (statistics.median(ms[s] for s in range(a, b)) for a, b in ((40, 60), (60, 90)))
print(first["delay_s"], f"{before:.1f} {beside:.1f} {beside / before:.3f}")
PYTHON
read -r delay before beside ratio <"$work/d48.txt"
row "d48: training waits for a checkpoint" "$delay s" "$(near "$delay" 0 5)" "under 5 s"
row "d48: ms per step before and while it is written" "$before, $beside" "$(near "$ratio" 1 0.03)" "full speed"
exit $missed
