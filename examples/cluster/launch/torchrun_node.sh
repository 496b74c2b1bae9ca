#!/usr/bin/env bash
# One node's part of a run: torchrun with the given arguments and the node's rank, which srun does not set where torchrun
# looks for it.
#
# SLURM's warning, SIGUSR1, goes to every process of a step. torchrun would be killed by it, so it is ignored here; a
# trainer that saves a checkpoint then handles it itself.
set -euo pipefail
trap '' USR1
exec torchrun --node-rank "${NODE_RANK:-${SLURM_NODEID:?not started by srun; set NODE_RANK}}" "$@"
