# shellcheck shell=bash disable=SC2034  # the launchers read these
# The paper's 13B model of text with sequences of 8,192 tokens, 500 B tokens of RefinedWeb.
#
# For 256 A100-80GB. MEMORY
source "$(dirname "${BASH_SOURCE[0]}")/llama_13b_text_2k.sh"
seq_length=8192

global_batch_size=256 # 2,097,152 tokens
micro_batch_size=1
tensor_parallel=4 # a sequence's activations fit without recomputation, and its ranks stay within a node
