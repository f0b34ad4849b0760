#!/usr/bin/env bash
# Several ranks from end to end, as a user meets them, with the CPU program under mpirun: what they compare at start-up;
# that they train what one rank trains, and go on from each other's checkpoints; a rank that is killed, stopped or late,
# at every stage of a run; what the logs say of communication. Part of `make test`; needs `make cpu tools`. The watchdog's
# own tests, by collective, are in dev/host/test_comm.c.
set -euo pipefail
cd "$(dirname "$0")/.."

# a program that hangs must not stop the tests for ever
[[ -n ${TESTS_IN_TIME:-} ]] || TESTS_IN_TIME=1 exec timeout 400 "$0" "$@"

source scripts/testing.sh
if ! command -v mpirun >/dev/null; then
    skip "several ranks" "no mpirun"
    summary
    exit
fi
trap 'end_all; rm -rf "$work"' EXIT
export OMP_NUM_THREADS=1
program=$(realpath "$program") # ranks may run in folders of their own
make_data

shape=(--num-layers 2 --channels 32 --num-heads 2 --max-seq-len 32 --vocab-size 257 -t 32)
settings=(-i "$work/train.bin" -j "$work/val.bin" -l 2e-3 -k constant -b 4 -d 768 -v 0 -m 4 -s 0 --threads 1)
endless=(-x 1000000)
impatient=(--comm-timeout 3)
big=(--channels 256 --num-heads 4 --vocab-size 16384) # its checkpoints, of 80 MB, and its start take a moment
launcher=(mpirun --oversubscribe --allow-run-as-root)

# ----------------------------------------------------------------------------------------------------------------------
# runs: started in the background, folder $work/NAME, screen in $work/NAME.out. A rank is found by the run's folder in its
# command line and by its number in its environment.
#
# These and the tests return 0 or 1 and leave the reason in $why.

why='' pid='' current='' began=0 took=0

begin() { # NAME COMMAND...
    current=$1
    shift
    : >"$work/$current.out"
    began=$SECONDS
    timeout -k 1 60 "$@" >>"$work/$current.out" 2>&1 </dev/null &
    pid=$!
}

# A run of N ranks. Flags replace earlier ones of the same name.
start() { # NAME RANKS FLAG...
    local name=$1 ranks=$2
    shift 2
    begin "$name" "${launcher[@]}" -np "$ranks" "$program" "${shape[@]}" "${settings[@]}" -o "$work/$name" "$@"
}

# The same, but mpirun leaves the others alone when a rank ends, as srun does: what they say is their own. Each prints
# the status it ends with.
start_unattended() { # NAME RANKS FLAG...
    local name=$1 ranks=$2
    shift 2
    begin "$name" "${launcher[@]}" --enable-recovery -np "$ranks" sh -c '"$@"; echo "exit status $?"' rank "$program" \
        "${shape[@]}" "${settings[@]}" -o "$work/$name" "$@"
}

# A run of two ranks of which the second has more flags.
start_unlike() { # NAME FLAG...
    local name=$1 common=("${shape[@]}" "${settings[@]}" -o "$work/$1" -x 20)
    shift
    begin "$name" "${launcher[@]}" -np 1 "$program" "${common[@]}" : -np 1 "${second:-$program}" "${common[@]}" "$@"
}

# Wait for the end of the run; 1 when that is not its status.
finish() { # STATUS
    local status=0
    wait "$pid" 2>/dev/null || status=$?
    pid=
    took=$((SECONDS - began))
    [[ $status -eq $1 ]] && return
    why="$current: exit status $status, want $1: $(tail -n 8 "$work/$current.out")"
    return 1
}

# The same for an error's status, of mpirun's own choice; `recovering` mpiruns may say 0. Nobody is left, and in time.
finish_badly() { # [recovering]
    local status=0
    wait "$pid" 2>/dev/null || status=$?
    pid=
    took=$((SECONDS - began))
    if [[ $status -eq 124 || $took -gt 30 || ($status -eq 0 && -z ${1:-}) ]]; then
        why="$current: exit status $status after $took s, want an error: $(tail -n 8 "$work/$current.out")"
        return 1
    fi
    nobody_left
}

