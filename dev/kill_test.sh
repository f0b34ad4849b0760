#!/usr/bin/env bash
# kill_test.sh [N]: does a run survive `kill -9` at N (default 200) random moments? It checkpoints after every step
# (-n 1 --keep 3), on the CPU program. Needs `make cpu tools`.
#
# A leg is one start of the program with -y 1. It is killed at a moment drawn uniformly from 0.7 of the time that the
# whole run takes, so also while it starts, sweeps up, reads, writes, renames or prunes; the next leg goes on in the
# folder that it left. After every kill a copy of that folder is continued for a moment:
#   - it must find a whole checkpoint, and none older than the last one that any killed leg has announced on its screen;
#   - no announced checkpoint may be called damaged;
#   - its next step must have the loss and gradient norm, to the last bit, of a run that nothing happened to.
# A leg that reaches the end before it is killed ends a round: its logs and its newest checkpoint must be those of the
# undisturbed run, then the next round starts in an empty folder. The last line is "N of N".
#
# SEED=... repeats a sequence of moments (which on another day hit something else); RANKS=2: under mpirun, of which one
# rank is killed.
set -euo pipefail
cd "$(dirname "$0")/.."

kills=${1:-200}
ranks=${RANKS:-1}
RANDOM=${SEED:-$$}
steps=160
source scripts/testing.sh
make_data

launch=()
[[ $ranks -eq 1 ]] || launch=("${on_two_ranks[@]}")

run() { # FOLDER FLAG...
    local folder=$1
    shift
    exec "${launch[@]}" "$program" -i "$work/train.bin" -j "$work/val.bin" -o "$work/$folder" -x "$steps" -n 1 \
        --keep 3 --num-layers 1 --channels 32 --num-heads 2 --max-seq-len 32 --vocab-size 257 -t 32 -b 2 -d 128 \
        -l 2e-3 -u 4 -v 10 -m 2 -s 0 --threads 1 --amax-history 32 "$@" </dev/null
}

seconds_now() { date +%s.%N; }

# The number of the last checkpoint that a screen announces; 0: none.
announced() { # SCREEN
    sed -n 's/^checkpoint step_0*\([1-9][0-9]*\).*/\1/p' "$1" | tail -n 1 | grep . || echo 0
}

# After a kill: continue a copy of the folder by a step or so. Sets why.
why=
look_into() { # ANNOUNCED
    local status=0
    rm -rf "$work/copy"
    [[ ! -e $work/run ]] || cp -r "$work/run" "$work/copy"
    (run copy -y 1 --max-minutes 0.0001) >"$work/copy.out" 2>&1 || status=$?
    if [[ $status -ne 75 && $status -ne 0 ]]; then
        why="continuing ends with exit status $status: $(tail -n 2 "$work/copy.out")"
        return 1
    fi
    why=$(python3 - "$1" "$steps" "$work/copy" "$work/whole" "$work/copy.out" <<'PYTHON'
import json, re, sys
announced, steps, copy, whole, screen = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
text = open(screen).read()
def records(run):
    all_records = map(json.loads, open(run + "/metrics.jsonl"))
    return {r["step"]: (r["loss"], r["grad_norm"]) for r in all_records if r["type"] == "step"}
found, want = records(copy), records(whole)
made = [int(s) - 1 for s in re.findall(r"^step +(\d+)/", text, re.M)]
if made:
    start = made[0]
elif announced == steps or f"step_{steps:08d}" in text:
    start = steps
else:
    sys.exit("no step was made")
if start < announced:
    sys.exit(f"continues with step {start + 1}, but checkpoint {announced} was announced")
for step in made:
    if found.get(step) != want[step]:
        sys.exit(f"step {step + 1}: loss and norm {found.get(step)}, want {want[step]}")
if sorted(found) != list(range(max(found, default=-1) + 1)):
    sys.exit(f"metrics.jsonl has the steps {sorted(found)}")
for step in re.findall(r"step_(\d{8})\b[^\n]*(?:damaged|missing|want )", text):
    if int(step) <= announced:
        sys.exit(f"checkpoint {step} is not whole")
PYTHON
    )
}

# ----------------------------------------------------------------------------------------------------------------------

(run whole) >"$work/whole.out" 2>&1 || { echo "FAILED   the undisturbed run: $(tail -n 3 "$work/whole.out")"; exit 1; }
start=$(seconds_now)
(run timed) >"$work/timed.out" 2>&1
window=$(awk -v a="$start" -v b="$(seconds_now)" 'BEGIN { print 0.7 * (b - a) }')

done_kills=0 good=0 rounds=0 newest=0 in_start=0
begun=$SECONDS
while [[ $done_kills -lt $kills ]]; do
    (run run -y 1) >"$work/run.out" 2>&1 &
    pid=$!
    sleep "$(awk -v w="$window" -v r="$RANDOM" -v s="$RANDOM" 'BEGIN { print w * (r + s / 32768) / 32768 }')"
    victim=$pid
    [[ $ranks -eq 1 ]] || victim=$(pgrep -P "$pid" | tail -n 1) || victim=$pid
    kill -KILL "$victim" 2>/dev/null || true
    status=0
    wait "$pid" 2>/dev/null || status=$?
    if [[ $status -eq 0 ]]; then
        rounds=$((rounds + 1)) newest=0
        if ! difference=$(dev/same_run.py "$work/run" "$work/whole"); then
            echo "FAILED   the end of round $rounds differs from the undisturbed run: $difference"
            failed=$((failed + 1))
        fi
        rm -rf "$work/run"
        continue
    fi
    if [[ $ranks -eq 1 && $status -ne 137 ]]; then
        echo "FAILED   a leg ended with exit status $status: $(tail -n 3 "$work/run.out")"
        failed=$((failed + 1))
        break
    fi
    done_kills=$((done_kills + 1))
    grep -q '^step ' "$work/run.out" || in_start=$((in_start + 1))
    last=$(announced "$work/run.out")
    [[ $last -le $newest ]] || newest=$last
    if look_into "$newest"; then
        good=$((good + 1))
    else
        echo "FAILED   kill $done_kills: $why"
        failed=$((failed + 1))
        keep=build/kill_test_$done_kills
        mkdir -p build && rm -rf "$keep" && cp -r "$work/copy" "$keep" && cp "$work/copy.out" "$work/run.out" "$keep/"
    fi
done
# the last round to its end
status=0
(run run -y 1) >"$work/run.out" 2>&1 || status=$?
if [[ $status -ne 0 ]]; then
    echo "FAILED   the last leg: exit status $status: $(tail -n 3 "$work/run.out")"
    failed=$((failed + 1))
fi
if ! difference=$(dev/same_run.py "$work/run" "$work/whole"); then
    echo "FAILED   the end differs from the undisturbed run: $difference"
    failed=$((failed + 1))
fi

echo "$((rounds + 1)) runs to their end, $in_start kills before a leg's first step, $((SECONDS - begun)) s"
echo "$good of $kills"
[[ $failed -eq 0 && $good -eq $kills ]]
