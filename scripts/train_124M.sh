#!/usr/bin/env bash
# GPT-2 124M on 10 billion tokens of FineWeb, with the settings of llm.c's scripts/run_gpt2_124M.sh, in FP8.
#
#     scripts/train_124M.sh [FLAG...]          e.g. scripts/train_124M.sh --precision bf16 -o runs/124M_bf16
#
# Data: the shards that llm.c's dev/data/fineweb.py writes (data/README.md says how), in data/fineweb10B or $DATA.
# $GPUS processes, one per GPU (default: every GPU of this machine). $TOKENIZER, a folder with vocab.bpe and encoder.json,
# turns samples into text. Flags given here come last, so they win.
# Start it again after a stop or a kill: it goes on from the newest checkpoint in its -o folder.
set -euo pipefail
cd "$(dirname "$0")/.."

data=${DATA:-data/fineweb10B}
# 524,288 tokens per step = 64 sequences * 1,024 tokens * micro-steps * GPUs, so GPUs is 1, 2, 4 or 8
exec scripts/launch.sh \
    -i "$data/fineweb_train_*.bin" \
    -j "$data/fineweb_val_*.bin" \
    -o runs/gpt2_124M \
    -e d12 \
    -b 64 -t 1024 -d 524288 \
    -l 0.0006 -q 0.0 -u 700 -c 0.1 \
    -v 250 -m 20 \
    -s 20000 -g 144 ${TOKENIZER:+--tokenizer "$TOKENIZER"} \
    -n 5000 -nk 3 -y 1 \
    --save-model runs/gpt2_124M/model.bin \
    "$@"
