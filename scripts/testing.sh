# shellcheck shell=bash disable=SC2034
# What the end-to-end tests of the CPU program share: a folder to work in, their lines (ok, FAILED, skipped) and total,
# and tokens to train on. To be sourced from the repository's root under `set -euo pipefail`.

export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
program=${PROGRAM:-./train_gpt_fp8_cpu}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
passed=0 failed=0 skipped=0

ok() {
    echo "ok       $1"
    passed=$((passed + 1))
}

fail() { # NAME WHY
    echo "FAILED   $1: $2"
    failed=$((failed + 1))
}

skip() { # NAME WHY [HOW-MANY]
    echo "skipped  $1: $2"
    skipped=$((skipped + ${3:-1}))
}

check() { # NAME WHY-IF-NOT COMMAND...
    local name=$1 why=$2
    shift 2
    if "$@"; then ok "$name"; else fail "$name" "$why"; fi
}

# A test that returns 0 or 1 and leaves the reason in $why. A script's own `after_test`, if it has one, comes after it.
verdict() { # NAME TEST ARGUMENT...
    local name=$1
    shift
    why=
    if "$@"; then ok "$name"; else fail "$name" "$why"; fi
    if declare -F after_test >/dev/null; then after_test; fi
}

# The last line of a test, and its exit status.
summary() {
    echo "$passed passed, $failed failed, $skipped skipped"
    [[ $failed -eq 0 ]]
}

# $work/train.bin and $work/val.bin: bytes of the default corpus.
make_data() {
    data/make_corpus --bytes 400000 --seed 3 -o "$work/train.txt" --val-bytes 20000 --val-output "$work/val.txt" \
        >"$work/log" 2>&1
    data/tokenize --byte -o "$work/train.bin" "$work/train.txt" >>"$work/log" 2>&1
    data/tokenize --byte -o "$work/val.bin" "$work/val.txt" >>"$work/log" 2>&1
}

on_two_ranks=(mpirun -np 2 --oversubscribe --allow-run-as-root)
mpi() { "${on_two_ranks[@]}" "$@"; }
