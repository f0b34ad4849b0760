#!/usr/bin/env bash
# quickstart.sh [cpu|gpu] (make quickstart): from a clone to two trained models.
#
# Sets the machine up, builds, makes the default corpus, trains one model in FP8 and one in BF16 on the same data with
# the same seed, and shows both loss curves. Everything it makes is in runs/quickstart; running it again overwrites it.
# Without an argument: the GPU if nvidia-smi names one of compute capability 9.0 (H100, H200, H800), else the CPU.
set -euo pipefail
cd "$(dirname "$0")/.."

# ----------------------------------------------------------------------------------------------------------------------
# sizes. A token is a byte here; tokens per step = batch * seq_len. Anything can be set from outside: STEPS=1000 make
# quickstart

set_sizes_cpu() { # 2 cores: both trainings together under 3 minutes
    # Small batches: at this size steps count, not tokens. In the same 47 s, 4 layers got through 2,000 steps of 512 tokens
    # and ended at a validation loss of 0.74, 2 layers through 4,000 and ended at 0.40. (5,000 steps of 256: 0.46.)
    : "${LAYERS:=2}" "${CHANNELS:=128}" "${HEADS:=4}" "${SEQ_LEN:=128}" "${BATCH:=4}"
    : "${STEPS:=4000}" "${WARMUP:=60}" "${LEARNING_RATE:=3e-3}"
    : "${VAL_EVERY:=200}" "${VAL_BATCHES:=32}" "${SAMPLE_EVERY:=1000}" "${SAMPLE_LENGTH:=127}" "${LOG_EVERY:=1}"
    : "${CORPUS_BYTES:=4000000}" "${CORPUS_VAL_BYTES:=200000}"
}

set_sizes_gpu() { # one H200: about a minute
    # Here too steps count more than tokens: 300 steps of 65,536 tokens ended at 1.6, 1,500 steps of 8,192 at 0.13
    : "${LAYERS:=12}" "${CHANNELS:=768}" "${HEADS:=12}" "${SEQ_LEN:=512}" "${BATCH:=32}"
    : "${STEPS:=1500}" "${WARMUP:=100}" "${LEARNING_RATE:=6e-4}"
    : "${VAL_EVERY:=100}" "${VAL_BATCHES:=4}" "${SAMPLE_EVERY:=500}" "${SAMPLE_LENGTH:=400}" "${LOG_EVERY:=1}"
    : "${CORPUS_BYTES:=40000000}" "${CORPUS_VAL_BYTES:=1000000}"
}

SEED=${SEED:-42}
OUT=runs/quickstart

# ----------------------------------------------------------------------------------------------------------------------

say() { printf '\n== %s\n' "$*"; }

# Show the command, run it; its time goes to the variable `seconds`.
run() {
    echo "\$ $*"
    local start=$SECONDS
    "$@"
    seconds=$((SECONDS - start))
}

has_hopper() {
    command -v nvidia-smi >/dev/null 2>&1 &&
        nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -qx '9\.0'
}

device=${1:-auto}
case $device in
    cpu | gpu) ;;
    auto) if has_hopper; then device=gpu; else device=cpu; fi ;;
    *)
        echo "error: '$device', want cpu, gpu or nothing" >&2
        exit 2
        ;;
esac

say "1/5 setup ($device)"
scripts/setup.sh --what "$device"

say "2/5 build"
jobs=-j$(nproc)
if [[ $device == gpu ]]; then
    set_sizes_gpu
    program=./train_gpt_fp8
    run make "$jobs" train_gpt_fp8 tools
else
    set_sizes_cpu
    program=./train_gpt_fp8_cpu
    run make "$jobs" cpu tools
fi

say "3/5 corpus: stories from a grammar, made here"
mkdir -p "$OUT"
run data/make_corpus --bytes "$CORPUS_BYTES" --seed 1 -o "$OUT/train.txt" --val-bytes "$CORPUS_VAL_BYTES" \
    --val-output "$OUT/val.txt"
# A name that ends in .bin is one file without a validation split: the validation text is its own file here.
run data/tokenize --byte -o "$OUT/stories_train.bin" "$OUT/train.txt"
run data/tokenize --byte -o "$OUT/stories_val.bin" "$OUT/val.txt"
floor=$(data/make_corpus --print-entropy)
echo "a model that knows the grammar would reach a loss of $floor nats per token: the floor line below"

train() { # PRECISION: one run, its screen also in its folder
    mkdir -p "$OUT/$1"
    run "$program" --train-data "$OUT/stories_train.bin" --val-data "$OUT/stories_val.bin" --output-dir "$OUT/$1" \
        --save-model "$OUT/$1/model.bin" \
        --num-layers "$LAYERS" --channels "$CHANNELS" --num-heads "$HEADS" --max-seq-len "$SEQ_LEN" --vocab-size 257 \
        --batch-size "$BATCH" --seq-len "$SEQ_LEN" --max-steps "$STEPS" --precision "$1" --seed "$SEED" \
        --learning-rate "$LEARNING_RATE" --warmup-steps "$WARMUP" --final-lr-fraction 0.1 --weight-decay 0.1 \
        --val-every "$VAL_EVERY" --val-max-steps "$VAL_BATCHES" --floor-loss "$floor" --log-every "$LOG_EVERY" \
        --sample-every "$SAMPLE_EVERY" --sample-length "$SAMPLE_LENGTH" --sample-temperature 0.8 --tokenizer byte
}

say "4/5 training in FP8, then in BF16: same data, same seed"
train fp8
fp8_seconds=$seconds
train bf16
bf16_seconds=$seconds

say "5/5 FP8 against BF16"
python3 scripts/compare_runs.py fp8="$OUT/fp8" bf16="$OUT/bf16" --svg "$OUT/fp8_vs_bf16.svg" \
    --title "FP8 against BF16: $LAYERS layers, $CHANNELS channels, $STEPS steps"
cat <<END

trained in ${fp8_seconds} s (FP8) and ${bf16_seconds} s (BF16) on the $device
  $OUT/fp8_vs_bf16.svg   both curves as a picture
  $OUT/{fp8,bf16}/       main.log, metrics.jsonl, model.bin
  $OUT/train.txt         what the models read
next: README.md, "Train on your own text"; $program --help
END
