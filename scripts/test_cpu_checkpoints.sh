#!/usr/bin/env bash
# Checkpoints from end to end, as a user meets them, with the CPU program: continuing is bit-identical to never having
# stopped, whatever stopped the run; what may change at a resume; damaged and unfinished checkpoints; a full disk; which
# checkpoints stay; llm.c's files. Part of `make test`; needs `make cpu tools`. dev/kill_test.sh kills many more times.
set -euo pipefail
cd "$(dirname "$0")/.."

# a program that hangs must not stop the tests for ever
[[ -n ${TESTS_IN_TIME:-} ]] || TESTS_IN_TIME=1 exec timeout 400 "$0" "$@"

source scripts/testing.sh
trap 'kill -KILL $pid $kills 2>/dev/null || true; umount "$work/disk" 2>/dev/null || true; rm -rf "$work"' EXIT
make_data

dev/kill_test.sh 20 >"$work/kills.out" 2>&1 & # beside the other tests
kills=$!

shape=(--num-layers 2 --channels 32 --num-heads 2 --max-seq-len 32 --vocab-size 257 -t 32)
settings=(-l 2e-3 -k constant -c 0.1 -v 10 -m 4 -s 0 --threads 1)
batch=(-b 4 -d 256)   # two micro-steps
long=(-k cosine -u 10 -x 200 -n 30)
launch=()             # or "${on_two_ranks[@]}"
have_mpi=$(command -v mpirun || true)

# ----------------------------------------------------------------------------------------------------------------------
# legs of a run: one start of the program each, output folder $work/NAME, its screen in $work/NAME.out
#
# These and the tests return 0 or 1 and leave the reason in $why.

why='' pid='' current=''

# Start a leg in the background. Flags replace earlier ones of the same name.
start() { # NAME FLAG...
    current=$1
    shift
    : >"$work/$current.out"
    "${launch[@]}" "$program" -i "$work/train.bin" -j "$work/val.bin" -o "$work/$current" "${shape[@]}" \
        "${settings[@]}" "${batch[@]}" "$@" >>"$work/$current.out" 2>&1 </dev/null &
    pid=$!
}

finish() { # STATUS
    local status=0
    wait "$pid" 2>/dev/null || status=$?
    pid=
    [[ $status -eq $1 ]] && return
    why="$current: exit status $status, want $1: $(tail -n 3 "$work/$current.out")"
    return 1
}

# A whole leg.
leg() { # STATUS NAME FLAG...
    local want=$1
    shift
    start "$@"
    finish "$want"
}

# Wait until the running leg's screen has a line; 1 when it ended or 30 s passed without.
await() { # REGEX
    local deadline=$((SECONDS + 30))
    until grep -qE -- "$1" "$work/$current.out"; do
        if ! kill -0 "$pid" 2>/dev/null || [[ $SECONDS -ge $deadline ]]; then
            why="$current: waited for '$1', the screen ends with: $(tail -n 3 "$work/$current.out")"
            return 1
        fi
        sleep 0.01
    done
}

# The last leg's screen has a line like this.
says() { # NAME REGEX
    grep -qiE -- "$2" "$work/$1.out" && return
    why="$1: nothing like '$2' on the screen, the end of which is: $(grep -v '^[|+]' "$work/$1.out" | tail -n 4)"
    return 1
}

# So many training steps were made by the last leg.
steps_made() { # NAME NUMBER
    local found
    found=$(grep -cE '^step +[0-9]+/' "$work/$1.out") || true
    [[ $found -eq $2 ]] && return
    why="$1: made $found steps, want $2"
    return 1
}

# Logs and newest checkpoint of two runs are the same.
same() { # NAME NAME
    why=$(dev/same_run.py "$work/$1" "$work/$2" 2>&1 | head -n 5) && [[ -z $why ]]
}

# The error line of a leg: exactly one, and it contains the text.
refused() { # NAME TEXT
    local lines
    lines=$(grep -c '^error: ' "$work/$1.out") || true
    [[ $lines -eq 1 ]] && grep '^error: ' "$work/$1.out" | grep -qF -- "$2" && return
    why="$1: want one error line with '$2', found $lines: $(tail -n 3 "$work/$1.out")"
    return 1
}

checkpoints() { # NAME: its committed checkpoints' steps on one line
    find "$work/$1" -maxdepth 1 -name 'step_????????' -printf '%f\n' 2>/dev/null | sort | sed 's/^step_0*//' |
        paste -sd ' '
}

