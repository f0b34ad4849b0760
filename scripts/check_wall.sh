#!/usr/bin/env bash
# The wall between plain C and CUDA, and between ops:
#   - every lib/*.h compiles alone, with no CUDA, as C11 and as C++17, without a warning
#   - no lib/*.h includes a CUDA header; no .cuh includes another op (only gpu.cuh, its own parts and plain headers)
#   - nothing in lib/ or the program includes dev/
#   - every kernel begins with kernel_begin(), but those of attention_builtin.cuh, which are not launched early
# Prints one line per file that breaks it and "N passed, N failed, N skipped".
set -euo pipefail
cd "$(dirname "$0")/.."

passed=0 failed=0 skipped=0
# not -fsyntax-only, which would not see unused functions
warnings=(-Wall -Wextra -Werror -fopenmp -D_GNU_SOURCE -isystem .deps/xxhash -c -o /dev/null)
mpi=()
if command -v mpicc >/dev/null; then
    read -r -a mpi <<<"-DOMPI_SKIP_MPICXX $(mpicc --showme:compile)" # not the deprecated C++ classes
fi

report() { # NAME STATUS MESSAGE
    if [[ $2 -eq 0 ]]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAILED   $1"
        [[ -z $3 ]] || head -n 20 <<<"$3"
    fi
}

for header in lib/*.h; do
    # The one exception: what attention_cudnn.cpp, the optional unit compiled by g++, shares with attention.cuh.
    [[ $header != lib/attention_cudnn.h ]] || continue
    # The floor of ops is the CPU's here: its types are plain C. Ranks (comm_cpu.h) lean on MPI.
    flags=("${warnings[@]}" -DCPU_FLOOR)
    if grep -q '<mpi.h>' "$header"; then
        if [[ ${#mpi[@]} -eq 0 ]]; then
            echo "skipped  $header: no mpicc"
            skipped=$((skipped + 1))
            continue
        fi
        flags+=("${mpi[@]}")
    fi
    status=0
    message=$("${CC:-gcc}" -std=c11 "${flags[@]}" -x c "$header" 2>&1) || status=$?
    report "$header as C11" "$status" "$message"
    status=0
    message=$("${CXX:-g++}" -std=c++17 "${flags[@]}" -x c++ "$header" 2>&1) || status=$?
    report "$header as C++17" "$status" "$message"
    message=$(grep -nE '#include.*(cuda|cublas|cudnn|nccl|\.cuh)' "$header" || true)
    report "$header includes no CUDA" "${#message}" "$message"
done

for op in lib/*.cuh; do
    [[ -e $op ]] || continue
    name=$(basename "$op" .cuh) # attention.cuh may include its own part, attention_builtin.cuh
    message=$(grep -nE '#include ".*\.cuh"' "$op" | grep -vE "\"(gpu|${name}_[a-z0-9_]+)\.cuh\"" || true)
    report "$op includes no other op" "${#message}" "$message"
done

for op in lib/*.cuh; do
    [[ -e $op && $op != lib/attention_builtin.cuh ]] || continue # whose kernels are launched the ordinary way
    # a kernel's body begins behind the line that ends with ") {"; one of which that line is not found is reported, too
    message=$(awk '/__global__/ { if (kernel) { print kernel }; kernel = FILENAME ": " FNR; begun = 0 }
                   kernel && begun { if ($0 !~ /^    kernel_begin\(\);$/) { print kernel }; kernel = "" }
                   kernel && /\) \{$/ { begun = 1 }
                   END { if (kernel) { print kernel } }' "$op")
    report "$op: kernels begin with kernel_begin()" "${#message}" "$message"
done

message=$(grep -nsE '#include ".*dev/' lib/* train_gpt_fp8.cu || true)
report "nothing includes dev/" "${#message}" "$message"

echo "$passed passed, $failed failed, $skipped skipped"
[[ $failed -eq 0 ]]
