#!/usr/bin/env bash
# Train on the hosts of a hostfile: deepspeed starts all processes, over ssh with pdsh. Run it on one of the hosts.
#
#   HOSTFILE=hosts DATA_PATH=... TOKENIZER_MODEL=... bash examples/launch/deepspeed_hostfile.sh RECIPE [OPTIONS]
#
# A line of the hostfile is `node-1 slots=8`. NODES takes the first so many; the other variables are told in common.sh.
set -euo pipefail
launch=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
HOSTFILE=${HOSTFILE:?set it to a file of lines such as: node-1 slots=8}
mapfile -t hosts < <(awk '/^[^#]*slots=/ {print $1}' "$HOSTFILE")
NODES=${NODES:-${#hosts[@]}}
MASTER_ADDR=${MASTER_ADDR:-${hosts[0]}}
source "$launch/common.sh"
[ "$TRAINER" != megatron_lm ] || die "Megatron-LM starts with torchrun: use torchrun_hostfile.sh"

if [ "${DRY_RUN:-0}" = 0 ]; then
    assignments >"$OUTPUT/deepspeed_env"
    export DS_ENV_FILE=$OUTPUT/deepspeed_env # takes the place of .deepspeed_env
fi
on_all_nodes() { # options of deepspeed, a script and its options
    local word words=()
    for word in "$@"; do
        # For a remote shell, to which deepspeed quotes spaces alone: <|endoftext|> would be a pipe
        [[ $NODES = 1 || $word = *' '* || $word =~ ^[[:alnum:]@%+=:,./_-]+$ ]] || word=$(printf '%q' "$word")
        words+=("$word")
    done
    run deepspeed --hostfile "$HOSTFILE" --num_nodes "$NODES" --num_gpus "$GPUS_PER_NODE" \
        --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" "${words[@]}"
}
on_all_nodes --no_local_rank "${preflight[@]}"
on_all_nodes ${module:+--module "$module"} "$script" "${options[@]}"
