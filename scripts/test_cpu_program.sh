#!/usr/bin/env bash
# The CPU program from end to end, as a user runs it: trains a tiny model in every precision, twice the same bits, one
# rank against two, logs and model file, and what it says to bad input. Part of `make test`; needs `make cpu tools`.
set -euo pipefail
cd "$(dirname "$0")/.."

source scripts/testing.sh
make_data

steps=60
shape=(--num-layers 2 --channels 64 --num-heads 2 --max-seq-len 64 --vocab-size 257 -t 64)
settings=(-l 2e-3 -u 10 -c 0.1 -v 20 -m 4 -s 0 --threads 2)

# One training run: name, then flags that are added or that replace an earlier one.
train() {
    local name=$1
    shift
    "$program" -i "$work/train.bin" -j "$work/val.bin" -o "$work/$name" "${shape[@]}" -b 8 -x "$steps" "${settings[@]}" \
        "$@" >"$work/$name.out" 2>&1
}

# The losses of a run's metrics.jsonl, one line each, at full precision.
losses() { # NAME step|val
    python3 - "$work/$1/metrics.jsonl" "$2" <<'PYTHON'
import json, sys
for line in open(sys.argv[1]):
    record = json.loads(line)
    if record["type"] == sys.argv[2]:
        print(repr(record["loss"]), repr(record.get("grad_norm")))
PYTHON
}

last_val() { losses "$1" val | tail -n 1 | cut -d' ' -f1; }
below() { awk -v a="$1" -v b="$2" 'BEGIN { exit !(a < b) }'; }
# Largest |a - b| between the losses of two runs; inf when they have not as many.
largest_difference() {
    paste <(losses "$1" step) <(losses "$2" step) | awk 'NF != 4 { print "inf"; bad = 1; exit }
        { d = $1 - $3; if (d < 0) { d = -d } if (d > most) { most = d } } END { if (!bad) { print most + 0 } }'
}

# ----------------------------------------------------------------------------------------------------------------------
# training

test_precision() { # PRECISION
    local name="train in $1" start first last
    start=$SECONDS
    if ! train "$1" --precision "$1" --save-model "$work/$1.bin"; then
        fail "$name" "exit status not 0: $(tail -n 3 "$work/$1.out")"
        return
    fi
    first=$(losses "$1" step | sed -n 1p | cut -d' ' -f1)
    last=$(last_val "$1")
    # an untrained model guesses among 257 tokens: ln 257 = 5.549
    if ! below "$first" 5.75 || ! below 5.35 "$first"; then
        fail "$name" "first loss $first, want about ln 257 = 5.549"
    elif ! below "$last" 3.2; then
        fail "$name" "validation loss $last after $steps steps, want below 3.2"
    elif [[ $(losses "$1" step | wc -l) -ne $steps ]]; then
        fail "$name" "$(losses "$1" step | wc -l) steps in metrics.jsonl, want $steps"
    elif [[ $(grep -cE '^s:[0-9]+ trl:[0-9.]+ lr:[0-9.]+ norm:[0-9.]+$' "$work/$1/main.log") -ne $steps ]]; then
        fail "$name" "main.log has not $steps lines in llm.c's format"
    else
        ok "$name: loss $first -> validation $last ($((SECONDS - start)) s)"
    fi
}

for precision in fp8 bf16 fp32; do
    test_precision "$precision"
done

fp8=$(last_val fp8) bf16=$(last_val bf16)
# Same model, same data: the roundings of FP8 change the loss, but hardly. 0.03 is what 60 steps of a tiny model scatter.
gap=$(awk -v a="$fp8" -v b="$bf16" 'BEGIN { d = a - b; print d < 0 ? -d : d }')
if [[ $fp8 == "$bf16" ]]; then
    fail "FP8 differs from BF16" "both have validation loss $fp8: is --precision ignored?"
else
    check "FP8 close to BF16: |$fp8 - $bf16| = $gap" "want below 0.03" below "$gap" 0.03