no_leftovers() { # NAME
    why=$(find "$work/$1" -name '*.tmp*')
    [[ -z $why ]] && return
    why="left behind: $why"
    return 1
}

# ----------------------------------------------------------------------------------------------------------------------
# 40 steps = 20 steps, checkpoint, exit, 20 steps

in_two() { # NAME FLAG...
    local name=$1 two=$1_two
    shift
    leg 0 "$name" -x 40 -n 20 "$@" && steps_made "$name" 40 && says "$name" '^checkpoint step_00000040' &&
        leg 0 "$two" -x 20 -n 20 "$@" && steps_made "$two" 20 &&
        leg 0 "$two" -x 40 -n 20 -y 1 "$@" && steps_made "$two" 20 && says "$two" 'resumed at step 20' &&
        same "$name" "$two"
}

verdict "20 + 20 steps: FP8, delayed scaling" in_two delayed --precision fp8
verdict "20 + 20 steps: FP8, current scaling" in_two current --precision fp8 --recipe current
verdict "20 + 20 steps: FP8, FP8 head" in_two head --precision fp8 --fp8-lm-head 1
verdict "20 + 20 steps: BF16" in_two bf16 --precision bf16
verdict "20 + 20 steps: FP32" in_two fp32 --precision fp32
verdict "20 + 20 steps: short amax history, rounding to nearest, a block in BF16" in_two odd --amax-history 12 \
    --amax-algo most_recent --param-rounding nearest --bf16-layers 1,0
skipping() { # outliers are judged from step 128 on; a skipped step is none of AdamW's
    leg 0 skips -x 200 -n 170 -sg 0.5 && why="no step was skipped before the checkpoint" &&
        grep -qE '^step 1[0-6]./.*SKIPPED' "$work/skips.out" && leg 0 skips_two -x 170 -n 170 -sg 0.5 &&
        leg 0 skips_two -x 200 -n 170 -sg 0.5 -y 1 && steps_made skips_two 30 && same skips skips_two
}
verdict "170 + 30 steps, some of them skipped" skipping

if [[ $have_mpi ]]; then
    launch=("${on_two_ranks[@]}")
    verdict "20 + 20 steps: FP8 on two ranks" in_two ranks -d 512
    verdict "20 + 20 steps: BF16 on two ranks" in_two ranks_bf16 -d 512 --precision bf16
    launch=()
else
    skip "20 + 20 steps on two ranks" "no mpirun" 2
fi

different() { # NAME NAME: the test of the tests: what differs is seen
    if same "$1" "$2"; then
        why="same_run.py sees no difference between $1 and $2"
        return 1
    fi
}
verdict "same_run.py: another precision is seen" different delayed bf16

# ----------------------------------------------------------------------------------------------------------------------
# stopped at some moment

# A run that was hit by the signal at a random step, and continued. A run that was over before the signal reached it
# proves nothing and is repeated.
interrupted() { # SIGNAL STATUS NAME REFERENCE
    local name=$3 at
    for _ in 1 2 3 4; do
        rm -rf "${work:?}/$name"
        at=$((RANDOM % 110 + 35))
        start "$name" "${long[@]}"
        await "^step +$at/" || continue
        kill -"$1" "$pid"
        finish "$2" || continue
        [[ $2 -ne 75 ]] || says "$name" '^stopped by .*-y. 1 goes on' || return 1
        leg 0 "$name" "${long[@]}" -y 1 && no_leftovers "$name" && same "$name" "$4" && return
        why="hit at step $at: $why"
        return 1
    done
    return 1
}

in_time() { # NAME REFERENCE: legs of --max-minutes, each started by the same command
    local legs=0 status=75
    while [[ $status -eq 75 && $legs -lt 60 ]]; do
        start "$1" "${long[@]}" --max-minutes 0.006 -y 1
        finish 0 && status=0
        [[ $status -eq 0 || $why == *"exit status 75"* ]] || return 1
        legs=$((legs + 1))
    done
    why="$legs legs, the last with exit status $status"
    [[ $status -eq 0 && $legs -gt 1 ]] && same "$1" "$2"
}

leg 0 long "${long[@]}" || fail "200 steps" "$why"
verdict "SIGTERM at a random step, continued" interrupted TERM 75 term long
verdict "SIGUSR1 at a random step, continued" interrupted USR1 75 usr1 long
verdict "SIGINT at a random step, continued" interrupted INT 75 int long
verdict "SIGKILL at a random step, continued" interrupted KILL 137 kill long
verdict "legs of --max-minutes 0.006" in_time minutes long

