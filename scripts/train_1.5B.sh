#!/usr/bin/env bash
# GPT-2 1558M (XL) on FineWeb-Edu, with the settings of llm.c's scripts/run_gpt2_1558M.sh, in FP8.
#
#     scripts/train_1.5B.sh [FLAG...]          e.g. scripts/train_1.5B.sh --precision bf16 -o runs/1558M_bf16
#
# Data: the shards that llm.c's dev/data/fineweb.py writes (data/README.md says how), in data/edu_fineweb100B or $DATA.
# $GPUS processes, one per GPU (default: every GPU of this machine). $TOKENIZER, a folder with vocab.bpe and encoder.json,
# turns samples into text. Flags given here come last, so they win.
# Start it again after a stop or a kill: it goes on from the newest checkpoint in its -o folder.
# --dry-run prints the memory plan; a smaller -b needs less memory and changes nothing else.
set -euo pipefail
cd "$(dirname "$0")/.."

data=${DATA:-data/edu_fineweb100B}
# 1,048,576 tokens per step = 16 sequences * 1,024 tokens * micro-steps * GPUs
exec scripts/launch.sh \
    -i "$data/edu_fineweb_train_*.bin" \
    -j "$data/edu_fineweb_val_*.bin" \
    -o runs/gpt2_1558M \
    -e d48 \
    -b 16 -t 1024 -d 1048576 -x 32000 \
    -k cosine -l 0.0006 -q 0.1 -u 700 -c 0.1 \
    -v 250 -m 20 \
    -s 300000 -g 384 ${TOKENIZER:+--tokenizer "$TOKENIZER"} \
    -n 2000 -nk 3 -y 1 \
    --save-model runs/gpt2_1558M/model.bin \
    "$@"
