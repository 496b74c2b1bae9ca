# shellcheck shell=bash disable=SC2034  # the launchers read these
# The paper's 7B model of code: sequences of 2,048 tokens, 300 B tokens of The Stack.
#
# For 256 A100-80GB. Memory per GPU, by `python examples/estimate_memory.py examples/cluster/recipes/llama_7b_code_2k.sh`:
# 67.4 GB: weights 13.5, gradients 40.4, optimizer 0.3, activations 13.1
# Neither tensor parallelism nor recomputation is needed, not even on one node of 8 (77.2 GB).
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