# The handlers' exit status when a second signal comes while a long step is still at work.
second_signal() { # SIGNAL STATUS
    rm -rf "$work/second"
    start second -d 131072 -x 3 -n 1
    await 'memory: sum' || return 1
    sleep 0.3
    kill -TERM "$pid"
    sleep 0.2
    why="ended at once by the first signal"
    kill -0 "$pid" 2>/dev/null || return 1
    kill -"$1" "$pid"
    finish "$2" && steps_made second 0 && why="left checkpoints $(checkpoints second)" && [[ -z $(checkpoints second) ]]
}
verdict "a second SIGTERM ends at once with 143" second_signal TERM 143
verdict "SIGUSR1 after SIGTERM ends at once with 138" second_signal USR1 138

one_rank_killed() {
    start rank_killed "${long[@]}"
    await "^step +$((RANDOM % 110 + 35))/" || return 1
    kill -KILL "$(pgrep -P "$pid" -f "$program" | tail -n 1)"
    finish 137 || [[ $why == *"exit status"* ]] || return 1
    leg 0 rank_killed "${long[@]}" -y 1 && same rank_killed ranks_long
}
if [[ $have_mpi ]]; then
    launch=("${on_two_ranks[@]}")
    leg 0 ranks_long "${long[@]}" || fail "200 steps on two ranks" "$why"
    verdict "SIGUSR1 under mpirun, continued" interrupted USR1 75 ranks_usr1 ranks_long
    verdict "SIGKILL for one of two ranks, continued" one_rank_killed
    launch=()
else
    skip "signals on two ranks" "no mpirun" 2
fi

# ----------------------------------------------------------------------------------------------------------------------
# what may change at a resume

# The first five losses from step FROM on against those of a run that went on as it was. Prints what it found.
#   paired  the same batches: no loss may be further away than --margin
#   mean    other batches: the means may differ by 4 sigma of a difference of two means of five, where one step's sigma
#           is that of the reference's steps from 15 on, from differences of neighbours so that learning does not count
continues() { # paired|mean NAME REFERENCE FROM [MARGIN]
    why=$(python3 - "$1" "$work/$2" "$work/$3" "$4" "${5:-0}" <<'PYTHON'
import json, sys
kind, run, reference, first, margin = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), float(sys.argv[5])
def losses(folder):
    records = map(json.loads, open(folder + "/metrics.jsonl"))
    return {r["step"]: r["loss"] for r in records if r["type"] == "step"}
found, wanted = losses(run), losses(reference)
steps = range(first, first + 5)
if kind == "paired":
    difference = max(abs(found[s] - wanted[s]) for s in steps)
else:
    late = [wanted[s + 1] - wanted[s] for s in wanted if s >= 15 and s + 1 in wanted]
    sigma = (sum(d * d for d in late) / len(late) / 2) ** 0.5
    margin = 4 * sigma * (2 / 5) ** 0.5
    difference = abs(sum(found[s] - wanted[s] for s in steps)) / 5
print(f"losses from step {first} on differ by {difference:.4f}, want at most {margin:.4f}")
sys.exit(difference > margin)
PYTHON
    )
}

# Twice the largest difference of losses that precision makes by itself: between runs that had their precision from the
# start, over the steps in which switches are made.
switch_margin() {
    python3 - "$work/delayed" "$work/current" "$work/head" "$work/bf16" <<'PYTHON'
import json, sys
def losses(run):
    return [r["loss"] for r in map(json.loads, open(run + "/metrics.jsonl")) if r["type"] == "step"]
print(2 * max(max(step) - min(step) for step in list(zip(*map(losses, sys.argv[1:])))[20:]))
PYTHON
}
margin=$(switch_margin) || fail "margin of the switches" "no losses"

