# shellcheck shell=bash disable=SC2034  # the launchers read these
# The paper's 13B model of text: sequences of 2,048 tokens, 500 B tokens of RefinedWeb.
#
# For 256 A100-80GB. MEMORY
source "$(dirname "${BASH_SOURCE[0]}")/paper.sh"
num_layers=40
hidden_size=5120
ffn_hidden_size=13824
num_attention_heads=40
seq_length=2048

global_batch_size=1024 # 2,097,152 tokens
train_iters=238418     # 500 B tokens
micro_batch_size=2
tensor_parallel=2
