# shellcheck shell=bash disable=SC2034  # the launchers read these
# The paper's 13B model of text with sequences of 32,768 tokens, 500 B tokens. The paper itself stops at 8,192.
#
# For 256 A100-80GB. Memory per GPU, by `python examples/estimate_memory.py examples/cluster/recipes/llama_13b_text_32k.sh`:
# 58.4 GB: weights 13.0, gradients 39.0, optimizer 0.6, activations 5.7
# Without recomputation it would be 100 GB. A node of 8 GPUs holds two tensor-parallel ranks times four that share a
# sequence; each of these has 5 of the 20 heads of its tensor-parallel rank.
source "$(dirname "${BASH_SOURCE[0]}")/llama_13b_text_2k.sh"
seq_length=32768

global_batch_size=64 # 2,097,152 tokens
context_parallel=4
recompute=full