# From REFERENCE's step 20 on with FLAGS until step 30, then back as it was.
switched() { # REFERENCE REGEX-THERE REGEX-BACK FLAGS FLAGS-BACK
    local name=switched_$1_${4//[^a-z0-9]/}
    # shellcheck disable=SC2086 # flags are words
    leg 0 "$name" -x 30 -n 10 -y "$work/$1/step_00000020" $4 && steps_made "$name" 10 && says "$name" "$2" &&
        leg 0 "$name" -x 40 -n 10 -y 1 $5 && steps_made "$name" 10 && says "$name" "$3" &&
        continues paired "$name" "$1" 20 "$margin" && continues paired "$name" "$1" 30 "$margin"
}
verdict "BF16 -> FP8 -> BF16" switched bf16 'precision.*bf16.*fp8' 'precision.*fp8.*bf16' "--precision fp8" \
    "--precision bf16"
verdict "FP8 -> BF16 -> FP8" switched delayed 'precision.*fp8.*bf16' 'precision.*bf16.*fp8' "--precision bf16" \
    "--precision fp8"
verdict "recipe delayed -> current -> delayed" switched delayed 'recipe.*delayed.*current' 'recipe.*current.*delayed' \
    "--recipe current" "--recipe delayed"
verdict "FP8 head on, off" switched delayed 'fp8-lm-head.*0.*1' 'fp8-lm-head.*1.*0' "--fp8-lm-head 1" "--fp8-lm-head 0"
verdict "FP8 head off, on" switched head 'fp8-lm-head.*1.*0' 'fp8-lm-head.*0.*1' "--fp8-lm-head 0" "--fp8-lm-head 1"
verdict "first block in BF16, and back" switched delayed 'bf16-layers.*0,0.*1,0' 'bf16-layers.*1,0.*0,0' \
    "--bf16-layers 1,0" "--bf16-layers 0,0"
verdict "amax history 1,024 -> 16 -> 1,024" switched delayed 'amax-history.*1024.*16' 'amax-history.*16.*1024' \
    "--amax-history 16" "--amax-history 1024"

other_micro_batch() {
    leg 0 micro -x 40 -n 20 -y "$work/delayed/step_00000020" -b 8 && steps_made micro 20 &&
        says micro 'batch-size.*4.*8' && continues mean micro delayed 20
}
verdict "another micro-batch at the same -d" other_micro_batch

other_total_batch() { # tokens so far, and the schedule, go on from where they were
    leg 0 total -x 30 -n 10 -y "$work/delayed/step_00000020" -d 512 && steps_made total 10 || return 1
    why=$(grep '"type": "step", "step": 20,' "$work/total/metrics.jsonl")
    [[ $why == *'"tokens": 5632,'* ]]
}
verdict "another -d: 20 x 256 + 512 tokens" other_total_batch

other_data() {
    leg 0 data -x 30 -n 10 -y "$work/delayed/step_00000020" -i "$work/val.bin" && steps_made data 10 &&
        says data 'other files'
}
verdict "other training files: from their beginning, and it says so" other_data

other_ranks() {
    launch=("${on_two_ranks[@]}")
    leg 0 one_two -x 30 -n 10 -y "$work/delayed/step_00000020" && steps_made one_two 10 &&
        continues mean one_two delayed 20
    local status=$?
    launch=()
    [[ $status -eq 0 ]] && leg 0 one_two -x 40 -n 10 -y 1 && steps_made one_two 10 && continues mean one_two delayed 30
}
if [[ $have_mpi ]]; then
    verdict "1 -> 2 -> 1 ranks" other_ranks
    ranks_to_one() {
        leg 0 two_one -x 40 -n 10 -y "$work/ranks/step_00000020" && steps_made two_one 20 &&
            continues mean two_one ranks 20
    }
    verdict "2 -> 1 ranks" ranks_to_one

    # Rank 1 has another folder than rank 0 under the same name, as on two machines without a disk in common.
    apart() { # FLAG...
        local flags=(-i "$work/train.bin" -j "$work/val.bin" "${shape[@]}" "${settings[@]}" -b 4 -d 512 -o run) status=0
        local own_program
        own_program=$(realpath "$program")
        current=apart
        timeout 60 mpirun --oversubscribe --allow-run-as-root \
            -np 1 -wdir "$work/apart0" "$own_program" "${flags[@]}" "$@" : \
            -np 1 -wdir "$work/apart1" "$own_program" "${flags[@]}" "$@" >"$work/apart.out" 2>&1 </dev/null || status=$?
        why="exit status $status, want 1"
        [[ $status -eq 1 ]]
    }
    apart_writing() { # the folder of the checkpoint is there, left by an earlier run, so rank 1 can write its share
        rm -rf "$work/apart0" "$work/apart1"
        mkdir -p "$work/apart0" "$work/apart1/run/step_00000010.tmp"
        apart -x 10 -n 10 && says apart "rank 1 has written its share, but there is no 'run/" || return 1
        why="checkpoints $(checkpoints apart0/run)"
        [[ -z $(checkpoints apart0/run) ]]
    }
    apart_resuming() {
        rm -rf "$work/apart0" "$work/apart1"
        mkdir -p "$work/apart0" "$work/apart1"
        cp -r "$work/ranks" "$work/apart0/run"
        apart -x 50 -n 10 -y 1 && says apart '^error: the ranks see different checkpoints' && steps_made apart 0
    }
    verdict "ranks with different folders: no checkpoint that lacks a share" apart_writing
    verdict "ranks with different folders: none starts anew beside one that goes on" apart_resuming
else
    skip "other numbers of ranks, and ranks with different folders" "no mpirun" 4
fi

# ----------------------------------------------------------------------------------------------------------------------
# damage

leg 0 whole -x 40 -n 10 || fail "40 steps with four checkpoints" "$why"

flip() { # FILE OFFSET BIT: change one bit; a negative offset counts from the end
    python3 - "$@" <<'PYTHON'
import os, sys
path, offset, bit = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with open(path, "r+b") as file:
    file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
    byte = file.read(1)[0]
    file.seek(-1, os.SEEK_CUR)
    file.write(bytes([byte ^ 1 << bit]))
PYTHON
}

# Do to FILE of the newest checkpoint what the rest of the line says; continuing must find the one before, say which
# file is damaged, and end as the run did that nothing happened to.
falls_back() { # FILE COMMAND...
    local file=$1
    shift
    rm -rf "$work/hurt"
    cp -r "$work/whole" "$work/hurt"
    "$@" || return 1
    leg 0 hurt -x 40 -n 10 -y 1 && steps_made hurt 10 && says hurt "step_00000040.*$file" &&
        says hurt 'resumed at step 30' && why="main.log differs" &&
        cmp -s "$work/hurt/main.log" "$work/whole/main.log" && return
    why="$*: $why"
    return 1
}

damages() { # FILE: every kind of damage
    local path=$work/hurt/step_00000040/$1 size offset
    size=$(stat -c %s "$work/whole/step_00000040/$1")
    # header: magic, table, its end; payload: first byte, a random one, the last one
    for offset in 0 30 4095 4096 $(((RANDOM * 32768 + RANDOM) % size)) -1; do
        falls_back "$1" flip "$path" "$offset" $((RANDOM % 8)) || return 1
    done
    for offset in 0 4096 $((size - 1)); do
        falls_back "$1" truncate -s "$offset" "$path" || return 1
    done
    falls_back "$1" truncate -s +1 "$path" && falls_back "$1" rm "$path" && same hurt whole
}
for file in common.bin shard_00000.bin model.bin; do
    verdict "$file flipped, cut, longer, missing: the checkpoint before it is used" damages "$file"
done

# On two ranks, of which one sees the damage (each checks its own slots, rank 0 the model file) and the other does not.
damage_for_one_rank() { # FILE OFFSET
    rm -rf "$work/hurt"
    cp -r "$work/ranks" "$work/hurt"
    flip "$work/hurt/step_00000040/$1" "$2" 3
    launch=(timeout 60 "${on_two_ranks[@]}") # ranks that wait for each other would do it for ever
    local status=0
    leg 0 hurt -x 40 -n 20 -d 512 -y 1 || status=1
    launch=()
    [[ $status -eq 0 ]] && steps_made hurt 20 && says hurt "^warning: .*$1' is damaged" &&
        says hurt 'resumed at step 20' && same hurt ranks
}
if [[ $have_mpi ]]; then
    # slots of rank 0, of rank 1, v, BF16 weights
    for place in "shard_00000.bin 9000" "shard_00001.bin 9000" "shard_00001.bin -5000" "model.bin 5000"; do
        # shellcheck disable=SC2086 # two words
        verdict "two ranks, a flipped bit in $place: both take the checkpoint before" damage_for_one_rank $place
    done
else
    skip "damaged checkpoints on two ranks" "no mpirun" 4
fi

unfinished() { # killed while writing: a *.tmp folder with half of a file, and `latest` still at the one before
    falls_back '' true && return 1 # no damage: nothing to fall back from
    rm -rf "$work/hurt"
    cp -r "$work/whole" "$work/hurt"
    mv "$work/hurt/step_00000040" "$work/hurt/step_00000040.tmp"
    truncate -s 5000 "$work/hurt/step_00000040.tmp/shard_00000.bin"
    echo step_00000030 >"$work/hurt/latest"
    leg 0 hurt -x 40 -n 10 -y 1 && steps_made hurt 10 && no_leftovers hurt && same hurt whole
}
verdict "an unfinished checkpoint is swept away" unfinished

latest_lies() { # COMMAND...: `latest` may be gone or wrong: the folders count
    rm -rf "$work/hurt"
    cp -r "$work/whole" "$work/hurt"
    rm -r "$work/hurt/step_00000040"
    "$@" || return 1
    leg 0 hurt -x 40 -n 10 -y 1 && steps_made hurt 10 && same hurt whole
}
verdict "latest names what is not there" latest_lies true
verdict "latest is missing" latest_lies rm "$work/hurt/latest"
verdict "latest is not text" latest_lies cp "$program" "$work/hurt/latest"

all_damaged() {
    local before
    rm -rf "$work/hurt"
    cp -r "$work/whole" "$work/hurt"
    for step in 10 20 30 40; do
        flip "$work/hurt/step_000000$step/shard_00000.bin" 9000 3
    done
    before=$(cd "$work/hurt" && sha256sum main.log metrics.jsonl step_*/*)
    leg 1 hurt -x 40 -n 10 -y 1 && refused hurt "$work/hurt" && steps_made hurt 0 || return 1
    why="the folder was changed"
    [[ $(cd "$work/hurt" && sha256sum main.log metrics.jsonl step_*/*) == "$before" ]]
}
fall_back_and_stop() { # --keep counts what was written last, not the damaged one with the highest number
    rm -rf "$work/hurt"
    cp -r "$work/whole" "$work/hurt"
    flip "$work/hurt/step_00000040/shard_00000.bin" 9000 3
    leg 0 hurt -x 36 -n 5 --keep 1 -y 1 && steps_made hurt 6 && leg 0 hurt -x 40 -n 10 -y 1 &&
        says hurt 'resumed at step 36' && steps_made hurt 4 && same hurt whole
}
verdict "fallen back with --keep 1, stopped before the damaged one, continued" fall_back_and_stop

