#!/usr/bin/env bash
# Several nodes under mpirun, without a batch system.
#
#     scripts/run_multinode_mpirun.sh HOSTFILE [FLAG...]
#
# HOSTFILE has a line "name slots=8" for each node. Runs scripts/train_1.5B.sh ($TRAIN: another one) with $GPUS processes
# per node (8), and these flags behind its own: with two nodes d48 on 16 GPUs. All nodes have this folder, the data and
# the -o folder under the same names, and this one reaches the others by ssh without a password.
#
# $IFACE, e.g. eth0: the network that MPI, and NCCL where there is no InfiniBand, use. Every NCCL_* variable that is set
# here is set on all nodes. DRY_RUN=1 prints the command. Stop it with Ctrl-C, SIGTERM or SIGUSR1: it writes a checkpoint and
# ends with status 75; the same line goes on from there.
set -euo pipefail
if [[ $# -lt 1 || ! -r $1 ]]; then
    echo "error: want a hostfile, a line \"name slots=8\" for each node; found '${1:-}'" >&2
    exit 2
fi
hostfile=$(realpath "$1")
shift
cd "$(dirname "$0")/.."

gpus=${GPUS:-8}
nodes=$(grep -cE '^[[:space:]]*[^#[:space:]]' "$hostfile" || true)
if [[ -n ${IFACE:-} ]]; then export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$IFACE}; fi
LAUNCH="scripts/mpirun.sh -np $((nodes * gpus)) --hostfile $hostfile --map-by ppr:$gpus:node --bind-to none"
LAUNCH+="${IFACE:+ --mca oob_tcp_if_include $IFACE --mca btl_tcp_if_include $IFACE}"
for name in PATH LD_LIBRARY_PATH $(compgen -e NCCL_ || true); do
    [[ -z ${!name:-} ]] || LAUNCH+=" -x $name"
done
export LAUNCH
exec "${TRAIN:-scripts/train_1.5B.sh}" "$@"
