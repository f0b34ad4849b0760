#!/usr/bin/env bash
# The GPU tests, on a machine with a Hopper GPU, from binaries that may have been built elsewhere.
#
#     dev/gpu_check.sh                  all tests; then, if compute-sanitizer is there, small ones under memcheck
#     dev/gpu_check.sh ops_matmul       only tests whose name contains the text, no sanitizer
#     SANITIZE=only dev/gpu_check.sh    only the sanitizer part; SANITIZE=no: never
#
# OUT           where the logs go (default build/gpu_check): test.log, memcheck_*.log, table.txt
# SHARED_DATA   where the outside truth lies; default: shared/data or .carry/data here, else ../shared/data
# Prints what failed, with its first lines, and a table last. Exit status 1 when anything failed.
set -u
cd "$(dirname "$0")/.."
filter=${1:-}
out=${OUT:-build/gpu_check}
mkdir -p "$out"
if [ -z "${SHARED_DATA:-}" ]; then
    for folder in shared/data .carry/data ../shared/data; do
        if [ -d "$folder/reference" ]; then export SHARED_DATA=$folder; break; fi
    done
fi
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-2000} # else the test program starts itself again to set it
rows=()
failed=0

if [ ! -x ./test_gpt_fp8 ]; then
    echo "error: no ./test_gpt_fp8 here: make test_gpt_fp8" >&2
    exit 1
fi

# part NAME LOG COMMAND...: run it, keep the log, add a row to the table.
part() {
    local name=$1 log=$out/$2 start=$SECONDS status summary
    shift 2
    "$@" > "$log" 2>&1
    status=$?
    summary=$(grep -E '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' "$log" | tail -1)
    # what was printed since the last verdict belongs to the test that failed
    awk '/^(ok|skipped) +[a-z]/ { held = ""; next } { held = held $0 "\n" } /^FAILED/ { printf "%s", held; held = "" }' "$log"
    if [ -z "$summary" ]; then
        summary="no summary line: it ended early"
        tail -5 "$log"
    fi
    local errors
    errors=$(grep -E 'ERROR SUMMARY: ' "$log" | tail -1 | sed 's/^=* *ERROR SUMMARY: *//')
    if [ -n "$errors" ]; then
        summary="$summary; sanitizer: $errors"
        grep -E '^=+ (Invalid|Uninitialized|Race|Error|Program hit|Barrier)' "$log" | sort | uniq -c | sort -rn | head -5
    fi
    if [ $status -ne 0 ]; then failed=1; fi
    rows+=("$(printf '%-28s %-9s %5d s  %s' "$name" "$([ $status -eq 0 ] && echo ok || echo "FAILED($status)")" \
        $((SECONDS - start)) "$summary")")
}

if [ "${SANITIZE:-}" != only ]; then
    part "tests ${filter:-(all)}" test.log ./test_gpt_fp8 ${filter:+"$filter"}
fi

# Small shapes, and buffers without guard zones, so that memcheck sees the first byte beyond them. Its work is some
# hundred times slower, which is why the whole-model part is one test of 36 steps.
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
if [ -n "$filter" ] || [ "${SANITIZE:-}" = no ]; then
    :
elif [ -z "$sanitizer" ]; then
    rows+=("$(printf '%-28s %-9s' memcheck "skipped: compute-sanitizer is not installed here")")
else
    for test in ops_ model_nan_is_skipped_fp8_gpu; do
        part "memcheck $test" "memcheck_$test.log" env TEST_QUICK=1 TEST_NO_GUARDS=1 \
            timeout "${SANITIZE_SECONDS:-240}" "$sanitizer" --tool memcheck --error-exitcode 99 ./test_gpt_fp8 "$test"
    done
    part "racecheck ops_layernorm" racecheck.log env TEST_QUICK=1 \
        timeout "${SANITIZE_SECONDS:-240}" "$sanitizer" --tool racecheck --error-exitcode 99 ./test_gpt_fp8 ops_layernorm
fi

{
    echo
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -1
    grep -h '^    GPU' "$out/test.log" 2>/dev/null
    printf '%-28s %-9s %7s  %s\n' what result time tests
    printf '%s\n' "${rows[@]}"
} | tee "$out/table.txt"
exit $failed
