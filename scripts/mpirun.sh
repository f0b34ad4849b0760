#!/usr/bin/env bash
# mpirun.sh ARGUMENT...: mpirun, stopped well. mpirun passes on SIGUSR1 only, and ends its ranks at once on SIGTERM or
# Ctrl-C; here any of the three becomes SIGUSR1, which train_gpt_fp8 answers with a checkpoint and exit status 75.
set -euo pipefail

run='' asked=''
pass_on() {
    asked=1
    [[ -z $run ]] || kill -USR1 "$run" 2>/dev/null || true
}
trap pass_on USR1 TERM INT # before there is anything to stop: no signal may find this script without it
mpirun "$@" &
run=$!
[[ -z $asked ]] || pass_on
while :; do # a signal interrupts `wait`
    status=0
    wait "$run" || status=$?
    kill -0 "$run" 2>/dev/null || exit "$status"
done