leg() { # STATUS NAME RANKS FLAG...
    local want=$1
    shift
    start "$@"
    finish "$want"
}

await() { # REGEX on the running run's screen, for 30 s at most
    local deadline=$((SECONDS + 30))
    until grep -qE -- "$1" "$work/$current.out"; do
        if ! kill -0 "$pid" 2>/dev/null || [[ $SECONDS -ge $deadline ]]; then
            why="$current: waited for '$1', the screen ends with: $(tail -n 5 "$work/$current.out")"
            return 1
        fi
        sleep 0.02
    done
}

says() { # REGEX [NUMBER-OF-LINES]: on the last run's screen
    local found
    found=$(grep -cE -- "$1" "$work/$current.out") || true
    [[ $found -eq ${2:-$found} && $found -gt 0 ]] && return
    why="$current: $found lines like '$1', want ${2:-one}: $(grep -v '^[|+]' "$work/$current.out" | tail -n 6)"
    return 1
}

says_nothing_like() { # REGEX
    grep -qE -- "$1" "$work/$current.out" || return 0
    why="$current: says $(grep -E -- "$1" "$work/$current.out" | head -n 2)"
    return 1
}

# Ranks of the running run: "PID RANK" lines.
ranks_now() {
    local process rank
    for process in /proc/[0-9]*; do
        [[ $(readlink "$process/exe" 2>/dev/null) == "$program" ]] || continue
        { grep -qazxF -- "$work/$current" "$process/cmdline" &&
            rank=$(grep -az '^OMPI_COMM_WORLD_RANK=' "$process/environ" | tr -d '\0') &&
            echo "${process#/proc/} ${rank#*=}"; } 2>/dev/null || true
    done
}

victim='' # a rank's process, for kill

choose() { # RANK
    victim=$(ranks_now | sed -n "s/ $1\$//p")
    [[ -n $victim ]] && return
    why="$current: no process is rank $1: $(tail -n 5 "$work/$current.out")"
    return 1
}

send() { # SIGNAL RANK
    choose "$2" && kill "-$1" "$victim"
}

# The run that is still there, as after a failed test.
end_all() {
    local process
    while read -r process _; do
        kill -KILL "$process" 2>/dev/null || true
    done < <(ranks_now)
    [[ -z $pid ]] || kill -KILL "$pid" 2>/dev/null || true
    pid=
}
after_test() { end_all; } # of testing.sh's verdict

nobody_left() {
    local left
    for _ in {1..40}; do
        left=$(ranks_now)
        [[ -n $left ]] || return 0
        sleep 0.05
    done
    why="$current: left behind: $left"
    return 1
}

# ----------------------------------------------------------------------------------------------------------------------
# what ranks compare at start-up

# Refused by all ranks, with one line, before anything is trained or written.
refused() { # TEXT
    finish 1 && says '^error: ' 1 && nobody_left && says_nothing_like '^step ' || return 1
    grep '^error: ' "$work/$current.out" | grep -qF -- "$1" && [[ ! -e $work/$current/main.log ]] && return
    why="$current: want '$1' and no log: $(grep '^error: ' "$work/$current.out")"
    return 1
}

unlike() { # NAME TEXT FLAG...
    local name=$1 text=$2
    shift 2
    start_unlike "$name" "$@"
    refused "$text"
}
verdict "another learning rate on one rank" unlike other_rate \
    "the ranks differ: --learning-rate is 0.002 on rank 0, 0.0006 on rank 1" -l 0.0006
verdict "another -x on one rank" unlike other_steps "--max-steps is 20 on rank 0, 30 on rank 1" -x 30
verdict "validation at other steps on one rank" unlike other_val "--val-every is 0 on rank 0, 7 on rank 1" -v 7
verdict "another -o on one rank" unlike other_output "--output-dir is $work/other_output on rank 0, $work/b on rank 1" \
    -o "$work/b"
verdict "two differences: both are named" unlike other_two \
    "--precision is fp8 on rank 0, bf16 on rank 1; --checkpoint-every is 0 on rank 0, 5 on rank 1" -n 5 --precision bf16
