# shellcheck shell=bash disable=SC2034  # the launchers read these
# The paper's 7B model of code: sequences of 2,048 tokens, 300 B tokens of The Stack.
#
# For 256 A100-80GB. MEMORY
source "$(dirname "${BASH_SOURCE[0]}")/paper.sh"
num_layers=32
hidden_size=4096
ffn_hidden_size=11008
num_attention_heads=32
seq_length=2048

global_batch_size=1024 # 2,097,152 tokens
train_iters=143051     # 300 B tokens
micro_batch_size=1
tensor_parallel=1