went_back() { # on purpose, in the same folder: from then on the run is the one that was continued
    rm -rf "$work/back"
    cp -r "$work/whole" "$work/back"
    leg 0 back -x 25 -n 5 -y "$work/back/step_00000020" && steps_made back 5 && leg 0 back -x 40 -n 10 -y 1 &&
        says back 'resumed at step 25' && steps_made back 15 && same back whole
}
verdict "-y FOLDER/step_00000020 in the run's own folder, then -y 1" went_back

given_up() { # once the new run is beyond them, the given-up checkpoints are neither a way back nor among the kept
    rm -rf "$work/back"
    cp -r "$work/whole" "$work/back"
    leg 0 back -x 45 -n 25 --keep 3 -y "$work/back/step_00000020" && why="found $(checkpoints back), want 20 25 45" &&
        [[ $(checkpoints back) == "20 25 45" && -d $work/back/step_00000040.old ]] || return 1
    flip "$work/back/step_00000045/shard_00000.bin" 9000 3
    leg 0 back -x 46 -n 25 -y 1 && says back 'resumed at step 25'
}
verdict "the same with another -n: no way back to the given-up checkpoints between" given_up

one_at_a_time() { # a second process neither sweeps the first one's checkpoint away nor moves its log
    rm -rf "$work/busy"
    start busy "${long[@]}"
    await '^checkpoint step_00000030' || return 1
    kill -STOP "$pid"
    local first=$pid status=0
    start busy_too "${long[@]}" -y 1 -o "$work/busy"
    finish 1 && refused busy_too 'another process is writing' || status=1
    kill -CONT "$first"
    current=busy pid=$first
    [[ $status -eq 0 ]] && finish 0 && same busy long
}
verdict "a second run in the folder of one that is not over is refused" one_at_a_time

