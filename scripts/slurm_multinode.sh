#!/usr/bin/env bash
#SBATCH --job-name=gpt2_1558M
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x_%j.log
# Several nodes under Slurm: d48 on 2 nodes of 8 GPUs, until it is trained, over as many jobs as that takes.
#
#     sbatch [--nodes=N] [--partition=...] scripts/slurm_multinode.sh [FLAG...]      from the repository's root
#
# Runs scripts/train_1.5B.sh ($TRAIN: another one), these flags behind its own. Five minutes before the job's time is over
# Slurm sends SIGUSR1 to this script (--signal above), which passes it on: the ranks finish the step, write a checkpoint
# and end with status 75, and the job is queued again; it then goes on from the checkpoint (-y 1). SIGTERM does the same.
#
# MPI: srun --mpi=pmix; LAUNCHER=mpirun where Slurm and MPI do not know each other. DRY_RUN=1 prints the command, also
# outside of a job. NCCL_* variables reach all nodes.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}"

if [[ ${LAUNCHER:-srun} == mpirun ]]; then
    tasks=${SLURM_NTASKS:-16}
    export LAUNCH="scripts/mpirun.sh -np $tasks --map-by ppr:$((tasks / ${SLURM_NNODES:-2})):node --bind-to none"
else
    # A minute behind the first rank that ends, the others are ended, should they still be there. --kill-on-bad-exit=1
    # would end them at once, while they leave with status 75, too, and the status of the step would be 137. Ranks see all
    # GPUs of their node and take the one of their number there.
    export LAUNCH="srun --mpi=pmix --kill-on-bad-exit=0 --wait=60 --cpu-bind=none"
fi

run='' asked=''
pass_on() {
    asked=1
    [[ -z $run ]] || kill -USR1 "$run" 2>/dev/null || true
}
trap pass_on USR1 TERM
"${TRAIN:-scripts/train_1.5B.sh}" "$@" &
run=$!
[[ -z $asked ]] || pass_on
while :; do # a signal interrupts `wait`
    status=0
    wait "$run" || status=$?
    kill -0 "$run" 2>/dev/null || break
done
if [[ $status -eq 75 && -n ${SLURM_JOB_ID:-} ]]; then
    echo "not done: job $SLURM_JOB_ID is queued again"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
