# shellcheck shell=bash
# What all launchers share: the recipe, the environment, the trainer's options, the plan. They source it with
#
#   NODES, MASTER_ADDR              set by the launcher
#   RECIPE [OPTIONS]                the launcher's arguments; OPTIONS go to the trainer unchanged
#   DATA_PATH="[WEIGHT] PREFIX ..." TOKENIZER_MODEL=FILE [EOD_TOKEN=TEXT] [TOKENIZER_TYPE=TYPE]
#                                   DATA_PATH is split at spaces and line feeds. Give a path that contains them after the
#                                   recipe: --data-path 'MY DATA/PREFIX'
#   [GPUS_PER_NODE=8] [MASTER_PORT=29500] [OUTPUT=FOLDER, shared by all nodes; default runs/RECIPE]
#   [TRAINER=megatron_lm|megatron_deepspeed MEGATRON_PATH=CHECKOUT]
#   [DRY_RUN=1: print the commands and the plan, start nothing]
# shellcheck disable=SC2034,SC2154  # between the launcher and the recipe
examples=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

# shellcheck source=functions.sh
source "$examples/cluster/launch/functions.sh"

[ $# -gt 0 ] || die "which recipe? one of $(cd "$examples/cluster/recipes" && echo llama*.sh tiny.sh)"
recipe=$1
shift
[ -f "$recipe" ] || die "$recipe: no such recipe"
[[ $recipe = */* ]] || recipe=./$recipe # bash would look for it in PATH
[ -n "${DATA_PATH:-}" ] || die "set DATA_PATH to the dataset, its path without .bin or .idx"
[ -n "${TOKENIZER_MODEL:-}" ] || die "set TOKENIZER_MODEL to the tokenizer's file"

# shellcheck source=/dev/null
source "$recipe"
# shellcheck source=environment.sh
source "$examples/cluster/launch/environment.sh"
tokenizer_type=${TOKENIZER_TYPE:-$tokenizer_type}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
MASTER_PORT=${MASTER_PORT:-29500}
OUTPUT=${OUTPUT:-$PWD/runs/$(basename "$recipe" .sh)}
split_words "$DATA_PATH"
data_path=("${words[@]}")
[ ${#data_path[@]} -gt 0 ] || die "DATA_PATH is empty: set it to the dataset, its path without .bin or .idx"
export PYTHONPATH="${examples%/*}${PYTHONPATH:+:$PYTHONPATH}" # the same megatron_bfp on all nodes

# A file of trainers/ sets script, module (the Python module that runs the script, or nothing) and options. It may define
# a function prepare, for what else its trainer needs
[ -f "$examples/cluster/launch/trainers/${TRAINER:=pretrain_gpt}.sh" ] ||
    die "TRAINER=$TRAINER: give pretrain_gpt, megatron_lm or megatron_deepspeed"
# shellcheck source=trainers/pretrain_gpt.sh
source "$examples/cluster/launch/trainers/$TRAINER.sh"
options+=("$@")

# The plan and preflight read the same options as the trainer
trained=(--vocab-size "$vocab_size" --trainer "$TRAINER" "${options[@]}")
preflight=("$examples/preflight.py" --nodes "$NODES" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT"
    --gpus-per-node "$([ "$device" = cpu ] && echo 0 || echo "$GPUS_PER_NODE")")

python "$examples/plan_run.py" "$recipe" --nodes "$NODES" --gpus-per-node "$GPUS_PER_NODE" --device "$device" \
    "${trained[@]}"
[ "${DRY_RUN:-0}" != 0 ] || mkdir -p "$OUTPUT"
! declare -F prepare >/dev/null || prepare