verdict "all checkpoints damaged: an error, and nothing is touched" all_damaged

damaged_path() { # FILE
    rm -rf "$work/hurt"
    cp -r "$work/whole" "$work/hurt"
    flip "$work/hurt/step_00000040/$1" 5000 0
    leg 1 elsewhere -x 40 -y "$work/hurt/step_00000040" && refused elsewhere step_00000040 &&
        says elsewhere "^warning: .*step_00000040/$1"
}
for file in common.bin shard_00000.bin model.bin; do
    verdict "-y FOLDER with a damaged $file: an error that names it" damaged_path "$file"
done

refuses() { # TEXT FLAG...
    local text=$1
    shift
    leg 1 refused -x 41 "$@" && refused refused "$text" && steps_made refused 0
}
verdict "-y FOLDER of another width is refused" refuses channels -y "$work/whole" --channels 64
verdict "-y FOLDER of another depth is refused" refuses layers -y "$work/whole" --num-layers 3
verdict "-y FOLDER for another size is refused" refuses "$work/whole" -y "$work/whole" --num-layers 0 --channels 0 \
    --num-heads 0 --vocab-size 0 -e d4
verdict "-y of what is not there is refused" refuses no-such-run -y "$work/no-such-run"
verdict "-y of a text file is refused" refuses train.txt -y "$work/train.txt"
verdict "-y 1 without -o is refused" refuses output-dir -y 1 -o ""

