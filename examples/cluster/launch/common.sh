# shellcheck shell=bash
# What all launchers share: the recipe, the environment, the container, the trainer's options, the plan. They source it
# after functions.sh and read_settings, with
#
#   NODES, MASTER_ADDR, [hosts]     set by the launcher: number of nodes, the first one, the names of all
#   RECIPE [OPTIONS]                the launcher's arguments; OPTIONS go to the trainer unchanged. RECIPE may be a TOML file
#                                   of all options, whose table [launch] holds the variables below; --print-config prints
#                                   such a file for a recipe. Variables of the shell win over the file
#   DATA_PATH="[WEIGHT] PREFIX ..." TOKENIZER_MODEL=FILE [EOD_TOKEN=TEXT] [TOKENIZER_TYPE=TYPE]
#                                   DATA_PATH is split at spaces and line feeds. Give a path that contains them after the
#                                   recipe: --data-path 'MY DATA/PREFIX'. A TOML file may hold these as options
#   [GPUS_PER_NODE=8] [MASTER_PORT=29500] [OUTPUT=FOLDER, shared by all nodes; default runs/RECIPE]
#   [TRAINER=megatron_lm|megatron_deepspeed MEGATRON_PATH=CHECKOUT]
#   [PROLOGUE=FILE, which is sourced on each node before the start, for modules and conda]
#   [CONTAINER_IMAGE=IMAGE] [CONTAINER_MOUNTS=SOURCE[:TARGET[:FLAGS]],...] [CONTAINER_RUNTIME=apptainer|singularity]
#                                   the container sees this repository, the working folder, OUTPUT, MEGATRON_PATH, the
#                                   folder of PROLOGUE, and CONTAINER_MOUNTS: name those of the data and the tokenizer
#   [ALL_REDUCE_MB=N: MiB of the preflight's all-reduce; 0: none]
#   [DRY_RUN=1: print the commands and the plan, start nothing]
# shellcheck disable=SC2034,SC2154  # between the launcher and the recipe
examples=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

[ $# -gt 0 ] || die "which recipe? one of $(cd "$examples/cluster/recipes" && echo llama*.sh tiny.sh)"
recipe=$1
shift
[ -f "$recipe" ] || die "$recipe: no such recipe"
[[ $recipe = */* ]] || recipe=./$recipe # bash would look for it in PATH
: "${TRAINER:=pretrain_gpt}"
if [[ $recipe = *.toml ]]; then
    [ "$TRAINER" = pretrain_gpt ] || die "$recipe: a TOML file has the example trainer's options; give $TRAINER a recipe"
    [ -n "${vocab_size:-}" ] || die "$recipe: set vocab_size in its table [launch], the tokenizer's, for the plan"
    device=${device:-gpu}
    options_from=$examples/cluster/launch/trainers/options_file.sh
else
    [ -n "${DATA_PATH:-}" ] || die "set DATA_PATH to the dataset, its path without .bin or .idx"
    [ -n "${TOKENIZER_MODEL:-}" ] || die "set TOKENIZER_MODEL to the tokenizer's file"
    # shellcheck source=/dev/null
    source "$recipe"
    tokenizer_type=${TOKENIZER_TYPE:-$tokenizer_type}
    options_from=$examples/cluster/launch/trainers/$TRAINER.sh
fi

GPUS_PER_NODE=${GPUS_PER_NODE:-8}
MASTER_PORT=${MASTER_PORT:-29500}
OUTPUT=${OUTPUT:-$PWD/runs/$(basename "${recipe%.*}")}
[[ $OUTPUT = /* ]] || OUTPUT=$PWD/$OUTPUT
split_words "${DATA_PATH:-}"
data_path=("${words[@]}")
[[ $recipe = *.toml || ${#data_path[@]} -gt 0 ]] ||
    die "DATA_PATH is empty: set it to the dataset, its path without .bin or .idx"
export PYTHONPATH="${examples%/*}${PYTHONPATH:+:$PYTHONPATH}" # the same megatron_bfp on all nodes
# shellcheck source=environment.sh
source "$examples/cluster/launch/environment.sh"
# shellcheck source=container.sh
source "$examples/cluster/launch/container.sh"

# A file of trainers/ sets script, module (the Python module that runs the script, or nothing) and options. It may define
# a function prepare, for what else its trainer needs, and say how it stops before a time limit: with another signal, or
# with status 0
stop_signal=USR1
status_when_stopped=
[ -f "$options_from" ] || die "TRAINER=$TRAINER: give pretrain_gpt, megatron_lm or megatron_deepspeed"
# shellcheck source=trainers/pretrain_gpt.sh
source "$options_from"
options+=("$@")

if [[ " $* " = *" --print-config "* ]]; then
    [ "$TRAINER" = pretrain_gpt ] || die "--print-config writes the example trainer's options, not those of $TRAINER"
    python "$script" "${options[@]}"
    settings write NODES="$NODES" GPUS_PER_NODE="$GPUS_PER_NODE" OUTPUT="$OUTPUT" HOSTFILE="${HOSTFILE:-}" \
        PROLOGUE="${PROLOGUE:-}" CONTAINER_IMAGE="${CONTAINER_IMAGE:-}" CONTAINER_MOUNTS="${CONTAINER_MOUNTS:-}" \
        CONTAINER_RUNTIME="${CONTAINER_RUNTIME:-}" SRUN_ARGS="${SRUN_ARGS:-}" ALL_REDUCE_MB="${ALL_REDUCE_MB:-}" \
        device="$device" vocab_size="$vocab_size"
    exit 0
fi

# The plan and preflight read the same options as the trainer
trained=(--vocab-size "$vocab_size" --trainer "$TRAINER" "${options[@]}")
preflight=("$examples/preflight.py" --nodes "$NODES" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT"
    --gpus-per-node "$([ "$device" = cpu ] && echo 0 || echo "$GPUS_PER_NODE")"
    ${ALL_REDUCE_MB:+--all-reduce-mb "$ALL_REDUCE_MB"})
[ ${#hosts[@]} = 0 ] || preflight+=(--hosts "$(IFS=, && echo "${hosts[*]:0:NODES}")")
plan=(python "$examples/plan_run.py" "$recipe" --nodes "$NODES" --gpus-per-node "$GPUS_PER_NODE" --device "$device")

if [ "${DRY_RUN:-0}" != 0 ]; then
    "${plan[@]}" "${trained[@]}" # without the container
else
    mkdir -p "$OUTPUT/flight_recorder" # before a container mounts it
    [ ${#in_pyxis[@]} = 0 ] || on_this_node=(srun --nodes 1 --ntasks 1 "${srun_args[@]}" "${in_pyxis[@]}")
    ${on_this_node[@]+"${on_this_node[@]}"} "${plan[@]}" "${trained[@]}"
fi
! declare -F prepare >/dev/null || prepare
