# shellcheck shell=bash disable=SC2034,SC2154  # between common.sh and the launchers
# How commands are started on a node: after the prologue, in the container. Sourced by common.sh, it sets
#
#   on_node          what comes before a command on each node
#   on_this_node     what comes before a command on the node of the launcher
#   in_pyxis         options of srun
#
# pyxis starts all of a task in the container, the prologue too. Apptainer and Singularity start the command in it, so the
# prologue can load their module.
on_node=() on_this_node=() in_pyxis=()

mounts() { # the folders that a container sees, in REPLY: those that the launchers name, and CONTAINER_MOUNTS
    local folder part
    REPLY=
    for folder in "${examples%/*}" "$PWD" "$OUTPUT" ${MEGATRON_PATH:+"$MEGATRON_PATH"} ${PROLOGUE:+"${PROLOGUE%/*}"}; do
        [[ $folder = /* ]] || folder=$PWD/$folder
        [[ $folder != *[,:]* ]] || die "$folder: a container cannot mount a path with a comma or a colon"
        [[ ,$REPLY, = *",$folder:$folder,"* ]] || REPLY+=${REPLY:+,}$folder:$folder
    done
    for part in ${CONTAINER_MOUNTS:+${CONTAINER_MOUNTS//,/ }}; do
        [[ $part = *:* ]] || part=$part:$part
        REPLY+=,$part
    done
}

visible_variables() { # the variables of forwarded that are set, joined by commas, in REPLY
    local name
    REPLY=
    for name in "${forwarded[@]}"; do
        [ -z "${!name:-}" ] || REPLY+=${REPLY:+,}$name
    done
}

if [ -n "${PROLOGUE:-}" ]; then
    PROLOGUE=$(cd "$(dirname "$PROLOGUE")" && pwd)/$(basename "$PROLOGUE")
    on_node=(bash "$examples/cluster/launch/with_prologue.sh" "$PROLOGUE")
fi
if [ -n "${CONTAINER_IMAGE:-}" ]; then
    mounts
    case ${CONTAINER_RUNTIME:=${can_use_pyxis:+pyxis}} in
        pyxis)
            [ -n "${can_use_pyxis:-}" ] || die "CONTAINER_RUNTIME=pyxis: only slurm.sh can use it"
            in_pyxis=(--container-image "$CONTAINER_IMAGE" --container-mounts "$REPLY" --container-workdir "$PWD")
            # Other variables of the image win over those of this shell
            visible_variables
            in_pyxis+=(--container-env "$REPLY")
            ;;
        '' | apptainer | singularity)
            on_this_node=("${CONTAINER_RUNTIME:=apptainer}" exec --pwd "$PWD" --bind "$REPLY")
            [ "$device" = cpu ] || on_this_node+=(--nv)
            on_this_node+=("$CONTAINER_IMAGE")
            on_node+=("${on_this_node[@]}")
            ;;
        *) die "CONTAINER_RUNTIME=$CONTAINER_RUNTIME: give pyxis, apptainer or singularity" ;;
    esac
fi