fresh() {
    leg 0 fresh -x 20 -n 10 -y 1 && steps_made fresh 20 && says fresh 'no checkpoint' && leg 0 fresh_too -x 20 -n 10 &&
        same fresh fresh_too
}
verdict "-y 1 without a checkpoint starts anew, and says so" fresh

not_without_y() {
    local before
    before=$(cd "$work/fresh" && sha256sum main.log metrics.jsonl step_*/*)
    leg 1 fresh -x 40 -n 10 && refused fresh "-y 1" && why="the folder was changed" &&
        [[ $(cd "$work/fresh" && sha256sum main.log metrics.jsonl step_*/*) == "$before" ]]
}
verdict "a folder with checkpoints is refused without -y" not_without_y

# ----------------------------------------------------------------------------------------------------------------------
# which checkpoints stay

keeps() { # WANTED FLAG...
    local wanted=$1
    shift
    rm -rf "$work/keep"
    leg 0 keep -x 42 -n 5 "$@" || return 1
    why="found $(checkpoints keep), want $wanted"
    [[ $(checkpoints keep) == "$wanted" ]] && no_leftovers keep
}
verdict "--keep 2 --keep-every 20" keeps "20 40 42" --keep 2 --keep-every 20
verdict "--keep 1" keeps "42" --keep 1
verdict "--keep 3 --keep-every 15" keeps "15 30 35 40 42" --keep 3 --keep-every 15
verdict "--keep 0: all" keeps "5 10 15 20 25 30 35 40 42"
verdict "-n 0: none" keeps "" -n 0
verdict "llm.c's -nk, -nm" keeps "20 40 42" -nk 1 -nm 20

latest() { # NAME STEP
    why="$1/latest is '$(cat "$work/$1/latest" 2>&1)', want $2"
    [[ $(cat "$work/$1/latest") == "$2" ]]
}
verdict "latest names the newest" latest whole step_00000040

# ----------------------------------------------------------------------------------------------------------------------
# a full disk

# A limit on the size of files stops every write of a checkpoint, but not that of a log line.
no_space() {
    start space "${long[@]}" -n 10
    await '^checkpoint step_00000010' || return 1
    prlimit --pid "$pid" --fsize=300000: || { why="prlimit"; return 1; }
    await '^warning: THE CHECKPOINT OF STEP [0-9]+ WAS NOT WRITTEN' || return 1
    local seen
    seen=$(grep -cE '^step ' "$work/space.out")
    await "^step +$((seen + 15))/" || return 1
    prlimit --pid "$pid" --fsize=unlimited: || { why="prlimit"; return 1; }
    finish 0 && no_leftovers space && same space long
}
verdict "a checkpoint that cannot be written: training goes on, later ones are written" no_space

tried_again() { # a tenth of -n later, not at the next multiple of it
    rm -rf "$work/space"
    start space "${long[@]}" -n 100
    await '^step +50/' || return 1
    prlimit --pid "$pid" --fsize=300000: || { why="prlimit"; return 1; }
    await '^warning: THE CHECKPOINT OF STEP 100 WAS NOT WRITTEN' || return 1
    prlimit --pid "$pid" --fsize=unlimited: || { why="prlimit"; return 1; }
    finish 0 && says space '^checkpoint step_000001[1-9]0' && same space long
}
verdict "it is tried again soon" tried_again

never_space() { # all but the first fail: it stays, and the run can be continued from it
    rm -rf "$work/space"
    start space "${long[@]}" -n 20 --keep 1
    await '^checkpoint step_00000020' || return 1
    prlimit --pid "$pid" --fsize=300000: || { why="prlimit"; return 1; }
    finish 1 || return 1
    why="checkpoints $(checkpoints space)"
    [[ $(checkpoints space | wc -w) -eq 1 ]] && no_leftovers space && leg 0 space "${long[@]}" -y 1 && same space long
}
verdict "no checkpoint can be written any more: the last good one stays" never_space

