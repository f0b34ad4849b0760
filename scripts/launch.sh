#!/usr/bin/env bash
# launch.sh FLAG...: ./train_gpt_fp8 with these flags, as the training scripts start it: one process per GPU on this machine
# ($GPUS of them; default: all), or behind the words of $LAUNCH, as the scripts for several nodes set it.
# DRY_RUN=1 prints the command instead.
set -euo pipefail
cd "$(dirname "$0")/.."

if [[ -z ${LAUNCH:-} ]]; then
    LAUNCH="scripts/mpirun.sh -np ${GPUS:-$(nvidia-smi --list-gpus | wc -l)} --bind-to none"
fi
read -r -a launch <<<"$LAUNCH"
command=("${launch[@]}" ./train_gpt_fp8 "$@")
if [[ -n ${DRY_RUN:-} ]]; then
    printf '%q ' "${command[@]}"
    echo
    exit
fi
exec "${command[@]}"