verdict "another model on one rank" unlike other_model "--num-layers is 2 on rank 0, 3 on rank 1" --num-layers 3

other_threads() {
    start_unlike other_threads --threads 2 --checkpoint-memory 1
    finish 0 && says '^step +20/20 ' 1
}
verdict "what belongs to a host may differ" other_threads

# The version is a text in the program: a program with other digits there is another version.
other_version() {
    local version status=0
    version=$("$program" --version | sed 's/^train_gpt_fp8 //')
    sed "s/${version//./\\.}/${version//[0-9]/_}/" "$program" >"$work/other_program"
    chmod +x "$work/other_program"
    second=$work/other_program start_unlike other_version
    refused "the ranks differ: program version: $version on rank 0, ${version//[0-9]/_} on rank 1" || status=1
    return $status
}
verdict "another version of the program on one rank" other_version

# The same command line finds other files, as on hosts that do not share a disk.
mkdir "$work/host0" "$work/host1"
ln -s "$work/train.bin" "$work/host0/a_train.bin"
ln -s "$work/val.bin" "$work/host0/val.bin"
ln -s "$work/train.bin" "$work/host1/a_train.bin"
ln -s "$work/val.bin" "$work/host1/val.bin"
on_two_hosts() { # NAME FLAG...
    local name=$1 flags=("${shape[@]}" "${settings[@]}" -o "$work/$1" -i 'a_*.bin' -j val.bin -x 2)
    shift
    begin "$name" "${launcher[@]}" -np 1 -wdir "$work/host0" "$program" "${flags[@]}" "$@" : \
        -np 1 -wdir "$work/host1" "$program" "${flags[@]}" "$@"
}
other_data() { # NAME TEXT FLAG...
    local name=$1 text=$2
    shift 2
    on_two_hosts "$name" "$@"
    refused "$text"
}
alike_data() {
    on_two_hosts alike_data
    finish 0 && says '^step +2/2 ' 1
}
verdict "the same files on two hosts" alike_data
ln -s "$work/val.bin" "$work/host1/a_zusatz.bin"
tokens=$(("($(stat -c %s "$work/train.bin") - 1024) / 2"))
more=$((tokens + "($(stat -c %s "$work/val.bin") - 1024) / 2"))
verdict "one more training file on one host" other_data other_data \
    "training data (-i): $tokens tokens in 1 file, names and sizes"
verdict "and how many tokens it has" says "[^0-9]$more tokens in 2 files"
rm "$work/host1/a_zusatz.bin" "$work/host1/val.bin"
ln -s "$work/train.bin" "$work/host1/val.bin"
verdict "another validation file on one host" other_data other_val_data "validation data (-j): " -v 1
rm "$work/host1/a_train.bin"
no_data() { # the line of the rank that has none; the others end with it
    on_two_hosts no_data
    finish 1 && says "^error: .*'a_\*\.bin'" 1 && nobody_left
}
verdict "no training file on one host" no_data
leg 0 a_model 1 -x 1 --save-model "$work/host0/model.bin"
leg 0 b_model 1 -x 2 --save-model "$work/host1/model.bin"
ln -sf "$work/train.bin" "$work/host1/a_train.bin"
other_weights() {
    local shape=(-t 32)
    on_two_hosts other_weights -e ./model.bin
    refused "weights of the model file (-e): "
}
verdict "another model file on one host" other_weights

# ----------------------------------------------------------------------------------------------------------------------
# N ranks train what one rank trains: 20 steps on one batch of 16 sequences, however they are dealt

# A run of FORMAT on RANKS ranks with --zero-stage ZERO; the two of 4 ranks have a checkpoint of step 10, too.
dealt() { # NAME FORMAT RANKS ZERO FLAG...
    local name=$1 format=$2 ranks=$3 zero=$4
    shift 4
    leg 0 "$name" "$ranks" --precision "$format" -z "$zero" -a 1 -l 5e-4 -x 20 -d 512 -b $((16 / ranks)) "$@"
}

