#!/usr/bin/env bash
# One node's part of a run: torchrun with the arguments given, and the node's rank, which srun does not put where torchrun
# looks for it.
#
# SLURM's warning, SIGUSR1, reaches every process of a step. torchrun would die of it, so it is ignored here; a trainer
# that wants to save a checkpoint then handles it itself.
set -euo pipefail
trap '' USR1
exec torchrun --node-rank "${NODE_RANK:-${SLURM_NODEID:?not started by srun; set NODE_RANK}}" "$@"
