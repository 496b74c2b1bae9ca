#!/usr/bin/env bash
# Train under SLURM: srun starts torchrun once on each node. Submit it in the folder of this repository:
#
#   DATA_PATH=... TOKENIZER_MODEL=... sbatch --nodes 32 examples/cluster/launch/slurm.sh RECIPE [OPTIONS]
#
# For the other variables see common.sh. This needs no SLURM:
#
#   DRY_RUN=1 NODES=32 DATA_PATH=... TOKENIZER_MODEL=... bash examples/cluster/launch/slurm.sh RECIPE
#SBATCH --job-name=megatron_bfp
#SBATCH --nodes=32
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --signal=USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
launch=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# sbatch runs a copy of this file, which lies elsewhere
[ -f "$launch/common.sh" ] || launch=${SLURM_SUBMIT_DIR:?}/examples/cluster/launch
[ -f "$launch/common.sh" ] || { echo "slurm.sh: error: submit it in the folder of the repository" >&2; exit 2; }

NODES=${SLURM_NNODES:-${NODES:?set it to the number of nodes}}
MASTER_ADDR=${MASTER_ADDR:-FIRST_NODE}
if [ -n "${SLURM_JOB_ID:-}" ]; then
    mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    MASTER_ADDR=${hosts[0]}
    MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))} # one per job, in case two share a node
fi
source "$launch/common.sh"

srun=(srun --nodes "$NODES" --ntasks "$NODES" --ntasks-per-node 1 --kill-on-bad-exit=1)
run "${srun[@]}" python "${preflight[@]}" "${trained[@]}"
run "${srun[@]}" bash "$launch/torchrun_node.sh" --nnodes "$NODES" --nproc-per-node "$GPUS_PER_NODE" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" ${module:+-m "$module"} "$script" "${options[@]}"
