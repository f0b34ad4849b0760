#!/usr/bin/env bash
# Tests of the other scripts: that the test runners notice what they are there to notice, and what setup.sh says on
# machines that lack something. Such a machine is a PATH with only the commands named here.
set -euo pipefail
cd "$(dirname "$0")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
passed=0 failed=0

# expect NAME STATUS TEXT COMMAND...: the command ends with that status and prints the text.
expect() {
    local name=$1 want=$2 text=$3 status=0 output
    shift 3
    output=$("$@" 2>&1 </dev/null) || status=$?
    if [[ $status -eq $want && $output == *"$text"* ]]; then
        echo "ok       $name"
        passed=$((passed + 1))
    else
        echo "FAILED   $name: exit status $status, want $want; want '$text' in: $output"
        failed=$((failed + 1))
    fi
}

# ----------------------------------------------------------------------------------------------------------------------
# run_each.sh

program() { # NAME LINES
    printf '#!/bin/sh\n%b\n' "$2" >"$work/$1"
    chmod +x "$work/$1"
}
program good 'echo "3 passed, 0 failed, 1 skipped"'
program bad 'echo "1 passed, 2 failed, 0 skipped"; exit 1'
program crash 'echo "9 passed, 0 failed, 0 skipped"; kill -SEGV $$'
program silent 'exit 0'
program late 'echo "2 passed, 0 failed, 0 skipped"; echo "leak report"; exit 23'

expect "run_each: adds up" 0 "6 passed, 0 failed, 2 skipped" scripts/run_each.sh "$work/good" "$work/good"
expect "run_each: failed tests" 1 "4 passed, 2 failed, 1 skipped" scripts/run_each.sh "$work/good" "$work/bad"
expect "run_each: a crash after the summary" 1 "9 passed, 1 failed" scripts/run_each.sh "$work/crash"
expect "run_each: no summary" 1 "0 passed, 1 failed" scripts/run_each.sh "$work/silent"
expect "run_each: a sanitizer's report after the summary" 1 "0 passed, 1 failed" scripts/run_each.sh "$work/late"
expect "run_each: a program that is not there" 1 "0 passed, 1 failed" scripts/run_each.sh "$work/not-built"

# ----------------------------------------------------------------------------------------------------------------------
# check_wall.sh, on small trees of its own

wall() { # NAME FILE LINES STATUS TEXT
    local tree="$work/wall"
    rm -rf "$tree"
    mkdir -p "$tree/lib" "$tree/scripts"
    cp scripts/check_wall.sh "$tree/scripts/"
    printf '#ifndef GOOD_H\n#define GOOD_H\nstatic inline int one(void) { return 1; }\n#endif\n' >"$tree/lib/good.h"
    printf '%b\n' "$3" >"$tree/lib/$2"
    expect "$1" "$4" "$5" "$tree/scripts/check_wall.sh"
}
wall "wall: a clean tree" op.cuh '#include "gpu.cuh"\n#include "good.h"' 0 " 0 failed"
wall "wall: a header that does not stand alone" leaning.h 'static inline size_t size(void) { return 1; }' 1 "leaning.h as C11"
wall "wall: C that is no C++" c_only.h 'static inline int* f(void* p) { int* q = p; return q; }' 1 "c_only.h as C++17"
wall "wall: a warning" warns.h 'static int unused(void) { return 1; }' 1 "FAILED   lib/warns.h"
wall "wall: a header that includes CUDA" cuda.h '#if 0\n#include <cuda_fp8.h>\n#endif' 1 "cuda.h includes no CUDA"
wall "wall: an op that includes another" op.cuh '#include "other.cuh"' 1 "op.cuh includes no other op"
wall "wall: lib that includes dev" op.cuh '#include "../dev/bench.cuh"' 1 "FAILED   nothing includes dev/"

# ----------------------------------------------------------------------------------------------------------------------
# setup.sh

machine() { # COMMAND...: a folder for PATH with these commands
    local path="$work/machine$RANDOM$RANDOM" command
    mkdir "$path"
    for command in bash env sed head tail sort id cat grep dirname realpath printf mktemp rm mkdir "$@"; do
        # what this machine lacks itself is lacking there, too
        ! command -v "$command" >/dev/null || ln -sf "$(command -v "$command")" "$path/$command"
    done
    echo "$path"
}
compiler=$(command -v gcc)

expect "setup: nothing missing, nothing said" 0 "" scripts/setup.sh --what cpu
expect "setup: an unknown argument" 2 "unknown argument '--frob'" scripts/setup.sh --frob
expect "setup: an unknown set" 2 "--what 'all'" scripts/setup.sh --what all
expect "setup: --what without its value" 2 "--what ''" scripts/setup.sh --what
if command -v apt-get >/dev/null; then
    expect "setup: a bare machine" 0 "apt-get install -y --no-install-recommends build-essential libopenmpi-dev openmpi-bin libpcre2-dev libxxhash-dev python3 xz-utils" \
        env PATH="$(machine apt-get apt-cache)" scripts/setup.sh --what test --dry-run
    expect "setup: only what is missing" 0 "install -y --no-install-recommends xz-utils" \
        env PATH="$(machine apt-get gcc g++ make mpicc mpirun python3 as ld)" CC="$compiler" scripts/setup.sh --what test --dry-run
fi
expect "setup: no apt-get" 1 "missing: a C and C++ compiler and make, OpenMPI, PCRE2 headers, xxHash 0.8 or newer, Python 3. This system has no apt-get" \
    env PATH="$(machine)" scripts/setup.sh --what cpu
