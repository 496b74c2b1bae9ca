#!/usr/bin/env bash
# Train under SLURM: srun starts torchrun once on each node. Submit it in the folder of this repository:
#
#   DATA_PATH=... TOKENIZER_MODEL=... sbatch --nodes 32 examples/cluster/launch/slurm.sh RECIPE [OPTIONS]
#
# CONTAINER_IMAGE starts all tasks in a container: with pyxis, unless CONTAINER_RUNTIME says otherwise. SRUN_ARGS are more
# options of srun, split at spaces. For the other variables see common.sh. This needs no SLURM:
#
#   DRY_RUN=1 NODES=32 DATA_PATH=... TOKENIZER_MODEL=... bash examples/cluster/launch/slurm.sh RECIPE
#
# Ten minutes before the time limit, SLURM sends SIGUSR1 to this script alone (B:). It passes the warning on to the trainer,
# which saves a checkpoint and exits, and puts the job back into the queue. There it resumes.
#SBATCH --job-name=megatron_bfp
#SBATCH --nodes=32
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
launch=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# sbatch runs a copy of this file, which lies elsewhere
[ -f "$launch/common.sh" ] || launch=${SLURM_SUBMIT_DIR:?}/examples/cluster/launch
[ -f "$launch/common.sh" ] || { echo "slurm.sh: error: submit it in the folder of the repository" >&2; exit 2; }

source "$launch/functions.sh"
can_use_pyxis=yes
read_settings "$@"
NODES=${SLURM_NNODES:-${NODES:?set it to the number of nodes}}
MASTER_ADDR=${MASTER_ADDR:-FIRST_NODE}
if [ -n "${SLURM_JOB_ID:-}" ]; then
    mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    MASTER_ADDR=${hosts[0]}
    MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))} # one per job, in case two share a node
fi
split_words "${SRUN_ARGS:-}"
srun_args=("${words[@]}")

is_warned='' is_interrupted=''
warned() {
    is_warned=yes is_interrupted=yes
    echo "slurm.sh: the time limit is near: stopping the run"
    scancel --signal="${stop_signal:-USR1}" "$SLURM_JOB_ID" || true # there may be no step yet
}
[ -z "${SLURM_JOB_ID:-}" ] || trap warned USR1

requeue() {
    run scontrol requeue "$SLURM_JOB_ID"
    exit 0
}

on_all_nodes() { # run a command once on each node; requeue the job if the warning came before it, or stopped it
    local status step
    [ -z "$is_warned" ] || requeue
    run srun --nodes "$NODES" --ntasks "$NODES" --ntasks-per-node 1 --kill-on-bad-exit=1 "${srun_args[@]}" \
        "${in_pyxis[@]}" "${on_node[@]}" "$@" &
    step=$!
    while true; do # bash handles signals while it waits, not while a command runs
        is_interrupted='' status=0
        wait "$step" || status=$?
        [ -n "$is_interrupted" ] || break
    done
    [[ ! $is_warned || ($status = 0 && $status_when_stopped != 0) ]] || requeue
    [ "$status" = 0 ] || exit "$status"
}
source "$launch/common.sh"

on_all_nodes python "${preflight[@]}" "${trained[@]}"
on_all_nodes bash "$launch/torchrun_node.sh" --nnodes "$NODES" --nproc-per-node "$GPUS_PER_NODE" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" ${module:+-m "$module"} "$script" "${options[@]}"