# From step FROM on, losses and gradient norms of two runs. FP32 sums in another order are all that differs of fp32:
# 1e-6 is 10 units in the last place of the norm, measured 1. In fp8 it is also the gradients' rounding on the wire, and
# scales that a rank measures on its part of the batch while they warm up: measured 1e-4 of the loss and 0.4% of the
# norm. The losses fall by 10% meanwhile; Adam hides a factor in the gradients from them, which the norm shows.
alike() { # RUN REFERENCE FORMAT FROM
    why=$(python3 - "$work/$1" "$work/$2" "$3" "$4" <<'PYTHON'
import json, sys
run, reference, form, first = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
def steps(folder):
    records = map(json.loads, open(folder + "/metrics.jsonl"))
    return {r["step"]: r for r in records if r["type"] == "step" and r["step"] >= first}
found, wanted = steps(run), steps(reference)
if sorted(found) != sorted(wanted) or len(wanted) != 20 - first:
    print(f"steps {sorted(found)} and {sorted(wanted)}")
for key, most in [("loss", 1e-6 if form == "fp32" else 1e-3), ("grad_norm", 1e-6 if form == "fp32" else 0.02)]:
    off = max((abs(found[s][key] / wanted[s][key] - 1), s) for s in wanted)
    if not off[0] <= most:
        print(f"{key} of step {off[1]} is off by {off[0]:.2g}, want at most {most:g}")
PYTHON
    ) && [[ -z $why ]]
}
same() { # RUN RUN
    why=$(dev/same_run.py "$work/$1" "$work/$2" 2>&1 | head -n 5) && [[ -z $why ]]
}

like_one_rank() { # FORMAT RANKS ZERO
    local saves=()
    [[ $2 -lt 4 ]] || saves=(-n 10)
    dealt "$1_$2_$3" "$1" "$2" "$3" "${saves[@]}" && alike "$1_$2_$3" "$1_1" "$1" 0
}
for format in fp32 fp8; do
    dealt "${format}_1" "$format" 1 1 || fail "$format on one rank" "$why"
    for zero in 1 0; do
        verdict "$format on 2 ranks, -z $zero: losses and norms of one rank" like_one_rank $format 2 $zero
        verdict "$format on 4 ranks, -z $zero: losses and norms of one rank" like_one_rank $format 4 $zero
    done
done

again() { # ZERO
    dealt "fp8_4_$1_again" fp8 4 "$1" -n 10 && same "fp8_4_$1_again" "fp8_4_$1"
}
verdict "fp8 on 4 ranks twice: the same bits" again 1
verdict "fp8 on 4 ranks twice, -z 0: the same bits" again 0

# The run of 4 ranks from its checkpoint of step 10 on, in a folder of its own.
continued() { # NAME FORMAT OLD-ZERO RANKS ZERO
    cp -r "$work/$2_4_$3" "$work/$1" && rm -r "$work/$1/step_00000020" && dealt "$1" "$2" "$4" "$5" -n 10 -y 1 &&
        says 'resumed at step 10 from' 1
}
continues_same() { # ZERO
    continued "goes_on_4_$1" fp8 "$1" 4 "$1" && same "goes_on_4_$1" "fp8_4_$1"
}
continues_alike() { # FORMAT OLD-ZERO RANKS ZERO
    continued "goes_on_$1_$2_$3" "$@" && alike "goes_on_$1_$2_$3" "$1_1" "$1" 10
}
verdict "a checkpoint of 4 ranks goes on on 4: the same bits" continues_same 1
verdict "a checkpoint of 4 ranks, -z 0, goes on on 4: the same bits" continues_same 0
for format in fp32 fp8; do
    verdict "$format: a checkpoint of 4 ranks goes on on 2, with -z 0" continues_alike $format 1 2 0
    verdict "$format: a checkpoint of 4 ranks, -z 0, goes on on 2, with -z 1" continues_alike $format 0 2 1
    verdict "$format: a checkpoint of 4 ranks goes on on 1" continues_alike $format 1 1 1
done

# ----------------------------------------------------------------------------------------------------------------------
# a rank is gone

# Every rank but the victim says who is missing and where it was, and ends with status 1.
named() { # RANKS VICTIM HOW
    finish_badly recovering && says "^error: rank [0-9]+ of $1, .*: .*rank $2 \(.*, process [0-9]+\) $3" $(($1 - 1)) &&
        says '^exit status 1$' $(($1 - 1))
}

