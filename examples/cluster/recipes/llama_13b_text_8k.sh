# shellcheck shell=bash disable=SC2034  # the launchers read these
# The paper's 13B model of text with sequences of 8,192 tokens, 500 B tokens of RefinedWeb.
#
# For 256 A100-80GB. Memory per GPU, by `python examples/estimate_memory.py examples/cluster/recipes/llama_13b_text_8k.sh`:
# 57.1 GB: weights 6.5, gradients 19.5, optimizer 0.6, activations 30.5
# Two tensor-parallel ranks would need 100 GB, or a third more computation. Four stay within a node, and one node is
# enough (76.0 GB).
source "$(dirname "${BASH_SOURCE[0]}")/llama_13b_text_2k.sh"
seq_length=8192

global_batch_size=256 # 2,097,152 tokens
tensor_parallel=4 # a sequence's activations fit without recomputation, and its ranks stay within a node
