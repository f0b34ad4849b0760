#!/usr/bin/env bash
# run_tests.sh (make test): every test that can run on this machine. Each part ends with its own line "N passed,
# N failed, N skipped"; the last line of all is the total. Exit status 1 if anything failed.
#
# Compiling the GPU code takes minutes of one core and nothing of the rest waits for it, so it runs beside the other
# parts. What a machine cannot do (no nvcc, no Hopper GPU, no ../shared) is skipped, with the reason.
set -euo pipefail
cd "$(dirname "$0")/.."

# Two cores, and more than one program at work: threads that spin while they wait for others make everything slower.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
logs=build/test
mkdir -p "$logs"
total_passed=0 total_failed=0 total_skipped=0
failed_parts=()

# The counts of a part's log are those of its last line; a part without such a line, or one that fails without a failed
# test, has one failed test.
count() { # NAME LOG STATUS SECONDS
    local passed=0 failed=1 skipped=0
    if [[ $(tail -n 1 "$2") =~ ^([0-9]+)\ passed,\ ([0-9]+)\ failed,\ ([0-9]+)\ skipped$ ]]; then
        passed=${BASH_REMATCH[1]} failed=${BASH_REMATCH[2]} skipped=${BASH_REMATCH[3]}
        if [[ $3 -ne 0 && $failed -eq 0 ]]; then
            echo "FAILED   $1: exit status $3 although no test failed"
            failed=1
        fi
    else
        echo "FAILED   $1: exit status $3, no summary line"
    fi
    total_passed=$((total_passed + passed))
    total_failed=$((total_failed + failed))
    total_skipped=$((total_skipped + skipped))
    [[ $failed -eq 0 ]] || failed_parts+=("$1")
    echo "   ($1: $4 s)"
}

part() { # NAME COMMAND...
    local name=$1 status=0 start=$SECONDS
    shift
    printf '\n== %s\n' "$name"
    "$@" 2>&1 </dev/null | tee "$logs/$name.log" || status=$?
    count "$name" "$logs/$name.log" "$status" $((SECONDS - start))
}

total() {
    printf '\n'
    [[ ${#failed_parts[@]} -eq 0 ]] || echo "failed: ${failed_parts[*]}"
    echo "$total_passed passed, $total_failed failed, $total_skipped skipped"
    [[ $total_failed -eq 0 ]]
}

# ----------------------------------------------------------------------------------------------------------------------
# parts

host_tests() {
    # keep going: one test that does not compile is one failed test, not the end of the others
    make --no-print-directory --keep-going -j2 host-build >"$logs/host-build.log" 2>&1 || grep -E 'error|Error' \
        "$logs/host-build.log" | head -n 40
    local programs=()
    for source in dev/host/test_*.c; do
        programs+=("build/host/$(basename "$source" .c)")
    done
    scripts/run_each.sh "${programs[@]}"
}

script_tests() {
    local tests=(scripts/test_*.py)
    for test in scripts/test_*.sh; do
        [[ $test == scripts/test_cpu_*.sh || ! -e $test ]] || tests+=("$test")
    done
    scripts/run_each.sh "${tests[@]}"
}

gpu_compile() {
    local passed=0 failed=0 target start
    for target in $(make --no-print-directory -s gpu-targets); do
        start=$SECONDS
        if make --no-print-directory -s "$target" >"$logs/compile.log" 2>&1; then
            echo "ok       $target ($((SECONDS - start)) s)"
            passed=$((passed + 1))
        else
            echo "FAILED   $target"
            tail -n 30 "$logs/compile.log"
            failed=$((failed + 1))
        fi
    done
    echo "$passed passed, $failed failed, 0 skipped"
    [[ $failed -eq 0 ]]
}

skip() { # REASON
    echo "skipped  $1"
    echo "0 passed, 0 failed, 1 skipped"
}

has_nvcc() { command -v nvcc >/dev/null || [[ -x /usr/local/cuda/bin/nvcc ]]; }

has_hopper() {
    command -v nvidia-smi >/dev/null 2>&1 &&
        nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -qx '9\.0'
}

# ----------------------------------------------------------------------------------------------------------------------

start=$SECONDS
if ! scripts/setup.sh --what test; then
    echo "0 passed, 1 failed, 0 skipped"
    exit 1
fi

gpu_job=
if has_nvcc; then
    gpu_start=$SECONDS
    gpu_compile >"$logs/gpu-compile.log" 2>&1 &
    gpu_job=$!
    trap 'kill "$gpu_job" 2>/dev/null || true' EXIT
fi

part wall scripts/check_wall.sh
part host host_tests
if make --no-print-directory -s -j2 cpu tools test_gpt_fp8_cpu >"$logs/build.log" 2>&1; then
    part scripts script_tests
    part cpu-program scripts/test_cpu_program.sh
    part cpu-checkpoints scripts/test_cpu_checkpoints.sh
    part cpu-ranks scripts/test_cpu_ranks.sh
    part cpu-model ./test_gpt_fp8_cpu
    part cpu-model-ranks scripts/test_cpu_model_ranks.sh
else
    part build sh -c "tail -n 40 '$logs/build.log'; echo '0 passed, 1 failed, 0 skipped'; exit 1"
fi

if [[ -n $gpu_job ]]; then
    printf '\n== gpu-compile\n'
    status=0
    wait "$gpu_job" || status=$?
    trap - EXIT
    cat "$logs/gpu-compile.log"
    count gpu-compile "$logs/gpu-compile.log" "$status" $((SECONDS - gpu_start))
else
    part gpu-compile skip "GPU code is not compiled: no nvcc on PATH or in /usr/local/cuda/bin"
fi

if ! has_hopper; then
    part gpu skip "test_gpt_fp8: no GPU of compute capability 9.0 (nvidia-smi)"
elif [[ ! -x ./test_gpt_fp8 ]]; then
    part gpu sh -c "echo 'there is a Hopper GPU but no test_gpt_fp8'; echo '0 passed, 1 failed, 0 skipped'; exit 1"
else
    part gpu ./test_gpt_fp8
fi

echo "   (all: $((SECONDS - start)) s)"
total