dies() { # SIGNAL HOW RANKS VICTIM
    start_unattended "dies_$1_$3_$4" "$3" "${endless[@]}" "${impatient[@]}"
    await '^step +20/' && send "$1" "$4" && named "$3" "$4" "$2"
}
verdict "a rank is killed while it trains" dies KILL 'has ended, last heard of' 3 1
verdict "rank 0 is killed while it trains" dies KILL 'has ended, last heard of' 2 0

# With mpirun as everybody uses it, which ends the others at once and says so.
dies_attended() {
    start dies_attended 2 "${endless[@]}" "${impatient[@]}"
    await '^step +20/' && send KILL 1 && finish_badly &&
        says 'rank 1 .*(exited on|signal 9)|(exited on|signal 9).*rank 1'
}
verdict "a rank is killed under an ordinary mpirun: all end" dies_attended

# A rank that is stopped never says so. The first of the others that ends makes mpirun end them all.
stops() { # RANKS VICTIM
    start "stops_$1_$2" "$1" "${endless[@]}" "${impatient[@]}"
    await '^step +20/' && send STOP "$2" && finish_badly &&
        says "^error: rank [0-9]+ of $1, in .* \(collective [0-9]+\): .*rank $2 \(.*\) gives no sign of life for "
}
verdict "a rank is stopped while it trains" stops 3 2
verdict "rank 0 is stopped while it trains" stops 2 0

# 1.5 s are less than the timeout: nothing is lost, and nothing is said.
pauses() {
    start pauses 2 -x 200 --comm-timeout 6
    await '^step +20/' && send STOP 1 && sleep 1.5 && send CONT 1 && finish 0 && says '^step +200/200 ' 1 &&
        says_nothing_like '^(error|warning)'
}
verdict "a rank is stopped for a moment" pauses

# While it starts: the line of the settings is out, the weights are being made.
at_start() { # SIGNAL HOW
    start_unattended "at_start_$1" 2 "${big[@]}" "${endless[@]}" "${impatient[@]}"
    await 'program version' && send "$1" 1 && await '^error: ' || return 1
    kill -KILL "$victim" 2>/dev/null || true # unattended, nobody does that
    named 2 1 "$2"
}
verdict "a rank is killed while the run starts" at_start KILL 'has ended, last heard of'
verdict "a rank is stopped while the run starts" at_start STOP 'gives no sign of life for '

# It runs out of memory: one rank may have 60 MiB more than a small run takes, and the model wants 120.
out_of_memory() {
    local flags=("${shape[@]}" "${settings[@]}" "${big[@]}" "${endless[@]}" "${impatient[@]}") kib
    start memory 2 "${endless[@]}"
    await '^step +1/' && choose 1 && kib=$(sed -n 's/^VmPeak: *\([0-9]*\) kB/\1/p' "/proc/$victim/status") || return 1
    end_all
    begin out_of_memory "${launcher[@]}" --enable-recovery \
        -np 1 sh -c '"$@"; echo "exit status $?"' rank "$program" "${flags[@]}" -o "$work/out_of_memory" : \
        -np 1 sh -c "ulimit -v $((kib + 61440)); \"\$@\"" rank "$program" "${flags[@]}" -o "$work/out_of_memory"
    named 2 1 'has ended, last heard of' && says '^error: out of host memory: wanted [0-9]+ bytes' 1
}
verdict "a rank runs out of memory" out_of_memory

# ----------------------------------------------------------------------------------------------------------------------
# a rank is gone while a checkpoint is written: the one before is whole, and the run goes on from it

# Wait until the run writes a checkpoint.
await_writing() {
    local deadline=$((SECONDS + 30)) folder
    while [[ $SECONDS -lt $deadline ]]; do
        for folder in "$work/$current"/step_*.tmp; do
            [[ ! -d $folder ]] || return 0
        done
    done
    why="$current: no checkpoint was begun"
    return 1
}

