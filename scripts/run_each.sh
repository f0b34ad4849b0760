#!/usr/bin/env bash
# run_each.sh PROGRAM...: run test programs one after the other and print one total "N passed, N failed, N skipped".
# A program that ends without its own such line (a crash, a sanitizer's report) counts as one failed test.
set -euo pipefail

passed=0 failed=0 skipped=0
output=$(mktemp)
trap 'rm -f "$output"' EXIT
for program in "$@"; do
    echo "-- $program"
    status=0
    timeout 300 "$program" >"$output" 2>&1 </dev/null || status=$? # 124: it hung
    cat "$output"
    if [[ $(tail -n 1 "$output") =~ ^([0-9]+)\ passed,\ ([0-9]+)\ failed,\ ([0-9]+)\ skipped$ ]]; then
        passed=$((passed + BASH_REMATCH[1]))
        failed=$((failed + BASH_REMATCH[2]))
        skipped=$((skipped + BASH_REMATCH[3]))
        if [[ $status -ne 0 && ${BASH_REMATCH[2]} -eq 0 ]]; then
            echo "FAILED   $program: exit status $status although no test failed"
            failed=$((failed + 1))
        fi
    else
        echo "FAILED   $program: exit status $status, no summary line"
        failed=$((failed + 1))
    fi
done
echo "$passed passed, $failed failed, $skipped skipped"
[[ $failed -eq 0 ]]