expect "quickstart: an unknown device" 2 "'tpu', want cpu, gpu" scripts/quickstart.sh tpu

# A GPU machine without a CUDA compiler, and one with an old one. (/usr/local/cuda is looked at, too.)
tools=(gcc g++ make mpicc mpirun python3 xz apt-cache)
if [[ ! -x /usr/local/cuda/bin/nvcc ]]; then
    expect "setup: no nvcc" 1 "make cpu" env PATH="$(machine "${tools[@]}")" CC="$compiler" scripts/setup.sh --what gpu --dry-run
fi
old=$(machine "${tools[@]}")
printf '#!/bin/sh\necho "Cuda compilation tools, release 11.8, V11.8.89"\n' >"$old/nvcc"
chmod +x "$old/nvcc"
expect "setup: an old nvcc" 1 "is CUDA 11.8, want 12.8 or newer. Without it: make cpu" \
    env PATH="$old" CC="$compiler" scripts/setup.sh --what gpu --dry-run

# An mpirun that ends with 75 on SIGUSR1, as it does when its ranks do, with 143 on SIGTERM, else with 3 after 20 s.
stoppable=$(machine sleep kill)
cat >"$stoppable/mpirun" <<'SCRIPT'
#!/usr/bin/env bash
trap 'exit 75' USR1
echo "started $*"
for i in {1..200}; do sleep 0.1; done
exit 3
SCRIPT
chmod +x "$stoppable/mpirun"
signalled() { # SIGNAL COMMAND...: sent to the command when the ranks run; what it prints, and its status
    local status=0 signal=$1
    shift
    env PATH="$stoppable" "$@" >"$work/signalled" 2>&1 &
    local script=$!
    until grep -q "started " "$work/signalled"; do sleep 0.05; done
    kill "-$signal" "$script"
    wait "$script" || status=$?
    cat "$work/signalled"
    echo "status $status"
}
for signal in TERM USR1; do
    expect "mpirun.sh: SIG$signal stops the ranks by SIGUSR1" 0 "status 75" signalled $signal scripts/mpirun.sh -np 2
done

# The same for a job of Slurm, which is queued again when it is not done. Its srun is as the mpirun; where the first rank
# to end with an error takes the others with it, the status is theirs.
sed "/^trap/a [[ \"\$*\" == *--kill-on-bad-exit=0* ]] || trap 'exit 137' USR1" "$stoppable/mpirun" >"$stoppable/srun"
chmod +x "$stoppable/srun"
printf '#!/bin/sh\necho "scontrol $*"\n' >"$stoppable/scontrol"
chmod +x "$stoppable/scontrol"
for launcher in srun mpirun; do
    expect "slurm_multinode.sh: SIGUSR1 reaches the ranks, the job is queued again ($launcher)" 0 \
        "scontrol requeue 17"$'\n'"status 75" signalled USR1 env SLURM_JOB_ID=17 LAUNCHER=$launcher scripts/slurm_multinode.sh
done
printf '#!/bin/sh\nexit 3\n' >"$stoppable/srun"
not_requeued() { # its status, and that it says nothing
    local status=0 output
    output=$(env PATH="$stoppable" SLURM_JOB_ID=17 scripts/slurm_multinode.sh 2>&1) || status=$?
    echo "status $status, says '$output'"
}
expect "slurm_multinode.sh: an error is not queued again" 0 "status 3, says ''" not_requeued
expect "slurm_multinode.sh: under mpirun as many ranks as tasks" 0 "-np 32 --map-by ppr:8:node" \
    env DRY_RUN=1 LAUNCHER=mpirun SLURM_NTASKS=32 SLURM_NNODES=4 scripts/slurm_multinode.sh
printf 'node1 slots=8\n# node3 slots=8\n\n node2 slots=8' >"$work/hosts"
expect "run_multinode_mpirun.sh: 8 ranks on each of two nodes" 0 "-np 16 --hostfile $work/hosts --map-by ppr:8:node" \
    env DRY_RUN=1 scripts/run_multinode_mpirun.sh "$work/hosts"
expect "run_multinode_mpirun.sh: NCCL's variables and the network go to all nodes" 0 \
    "--mca btl_tcp_if_include eth7 -x PATH -x NCCL_DEBUG -x NCCL_SOCKET_IFNAME ./train_gpt_fp8" \
    env -u LD_LIBRARY_PATH DRY_RUN=1 IFACE=eth7 NCCL_DEBUG=INFO scripts/run_multinode_mpirun.sh "$work/hosts"
expect "run_multinode_mpirun.sh: no hostfile" 2 "found '/no/such'" scripts/run_multinode_mpirun.sh /no/such -x 10
expect "launch.sh: the command, with its quotes" 0 'scripts/mpirun.sh -np 3 --bind-to none ./train_gpt_fp8 -i a\ \* ' \
    env DRY_RUN=1 GPUS=3 scripts/launch.sh -i "a *"
printf '#!/bin/sh\nexit 3\n' >"$stoppable/mpirun"
expect "mpirun.sh: the status of mpirun" 3 "" env PATH="$stoppable" scripts/mpirun.sh -np 2

expect "make without nvcc names make cpu" 2 "make cpu" make --no-print-directory NVCC=/no/such/nvcc train_gpt_fp8
expect "make cpu without MPI says so" 2 "OpenMPI is missing" make --no-print-directory MPICC=/no/such/mpicc -W train_gpt_fp8.cu cpu

echo "$passed passed, $failed failed, 0 skipped"
[[ $failed -eq 0 ]]