while_saving() { # SIGNAL
    local name=saving_$1 tries last
    for tries in {1..5}; do # until the signal has met an unfinished checkpoint
        rm -rf "${work:?}/$name"
        start "$name" 2 "${big[@]}" "${endless[@]}" "${impatient[@]}" -n 2 -nk 2
        await '^checkpoint step_00000002' && choose 1 && await_writing && kill "-$1" "$victim" && finish_badly || return 1
        ! compgen -G "$work/$name/step_*.tmp" >/dev/null || break
        why="$name: no unfinished checkpoint after $tries tries"
        [[ $tries -lt 5 ]] || return 1
    done
    last=$(find "$work/$name" -maxdepth 1 -name 'step_????????' -printf '%f\n' | sort | tail -n 1)
    last=$((10#${last#step_}))
    start "$name" 2 "${big[@]}" -x $((last + 2)) -n 2 -y 1
    finish 0 && says "resumed at step $last from" 1 && says_nothing_like '^warning: cannot go on' &&
        says "^step +$((last + 2))/" 1
}
verdict "a rank is killed while a checkpoint is written" while_saving KILL
verdict "a rank is stopped while a checkpoint is written" while_saving STOP

# ----------------------------------------------------------------------------------------------------------------------
# a rank that is late for a good reason

# A text sample of rank 0 takes several times the timeout.
samples() {
    start samples 2 --max-seq-len 1024 -t 128 -b 8 -d 2048 --channels 128 -x 2 -s 1 -g 800 --comm-timeout 3
    finish 0 && says '^step +2/2 ' 1 || return 1
    why="samples: took $took s, want more than 10, or the test shows nothing"
    [[ $took -gt 10 ]]
}
verdict "the others wait while rank 0 writes a sample" samples

# ----------------------------------------------------------------------------------------------------------------------
# what the logs say

# Every step sends the same, validation is not counted, and the numbers are those of the screen's last line.
counts() { # RANKS
    leg 0 "counts_$1" "$1" -x 12 -v 3 && says '^step .* comm [0-9.]+ ms, [0-9.]+ exposed' 12 || return 1
    why=$(check_counts "$work/$current" "$1" 2>&1) && [[ -z $why ]]
}
check_counts() { # RUN RANKS
    python3 - "$@" <<'PYTHON'
import json, re, sys
run, ranks = sys.argv[1], int(sys.argv[2])
records = [json.loads(line) for line in open(run + "/metrics.jsonl")]
parameters = records[0]["config"]["num_parameters"]
steps = [r for r in records if r["type"] == "step"]
sent = {r["comm_bytes"] for r in steps}
line, = re.findall(r"^communication: ([\d.]+) wire bytes .*: ([\d.]+) of BF16 .*, ([\d.]+) of FP32 and BF16",
                   open(run + ".out").read(), re.M)
per_parameter, of_bf16, of_fp32 = map(float, line)
part = (ranks - 1) / ranks
for text, right in [
    (f"bytes of the steps {sent}, want one number", len(sent) == 1),
    (f"{per_parameter} bytes per parameter, metrics.jsonl has {sent}",
     abs(per_parameter - sum(r["comm_bytes"] for r in steps) / len(steps) / parameters) < 6e-4),
    (f"{of_bf16} of BF16", abs(of_bf16 - per_parameter / (4 * part)) < 2e-3),
    (f"{of_fp32} of FP32", abs(of_fp32 - per_parameter / (6 * part)) < 2e-3),
    ("a step without time", all(0 < r["comm_exposed_ms"] <= r["comm_ms"] * 1.001 for r in steps)),
    ("more than the step's time", all(r["comm_ms"] < r["ms"] for r in steps if r["step"] % 3 != 0)), # not validated between
    ("bandwidth", all(abs(r["comm_gb_per_s"] / (1e-6 * r["comm_bytes"] / r["comm_ms"]) - 1) < 1e-2 for r in steps)),
]:
    if not right:
        print(text)
PYTHON
}
verdict "2 ranks: communication in log and screen" counts 2
verdict "3 ranks: communication in log and screen" counts 3
alone() {
    leg 0 alone 1 -x 3 && says_nothing_like '\| comm |^communication' || return 1
    why="metrics.jsonl speaks of communication"
    ! grep -q comm_bytes "$work/alone/metrics.jsonl"
}
verdict "one rank says nothing of communication" alone

summary
