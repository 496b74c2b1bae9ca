#!/usr/bin/env bash
# Train with Megatron-Bridge on several nodes under SLURM: srun starts torchrun once on each. Submit it in the folder of
# this repository, with Megatron-Bridge's overrides; data and checkpoints lie where all nodes see them:
#
#   sbatch --nodes 4 examples/megatron_bridge/slurm.sh \
#       dataset.data_path=data/web_text_document tokenizer.tokenizer_model=data/tokenizer \
#       checkpoint.save=checkpoints checkpoint.load=checkpoints
#
# Set CONTAINER to run in a container (NVIDIA's has Megatron-Bridge), which pyxis and enroot start. After a crash,
# submit the same command again: it resumes. This prints what would be started, without SLURM:
#
#   DRY_RUN=1 NODES=4 bash examples/megatron_bridge/slurm.sh dataset.data_path=data/web_text_document
#SBATCH --job-name=megatron_bridge_bfp
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
nodes=${SLURM_NNODES:-${NODES:?set it to the number of nodes}}
folder=${SLURM_SUBMIT_DIR:-$PWD} # sbatch runs a copy of this file, which lies elsewhere
first_node=FIRST_NODE
if [ -n "${SLURM_JOB_ID:-}" ]; then
    first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
fi
port=$((20000 + ${SLURM_JOB_ID:-0} % 10000)) # one per job, in case two share a node

command=(srun --nodes "$nodes" --ntasks "$nodes" --ntasks-per-node 1 --kill-on-bad-exit=1 --chdir "$folder")
if [ -n "${CONTAINER:-}" ]; then
    command+=(--container-image "$CONTAINER" --container-mounts "$folder,${MOUNTS:-$folder}" --container-workdir "$folder")
fi
command+=(torchrun --nnodes "$nodes" --nproc-per-node "${GPUS_PER_NODE:-8}")
command+=(--rdzv-backend c10d --rdzv-endpoint "$first_node:$port" --rdzv-id "${SLURM_JOB_ID:-0}")
command+=(examples/megatron_bridge/pretrain.py "$@")

export PYTHONPATH=$folder${PYTHONPATH:+:$PYTHONPATH}
if [ -n "${DRY_RUN:-}" ]; then
    printf '%q ' "${command[@]}"
    echo
else
    exec "${command[@]}"
fi
