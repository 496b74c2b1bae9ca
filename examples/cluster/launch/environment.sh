# shellcheck shell=bash
# The environment of every process of a run, in one place; what is set already is kept. Sourced by common.sh.

# NCCL names the host and the link that fails, and is silent otherwise. INFO tells which network it chose
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# 4 us * 2^22, about 17 s, before a lost packet is an error: a switch that reroutes takes longer than the default's 4 s
export NCCL_IB_TIMEOUT=${NCCL_IB_TIMEOUT:-22}
# Megatron's tensor parallelism relies on kernels starting in the order in which they were queued
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
# The recipes fill most of a GPU: segments that grow leave no holes too small for the next tensor
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
# Each rank and each reader of samples would start a thread for every core of the node
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# Not set here, as only you know your network: NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME (the interface between nodes,
# such as eth0, where a node has several) and NCCL_IB_HCA (the InfiniBand cards, where some are for storage)

# What reaches other hosts over ssh. pdsh's remote shells know none of it, and DeepSpeed itself forwards only names that
# begin with NCCL, PYTHON, UCX, MV2 or MLFLOW. Add your own here, such as LD_LIBRARY_PATH
forwarded=(NCCL_DEBUG NCCL_IB_TIMEOUT NCCL_SOCKET_IFNAME NCCL_IB_HCA GLOO_SOCKET_IFNAME
    CUDA_DEVICE_MAX_CONNECTIONS PYTORCH_ALLOC_CONF OMP_NUM_THREADS PYTHONPATH)

# NAME=VALUE for each that is set, as DeepSpeed reads its .deepspeed_env: it fails on comments and empty lines, puts
# values between double quotes without escaping anything in them, and hands them to pdsh
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