fi

train head --precision fp8 --fp8-lm-head 1
head=$(last_val head)
gap=$(awk -v a="$head" -v b="$fp8" 'BEGIN { d = a - b; print d < 0 ? -d : d }')
if [[ $head == "$fp8" ]]; then
    fail "FP8 head differs from BF16 head" "both have validation loss $fp8: is --fp8-lm-head ignored?"
else
    check "FP8 head close to BF16 head: |$head - $fp8| = $gap" "want below 0.03" below "$gap" 0.03
fi

# A saved model is the model that was validated last: to the bit in FP32, nearly in BF16.
for dtype in fp32 bf16; do
    train saved --precision fp32 -x 20 --save-model "$work/saved.bin" --save-dtype $dtype
    "$program" -e "$work/saved.bin" -j "$work/val.bin" -o "$work/read" -t 64 -b 8 -x 0 -v 1 -m 4 -s 0 --precision fp32 \
        --threads 2 >"$work/read.out" 2>&1 || true
    apart=$(awk -v a="$(last_val saved)" -v b="$(last_val read)" 'BEGIN { d = a - b; print d < 0 ? -d : d }')
    if [[ $dtype == fp32 ]]; then
        check "a model saved in FP32 and read again: the same loss" "$(last_val saved) became $(last_val read)" \
            [ "$(last_val saved)" = "$(last_val read)" ]
    else
        check "a model saved in BF16 and read again: $apart away" "want below 0.05, and not 0" \
            awk -v d="$apart" 'BEGIN { exit !(d > 0 && d < 0.05) }'
    fi
done

train again --precision fp8 --save-model "$work/again.bin"
check "two runs: the same losses and norms, bit for bit" "metrics.jsonl differs" cmp -s <(losses fp8 step) <(losses again step)
check "two runs: the same model file" "files differ" cmp -s "$work/fp8.bin" "$work/again.bin"
train one_thread --precision fp8 --threads 1
check "one thread and two: the same losses" "metrics.jsonl differs, by up to $(largest_difference fp8 one_thread)" \
    cmp -s <(losses fp8 step) <(losses one_thread step)
train other_seed --precision fp8 --seed 43
if cmp -s <(losses fp8 step) <(losses other_seed step); then
    fail "another seed: other losses" "--seed changes nothing"
else
    ok "another seed: other losses"
fi

# A BF16 model file carries the model: its first validation is the last one of the run that wrote it, but for BF16.
if "$program" -e "$work/fp8.bin" -i "$work/train.bin" -j "$work/val.bin" -o "$work/continued" -b 8 -t 64 -x 1 "${settings[@]}" \
    >"$work/continued.out" 2>&1; then
    from_file=$(losses continued val | sed -n 1p | cut -d' ' -f1)
    difference=$(awk -v a="$from_file" -v b="$fp8" 'BEGIN { d = a - b; print d < 0 ? -d : d }')
    check "continue from the model file: validation $from_file after $fp8" "want within 0.02" below "$difference" 0.02
else
    fail "continue from the model file" "$(tail -n 3 "$work/continued.out")"
fi

# On one batch (-a 1) two ranks of 4 sequences see what one rank of 8 sees; otherwise every rank has an order of its own,
# as in llm.c. FP32 leaves only the order of sums; in FP8 a scale is that of all ranks, but a sum that comes out
# differently in the last bit may round to the next FP8 value.
two_ranks() { # PRECISION TOLERANCE
    local name="two ranks in $1" difference
    local same=("${shape[@]}" "${settings[@]}" -i "$work/train.bin" -j "$work/val.bin" --threads 1 --precision "$1" -a 1 -x 20)
    if ! "$program" "${same[@]}" -o "$work/one_$1" -b 8 >"$work/one_$1.out" 2>&1; then
        fail "$name" "one rank alone: $(tail -n 3 "$work/one_$1.out")"
    elif ! mpi "$program" "${same[@]}" -o "$work/two_$1" -b 4 >"$work/two_$1.out" 2>&1; then
        fail "$name" "$(tail -n 5 "$work/two_$1.out")"
    else
        difference=$(largest_difference "one_$1" "two_$1")
        check "$name: losses within $difference of one rank's" "want at most $2" below "$difference" "$2"
    fi
}

