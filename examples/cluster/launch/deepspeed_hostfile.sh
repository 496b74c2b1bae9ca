#!/usr/bin/env bash
# Train on the hosts of a hostfile: deepspeed starts all processes over ssh, with pdsh. Run it on one of the hosts.
#
#   HOSTFILE=hosts DATA_PATH=... TOKENIZER_MODEL=... bash examples/cluster/launch/deepspeed_hostfile.sh RECIPE [OPTIONS]
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
[ "$TRAINER" != megatron_lm ] || die "Megatron-LM starts with torchrun: use torchrun_hostfile.sh"
[ ${#on_node[@]} = 0 ] || die "DeepSpeed starts processes without PROLOGUE and CONTAINER_IMAGE; use torchrun_hostfile.sh"

if [ "${DRY_RUN:-0}" = 0 ]; then
    assignments >"$OUTPUT/deepspeed_env"
    export DS_ENV_FILE=$OUTPUT/deepspeed_env # instead of .deepspeed_env
fi
# DeepSpeed does not quote these for the shells of the other hosts
for path in "$PWD" "$(command -v deepspeed || true)"; do
    [[ $NODES = 1 || $path =~ ^[[:alnum:]@+=:,./_-]*$ ]] ||
        die "$path: DeepSpeed cannot start runs where a path has such characters; use torchrun_hostfile.sh"
done
on_all_nodes() { # options of deepspeed, a script or module, and its options
    local word words=() before_script=1
    for word in "$@"; do
        REPLY=$word
        # One node gets the words unchanged. On several nodes they pass through pdsh and a shell. Of the words after the
        # script, deepspeed puts those with a space between double quotes, and escapes only double quotes in them
        if [ "$NODES" != 1 ]; then
            for_pdsh "$word"
            if [[ ! $before_script && $word = *' '* ]]; then
                between_double_quotes "$REPLY"
            else
                quoted "$REPLY"
            fi
        fi
        words+=("$REPLY")
        [[ $word = --* ]] || before_script=
    done
    run deepspeed --hostfile "$HOSTFILE" --num_nodes "$NODES" --num_gpus "$GPUS_PER_NODE" \
        --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" "${words[@]}"
}
on_all_nodes --no_local_rank "${preflight[@]}" "${trained[@]}"
on_all_nodes ${module:+--module "$module"} "$script" "${options[@]}"