full_disk() {
    mount -t tmpfs -o size=5m tmpfs "$work/disk"
    start disk "${long[@]}" -n 10 --keep 1 -o "$work/disk/run"
    await '^checkpoint step_00000010' || return 1
    dd if=/dev/zero of="$work/disk/filler" bs=4096 2>/dev/null || true
    await '^warning: THE CHECKPOINT OF STEP [0-9]+ WAS NOT WRITTEN' || return 1
    local seen
    seen=$(grep -cE '^step ' "$work/disk.out")
    await "^step +$((seen + 15))/" || return 1
    rm "$work/disk/filler"
    seen=$(grep -cE '^checkpoint' "$work/disk.out")
    finish 0 || return 1
    rm -rf "$work/space"
    cp -r "$work/disk/run" "$work/space"
    umount "$work/disk"
    no_leftovers space && same space long
}
mkdir "$work/disk"
if mount -t tmpfs -o size=5m tmpfs "$work/disk" 2>/dev/null; then
    umount "$work/disk"
    verdict "a full disk: training goes on, checkpoints when there is room again" full_disk
else
    skip "a full disk" "no right to mount a small file system"
fi

# ----------------------------------------------------------------------------------------------------------------------
# llm.c's files

exported() { # NAME PROCESSES
    leg 0 "$1_writer" -x 20 --precision fp32 --export-llmc "$work/$1" --export-llmc-processes "$2" || return 1
    why="$1 holds $(find "$work/$1" -printf '%f ')"
    [[ -e $work/$1/model_00000020.bin && -e $work/$1/DONE_00000020 ]] &&
        [[ $(find "$work/$1" -name 'state_00000020_?????.bin' | wc -l) -eq $2 ]] &&
        leg 0 "$1_from" -x 40 -n 20 --precision fp32 -y "$work/$1/model_00000020.bin" && steps_made "$1_from" 20 &&
        continues paired "$1_from" fp32 20 "$margin"
}
verdict "llm.c: exported, and continued from the model file" exported llmc 1
verdict "llm.c: exported for two processes, joined again" exported llmc2 2
verdict "llm.c: the same from one state and from two" same llmc_from llmc2_from

folder_of_llmc() {
    cp -r "$work/llmc" "$work/llmc_folder"
    leg 0 llmc_folder -x 40 -n 20 --precision fp32 -y 1 && steps_made llmc_folder 20 && same llmc_folder llmc_from
}
verdict "llm.c: -y 1 in a folder of llm.c's" folder_of_llmc

shared=${SHARED_DATA:-../shared/data}
real_llmc() { # PRECISION
    shape=() batch=(-e d2 -b 1 -t 1024 -d 1024)
    leg 0 "real_$1" -i "$work/gpt2_val.bin" -j "" -x 502 --threads 2 --precision "$1" \
        -y "$shared/llmc/d2_model_00000500.bin" && says "real_$1" '^step +501/502 ' &&
        says "real_$1" '^step +502/502 ' || return 1
    why=$(awk '/^s:50[01] trl/ { sub("trl:", "", $2); if (!($2 < 6.5 && $2 > 5)) { print; bad = 1 } n++ }
        END { if (n != 2) { print n " steps in main.log"; bad = 1 } exit bad }' "$work/real_$1/main.log")
}
if [[ ! -e $shared/llmc/d2_state_00000500_00000.bin || ! -e $shared/corpus/gpt2_val.bin.xz ]]; then
    skip "llm.c's own d2" "no $shared" 3
elif ! xz -dc "$shared/corpus/gpt2_val.bin.xz" >"$work/gpt2_val.bin"; then
    skip "llm.c's own d2" "no xz" 3
else
    tiny=("${shape[@]}") tiny_batch=("${batch[@]}")
    for precision in fp8 bf16 fp32; do
        verdict "llm.c's own d2 at step 500 continued in $precision" real_llmc "$precision"
    done
    shape=("${tiny[@]}") batch=("${tiny_batch[@]}")
fi

# ----------------------------------------------------------------------------------------------------------------------

killed() {
    local status=0
    wait "$kills" || status=$?
    why=$(tail -n 3 "$work/kills.out")
    [[ $status -eq 0 && $why == *"20 of 20" ]]
}
verdict "kill -9 at 20 random moments (dev/kill_test.sh)" killed

summary