if command -v mpirun >/dev/null; then
    two_ranks fp32 1e-4
    two_ranks fp8 3e-2
    if mpi "$program" -i "$work/train.bin" -j "$work/val.bin" -o "$work/ranks" "${shape[@]}" -b 4 -x "$steps" \
        "${settings[@]}" --threads 1 >"$work/ranks.out" 2>&1; then
        check "train on two ranks: validation $(last_val ranks)" "want below 3.2" below "$(last_val ranks)" 3.2
    else
        fail "train on two ranks" "$(tail -n 5 "$work/ranks.out")"
    fi
    mpi "$program" -i "$work/train.bin" -o "$work/auto_ranks" "${shape[@]}" -b auto -d 1024 -x 2 -v 0 -s 0 --threads 1 \
        >"$work/auto_ranks.out" 2>&1 || true
    check "-b auto on two ranks: one choice, said once" \
        "$(grep '^-b auto' "$work/auto_ranks.out"; tail -n 2 "$work/auto_ranks.out")" \
        test "$(grep -c '^-b auto: -b 8,' "$work/auto_ranks.out") $(losses auto_ranks step | wc -l)" = "1 2"
else
    skip "two ranks" "no mpirun" 4
fi

# A command line of llm.c, with every flag that its scripts use.
if "$program" -i "$work/train.bin" -j "$work/val.bin" -o "$work/llmc" -v 2 -s 2 -g 16 -h 0 -b 2 -t 64 -d 256 -r 0 -z 1 -c 0.1 \
    -l 0.0006 -q 0.0 -u 2 -n 0 -y 0 -e d2 -x 3 -k cosine -w 1 -ge 0 -f 1 -a 0 -m 2 -af 0 >"$work/llmc.out" 2>&1; then
    fail "a flag that is unknown to llm.c, too" "-af was accepted"
fi
if "$program" -i "$work/train.bin" -j "$work/val.bin" -o "$work/llmc" -v 2 -s 2 -g 16 -h 0 -b 2 -t 64 -d 256 -r 0 -z 1 -c 0.1 \
    -l 0.0006 -q 0.0 -u 2 -n 0 -y 0 -e d2 -x 3 -k cosine -w 1 -ge 0 -f 1 -a 0 -m 2 >"$work/llmc.out" 2>&1; then
    check "llm.c's command line, with gradient accumulation" "not 3 steps in main.log" \
        test "$(grep -c ' trl:' "$work/llmc/main.log")" -eq 3
else
    fail "llm.c's command line, with gradient accumulation" "$(tail -n 3 "$work/llmc.out")"
fi

# ----------------------------------------------------------------------------------------------------------------------
# profile

