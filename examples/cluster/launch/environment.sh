# shellcheck shell=bash
# The environment of every process of a run. Variables that are already set are kept. Sourced by common.sh, which sets
# OUTPUT.

# With WARN, NCCL names the host and the link that fails. INFO also tells which network it chose
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# 4 us * 2^22, about 17 s, until a lost packet is an error: a switch may need longer to reroute than the default's 4 s
export NCCL_IB_TIMEOUT=${NCCL_IB_TIMEOUT:-22}
# Megatron's tensor parallelism relies on kernels starting in the order in which they were queued
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
# The recipes fill most of a GPU: segments that grow leave no holes too small for the next tensor
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
# Otherwise each rank and each dataloader process starts a thread for every core of the node
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# torch's flight recorder: each rank remembers its last collectives. If one times out, every rank writes them to a file,
# this path and its number; docs/clusters.md says how to read them. Older versions of torch know the size and the path as
# TORCH_NCCL_TRACE_BUFFER_SIZE and TORCH_NCCL_DEBUG_INFO_TEMP_FILE
export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-2000}
export TORCH_NCCL_DUMP_ON_TIMEOUT=${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}
export TORCH_FR_DUMP_TEMP_FILE=${TORCH_FR_DUMP_TEMP_FILE:-${OUTPUT:-$PWD}/flight_recorder/rank_}

# Not set, as they depend on your network: NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME (the interface between nodes,
# such as eth0, if a node has several) and NCCL_IB_HCA (the InfiniBand cards, if some are for storage)

# Variables that are passed to other hosts over ssh, and into pyxis' containers. pdsh passes none, and DeepSpeed only
# those that begin with NCCL, PYTHON, UCX, MV2 or MLFLOW. Add your own here, such as LD_LIBRARY_PATH
forwarded=(NCCL_DEBUG NCCL_IB_TIMEOUT NCCL_SOCKET_IFNAME NCCL_IB_HCA GLOO_SOCKET_IFNAME
    CUDA_DEVICE_MAX_CONNECTIONS PYTORCH_ALLOC_CONF OMP_NUM_THREADS PYTHONPATH
    TORCH_FR_BUFFER_SIZE TORCH_NCCL_DUMP_ON_TIMEOUT TORCH_FR_DUMP_TEMP_FILE)

# NAME=VALUE for each that is set, for DeepSpeed's .deepspeed_env. DeepSpeed fails on comments and empty lines, puts values
# between double quotes without escaping them, and passes them to pdsh
assignments() {
    local name
    for name in "${forwarded[@]}"; do
        [ -n "${!name:-}" ] || continue
        [[ ${!name} != *$'\n'* ]] || die "$name holds a line feed, which DeepSpeed cannot hand to other hosts"
        between_double_quotes "${!name}"
        for_pdsh "${REPLY//\"/\\\"}"
        printf '%s=%s\n' "$name" "$REPLY"
    done
}
