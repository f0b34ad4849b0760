#!/usr/bin/env bash
# run.sh [SECONDS] [TARGET...]: fuzz each target (default: all of dev/fuzz) for so long (default 600), one after another.
# Starts from the seeds, which our own writers make, and from what earlier runs found worth keeping (build/fuzz/corpus).
# One line per target: inputs tried, edges covered of all that are there, findings. A finding is kept in
# build/fuzz/findings; `build/fuzz/TARGET FILE` shows it again. Exit status 1 if there is one.
set -euo pipefail
cd "$(dirname "$0")/../.."

seconds=600
if [[ ${1:-} =~ ^[0-9]+$ ]]; then
    seconds=$1
    shift
fi
targets=("$@")
if [[ ${#targets[@]} -eq 0 ]]; then
    for source in dev/fuzz/*.c; do
        targets+=("$(basename "$source" .c)")
    done
fi
make --no-print-directory -s "${targets[@]/#/build/fuzz/}"

TMPDIR=$(mktemp -d -p "$([[ -w /dev/shm ]] && echo /dev/shm || echo /tmp)")
export TMPDIR
trap 'rm -rf "$TMPDIR"' EXIT
status=0
for target in "${targets[@]}"; do
    dir=build/fuzz/corpus/$target log=build/fuzz/$target.log
    rm -rf "build/fuzz/seeds/$target"
    mkdir -p "$dir" "build/fuzz/seeds/$target" build/fuzz/findings
    "build/fuzz/$target" --seeds="build/fuzz/seeds/$target"
    failed=0
    "build/fuzz/$target" -max_total_time="$seconds" -timeout=10 -max_len=32768 -print_final_stats=1 \
        -artifact_prefix="build/fuzz/findings/$target-" "$dir" "build/fuzz/seeds/$target" >"$log" 2>&1 || failed=1
    runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
    edges=$(grep -aoE 'cov: [0-9]+' "$log" | tail -n 1 | cut -d ' ' -f 2) || true
    counters=$(sed -nE 's/.*Loaded 1 PC tables? \(([0-9]+) PCs\).*/\1/p' "$log")
    kept=$(find "$dir" -type f | wc -l)
    echo "$target: ${runs:-?} inputs, ${edges:-?} of ${counters:-?} edges, $kept kept, $failed findings"
    if [[ $failed -ne 0 ]]; then
        status=1
        grep -aE -A 12 'FINDING|ERROR: |runtime error' "$log" | head -n 40 || true
    fi
done
exit $status