# The numbers of table and log, of two profiled steps (18 and 19, when scales are warm) of two micro-steps: percentages
# with the gaps make 100, every op is called as often as the model says, FLOPs are those of the model (its products by
# hand, as in test_roofline.c).
check_profile() {
    python3 - "$work/profile/metrics.jsonl" "$work/profile.out" <<'PYTHON'
import json, re, sys
records = [json.loads(line) for line in open(sys.argv[1])]
profile, = [r["profile"] for r in records if r["type"] == "profile"]
ops = {op["op"]: op for op in profile["ops"]}
L, C, T, Vp, tokens = 2, 64, 64, 384, 2 * 4 * 64
flops = sum(op["tflops"] * op["ms"] * 1e9 for op in ops.values())
want = tokens * (L * (72 * C * C + 7 * T * C) + 6 * C * Vp)
calls = {"fc wgrad": 2 * L, "head dgrad": 2, "attention backward": 2 * L, "layernorm forward": 2 * (2 * L + 1),
         "quantize weight": 4 * L, "global norm": 1}
table = re.findall(r"^(\S.*?) +(?:[\d.]+ +)?[-\d.]+ +([-\d.]+)(?: +[-\d.]+ +[-\d.]+ +[-\d.]+)?$",
                   open(sys.argv[2]).read().split("of roofline\n")[1].split("\nstep")[0], re.M)
steps = [r["ms"] for r in records if r["type"] == "step" and 17 <= r["step"] < 19]
faults = [text for text, right in [
    ("percent sum", abs(sum(op["percent"] for op in ops.values()) + profile["gaps_percent"] - 100) < 0.01),
    ("percent sum of the table", abs(sum(float(percent) for _, percent in table) - 100) < 0.01 * len(table)),
    ("rows of the table", len(table) == len(ops) + 1),
    (f"FLOPs {flops}, want {want}", abs(flops / want - 1) < 1e-3),
    ("steps", profile["steps"] == 2 and abs(sum(steps) / 2 / profile["ms"] - 1) < 1e-3),
    ("gaps", -0.1 < profile["gaps_percent"] < 50),
    ("calls", all(ops[name]["calls"] == n for name, n in calls.items())),
] if not right]
sys.exit("; ".join(faults) or None)
PYTHON
}
train profile --profile 2 -x 20 -b 4 -d 512
check "--profile splits two steps into ops" "$(check_profile 2>&1)" check_profile
train short --profile 2 -x 3 -b 2 -t 24 --max-seq-len 24 -s 2 -g 30
check "--profile says that a run was too short" "no such line" grep -q "^no profile: 3 steps" "$work/short.out"
check "FP8 samples with a max_seq_len of 24" "$(tail -n 1 "$work/short.out")" grep -q "^mean of steps" "$work/short.out"
train no_profile -x 20 -b 4 -d 512
check "--profile changes no bit" "metrics.jsonl differs" cmp -s <(losses profile step) <(losses no_profile step)

# ----------------------------------------------------------------------------------------------------------------------
# what it says

check "--help" "no usage" grep -q -- '--precision' <("$program" --help)
"$program" -i "$work/train.bin" -j "$work/val.bin" -o "$work/dry" "${shape[@]}" -b 8 --dry-run >"$work/dry.out" 2>&1 || true
check "--dry-run prints the memory plan" "none in: $(tail -n 2 "$work/dry.out")" grep -q 'memory: sum' "$work/dry.out"
check "--dry-run trains nothing" "there is a step line" test "$(grep -c '^step' "$work/dry.out")" -eq 0

# -b auto says what it chose, and is -b N from there on.
train auto -b auto -d 1024
chosen=$(sed -n 's/^-b auto: -b \([0-9]*\), .*/\1/p' "$work/auto.out")
check "-b auto says what it chose" "said '$chosen': $(head -n 3 "$work/auto.out")" test "${chosen:-0}" -ge 1
train pinned -b "${chosen:-1}" -d 1024
check "-b auto is -b $chosen: the same losses" "metrics.jsonl differs" cmp -s <(losses auto step) <(losses pinned step)
"$program" "${shape[@]}" -b auto -d 1024 --dry-run >"$work/dry_auto.out" 2>&1 || true
check "-b auto with --dry-run chooses the same" "said: $(grep '^-b auto' "$work/dry_auto.out")" \
    grep -q "^-b auto: -b $chosen," "$work/dry_auto.out"
check "-b auto with --dry-run lists what there is" "no such table" grep -qE '^ +16 +1 ' "$work/dry_auto.out"

