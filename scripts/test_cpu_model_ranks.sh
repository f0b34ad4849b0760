#!/usr/bin/env bash
# The model on 2 and 3 ranks, CPU floor: the tests of dev/test_ranks.h under mpirun. Part of `make test`; needs
# `make test_gpt_fp8_cpu`. On GPUs by hand: mpirun -np 4 ./test_gpt_fp8 ranks_
set -euo pipefail
cd "$(dirname "$0")/.."

source scripts/testing.sh
for ranks in 2 3; do
    name="model-on-$ranks-ranks"
    if ! command -v mpirun >/dev/null; then
        skip "$name" "no mpirun (OpenMPI)"
        continue
    fi
    echo "-- $ranks ranks"
    status=0
    timeout 200 mpirun -np "$ranks" --oversubscribe --allow-run-as-root ./test_gpt_fp8_cpu ranks_ >"$work/out" 2>&1 \
        </dev/null || status=$? # 124: it hung
    cat "$work/out"
    # mpirun may have more to say behind the summary
    if [[ $(grep -E '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' "$work/out" | tail -n 1) =~ \
        ^([0-9]+)\ passed,\ ([0-9]+)\ failed,\ ([0-9]+)\ skipped$ ]]; then
        passed=$((passed + BASH_REMATCH[1]))
        failed=$((failed + BASH_REMATCH[2]))
        skipped=$((skipped + BASH_REMATCH[3]))
        [[ $status -eq 0 || ${BASH_REMATCH[2]} -gt 0 ]] || fail "$name" "exit status $status although no test failed"
    else
        fail "$name" "exit status $status, no summary line"
    fi
done
summary
