#!/usr/bin/env bash
# Tokens per second of whole training steps on one GPU, optimizer included, validation off.
#
#     dev/speed.sh goals [fp8|bf16|both]    the shapes of the peers' table: d12 d24 d36 d48 gpt3:c2048 gpt3:c4096
#     dev/speed.sh length [fp8|bf16|both]   d12 over T, 65,536 tokens per micro-step
#     dev/speed.sh batch [fp8|bf16|both]    d12 and d48 over the micro-batch, 131,072 and 32,768 tokens per step
#     dev/speed.sh "d12 64 1024 524288" ... given shapes: model, B, T, tokens per step (in PRECISION, default fp8)
#
# "both" runs every shape BF16, FP8, BF16, FP8: A B A B. A fifth field of a shape is the only precision it is for.
#
# DATA    a file of GPT-2 tokens that is large enough for one batch (default build/gpt2_val.bin)
# TRAIN   the program (default ./train_gpt_fp8); TRAIN="./a ./b" runs both in turn, A B, shape by shape
# FLAGS   more flags for it in FP8
# ONLY    run only the models whose names match this extended regular expression
# STEPS   how many steps each run has (default 23 in FP8, 9 in BF16)
# OUT     where the logs go (default build/speed)
# Memory is what nvidia-smi saw at its highest, everything included. The median is that of the last 6 steps: FP8 steps
# before the 17th run producers twice, while scales warm up.
set -u
cd "$(dirname "$0")/.." || exit 1
data=${DATA:-build/gpt2_val.bin}
out=${OUT:-build/speed}
what=${1:-}
precision=${2:-fp8}
case $what in
    goals) shapes=("d12 64 1024 524288" "d24 32 1024 131072" "d36 32 1024 131072" "d48 16 1024 131072"
                   "d48 32 1024 131072" "gpt3:c2048 16 2048 131072" "gpt3:c4096 2 2048 122880 bf16"
                   "gpt3:c4096 3 2048 122880 fp8") ;;
    length) shapes=("d12 64 1024 131072" "d12 32 2048 131072" "d12 16 4096 131072" "d12 8 8192 131072"
                    "d12 4 16384 131072") ;;
    batch) shapes=("d12 4 1024 131072" "d12 8 1024 131072" "d12 16 1024 131072" "d12 32 1024 131072"
                   "d12 64 1024 131072" "d12 128 1024 131072" "d48 4 1024 32768" "d48 8 1024 32768"
                   "d48 16 1024 32768" "d48 32 1024 32768") ;;
    "") echo "error: found no shape, want: goals, length, batch or \"MODEL B T TOKENS_PER_STEP\"" >&2; exit 1 ;;
    *) shapes=("$@"); precision=${PRECISION:-fp8} ;;
esac
[ "$precision" != both ] || precision="bf16 fp8 bf16 fp8"
mkdir -p "$out"
failed=0
printf '%-12s %5s %4s %6s %8s %10s %10s %9s  %s\n' model "" B T "per step" ms tokens/s "peak MiB" program

turn=0 # runs so far
# run PROGRAM MODEL B T TOKENS PRECISION: one line of the table
run() {
    local program=$1 model=$2 B=$3 T=$4 tokens=$5 precision=$6
    local log steps=9 flags="" gpu=${CUDA_VISIBLE_DEVICES:-0} sampler ms peak
    if [ "$precision" = fp8 ]; then
        steps=23
        flags=${FLAGS:-}
    fi
    turn=$((turn + 1))
    log=$out/speed_${model/:/_}_${B}_${T}_${precision}_$(basename "$(dirname "$program")")_$turn.log
    while sleep 1; do
        nvidia-smi -i "${gpu%%,*}" --query-gpu=memory.used --format=csv,noheader,nounits
    done > "$log.memory" 2> /dev/null &
    sampler=$!
    # a position table as long as T; -x first, so that FLAGS may change it
    # shellcheck disable=SC2086
    if "$program" -i "$data" -v 0 -s 0 -x "${STEPS:-$steps}" -e "$model" --max-seq-len "$T" -b "$B" -t "$T" \
        -d "$tokens" --precision "$precision" $flags > "$log" 2>&1; then
        ms=$(grep -oE '[0-9.]+ ms \|' "$log" | tail -6 | sort -n |
            awk '{ v[NR] = $1 } END { print NR % 2 ? v[(NR + 1) / 2] : (v[NR / 2] + v[NR / 2 + 1]) / 2 }')
        peak=$(sort -n "$log.memory" | tail -1)
        printf '%-12s %5s %4s %6s %8s %10.2f %10.0f %9s  %s\n' "$model" "$precision" "$B" "$T" "$tokens" "$ms" \
            "$(awk -v n="$tokens" -v ms="$ms" 'BEGIN { print n / ms * 1000 }')" "${peak:--}" "$program"
    else
        failed=1
        printf '%-12s %5s %4s %6s %8s  FAILED: %s\n' "$model" "$precision" "$B" "$T" "$tokens" \
            "$(grep -m1 '^error' "$log" || tail -1 "$log")"
    fi
    kill $sampler 2> /dev/null
    wait $sampler 2> /dev/null
    rm -f "$log.memory"
}

for shape in "${shapes[@]}"; do
    read -r model B T tokens only <<< "$shape"
    if [[ ! $model =~ ${ONLY:-.} ]]; then continue; fi
    for p in $precision; do
        if [ "$p" != "${only:-$p}" ]; then continue; fi
        for program in ${TRAIN:-./train_gpt_fp8}; do
            run "$program" "$model" "$B" "$T" "$tokens" "$p"
        done
    done
done
exit $failed
