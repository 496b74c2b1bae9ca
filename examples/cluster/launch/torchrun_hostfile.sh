#!/usr/bin/env bash
# Train on the hosts of a hostfile: pdsh starts torchrun on each over ssh. For Megatron-LM and all other trainers.
#
#   TRAINER=megatron_lm MEGATRON_PATH=... HOSTFILE=hosts DATA_PATH=... TOKENIZER_MODEL=... \
#       bash examples/cluster/launch/torchrun_hostfile.sh RECIPE [OPTIONS]
#
# A line of the hostfile is `node-1 slots=8`. With NODES, only the first hosts are used. For the other variables see
# common.sh.
set -euo pipefail
launch=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$launch/functions.sh"
read_settings "$@"
HOSTFILE=${HOSTFILE:?set it to a file of lines such as: node-1 slots=8}
read_hosts
MASTER_ADDR=${MASTER_ADDR:-${hosts[0]}}
source "$launch/common.sh"

on_all_nodes() { # start a command on each node, with the environment of this shell; pdsh replaces %n by the node's rank
    local remote name word
    quoted "$PWD" && for_pdsh "cd $REPLY && NODE_RANK=" && remote=$REPLY%n
    for name in "${forwarded[@]}" PATH; do
        [ -z "${!name:-}" ] || { quoted "${!name}" && for_pdsh " $name=$REPLY" && remote+=$REPLY; }
    done
    for word in "$@"; do
        quoted "$word" && for_pdsh " $REPLY" && remote+=$REPLY
    done
    run pdsh -S -R ssh -f "$NODES" -w "$(IFS=, && echo "${hosts[*]:0:NODES}")" "$remote"
}
on_all_nodes "${on_node[@]}" python "${preflight[@]}" "${trained[@]}"
on_all_nodes "${on_node[@]}" bash "$launch/torchrun_node.sh" --nnodes "$NODES" --nproc-per-node "$GPUS_PER_NODE" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" ${module:+-m "$module"} "$script" "${options[@]}"