# Bad input: a non-zero exit and exactly one line on stderr, which begins with "error:" and contains the text.
refuses() { # TEXT ARGUMENT...
    local text=$1 status=0 lines
    shift
    timeout 60 "$program" "$@" >"$work/refuse.out" 2>"$work/refuse.err" </dev/null || status=$?
    lines=$(wc -l <"$work/refuse.err")
    if [[ $status -eq 0 ]]; then
        fail "refuses: $text" "exit status 0"
    elif [[ $status -ge 124 ]]; then
        fail "refuses: $text" "exit status $status (crash or hang)"
    elif [[ $lines -ne 1 ]] || ! grep -q '^error: ' "$work/refuse.err"; then
        fail "refuses: $text" "want one error line, got $lines: $(head -n 5 "$work/refuse.err")"
    elif ! grep -qF -- "$text" "$work/refuse.err"; then
        fail "refuses: $text" "said: $(cat "$work/refuse.err")"
    else
        ok "refuses: $text"
    fi
}

good=(-i "$work/train.bin" -j "$work/val.bin" "${shape[@]}" -b 8 -x 2 --threads 1)

refuses "--no-such-flag" "${good[@]}" --no-such-flag 1
refuses "-qq" "${good[@]}" -qq 1
refuses "--batch-size" "${good[@]}" -b zero
refuses "--batch-size" "${good[@]}" -b 0
refuses "auto wants --total-batch-tokens" "${good[@]}" -b auto
refuses "--learning-rate" "${good[@]}" -l nan
refuses "'-l' needs a value" "${good[@]}" -l
refuses "--precision" "${good[@]}" --precision fp4
refuses "--recipe" "${good[@]}" --recipe block
refuses "--resume" "${good[@]}" -y 1
refuses "--recompute" "${good[@]}" -r 1
refuses "--hellaswag" "${good[@]}" -h 1
refuses "d13" -i "$work/train.bin" -j "$work/val.bin" -e d13
refuses "100" "${good[@]}" --channels 100
refuses "--total-batch-tokens" "${good[@]}" -d 1000
refuses "no-such-file" "${good[@]}" -i "$work/no-such-file_*.bin"
refuses "no-such-file" "${good[@]}" -j "$work/no-such-file.bin"
refuses "no-such-model" -i "$work/train.bin" -j "$work/val.bin" -e "$work/no-such-model.bin" -b 8 -t 64

head -c 1000 "$work/train.bin" >"$work/header_only.bin"
refuses "header_only.bin" "${good[@]}" -i "$work/header_only.bin"
head -c 100000 "$work/train.bin" >"$work/truncated.bin"
refuses "truncated.bin" "${good[@]}" -i "$work/truncated.bin"
cp "$work/train.txt" "$work/text.bin"
refuses "text.bin" "${good[@]}" -i "$work/text.bin"
: >"$work/empty.bin"
refuses "empty.bin" "${good[@]}" -i "$work/empty.bin"
head -c 1500 "$work/train.txt" | data/tokenize --byte -o "$work/short.bin" - >/dev/null 2>&1
refuses "short.bin" "${good[@]}" -i "$work/short.bin" -b 64
# tokens of another vocabulary: 300 is none of 257
python3 - "$work" <<'PYTHON'
import struct, sys
tokens = [300] * 5000
with open(sys.argv[1] + "/alien.bin", "wb") as file:
    file.write(struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253) + struct.pack(f"<{len(tokens)}H", *tokens))
PYTHON
refuses "300" "${good[@]}" -i "$work/alien.bin"
head -c 5000 "$work/fp8.bin" >"$work/torn_model.bin"
refuses "torn_model.bin" -i "$work/train.bin" -j "$work/val.bin" -e "$work/torn_model.bin" -b 8 -t 64
refuses "text.bin" -i "$work/train.bin" -j "$work/val.bin" -e "$work/text.bin" -b 8 -t 64
: >"$work/a_file"
refuses "a_file" "${good[@]}" -o "$work/a_file/logs"
refuses "/dev/full" "${good[@]}" --save-model /dev/full
# 3 * 7 rows are not a multiple of 16
refuses "16" -i "$work/train.bin" -j "$work/val.bin" "${shape[@]}" -b 3 -t 7 -x 1
refuses "2000" "${good[@]}" -t 2000

summary
