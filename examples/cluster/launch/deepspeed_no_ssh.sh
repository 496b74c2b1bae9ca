#!/usr/bin/env bash
# Train on hosts without ssh between them: run the same command on each node, with its own NODE_RANK.
#
#   NODES=4 NODE_RANK=0 MASTER_ADDR=node-1 DATA_PATH=... TOKENIZER_MODEL=... \
#       bash examples/cluster/launch/deepspeed_no_ssh.sh RECIPE [OPTIONS]
#
# MASTER_ADDR is the name or address by which the other nodes reach the first one. For the other variables see common.sh.
set -euo pipefail
launch=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$launch/functions.sh"
read_settings "$@"
NODES=${NODES:?set it to the number of nodes}
NODE_RANK=${NODE_RANK:?set it to 0 on the first node, 1 on the next}
MASTER_ADDR=${MASTER_ADDR:?set it to the name or address of the first node}
source "$launch/common.sh"
[ "$TRAINER" != megatron_lm ] || die "Megatron-LM starts with torchrun: use torchrun_hostfile.sh or slurm.sh"

# deepspeed needs a hostfile here too, but reads only the number of nodes and their slots from it
hostfile=$OUTPUT/hostfile-$NODE_RANK
if [ "${DRY_RUN:-0}" = 0 ]; then
    printf "node-%d slots=$GPUS_PER_NODE\n" $(seq "$NODES") >"$hostfile"
fi
# This script runs on each node, and has run the prologue
run "${on_this_node[@]}" python "${preflight[@]}" --node-rank "$NODE_RANK" "${trained[@]}"
run "${on_this_node[@]}" deepspeed --hostfile "$hostfile" --no_ssh --node_rank "$NODE_RANK" --master_addr "$MASTER_ADDR" \
    --master_port "$MASTER_PORT" ${module:+--module "$module"} "$script" "${options[@]}"
