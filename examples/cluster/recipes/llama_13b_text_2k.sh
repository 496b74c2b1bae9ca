# shellcheck shell=bash disable=SC2034  # the launchers read these
# The paper's 13B model of text: sequences of 2,048 tokens, 500 B tokens of RefinedWeb.
#
# For 256 A100-80GB. Memory per GPU, by `python examples/estimate_memory.py examples/cluster/recipes/llama_13b_text_2k.sh`:
# 64.5 GB: weights 13.0, gradients 39.0, optimizer 0.6, activations 11.8
# Without tensor parallelism the gradients alone would take 78 GB; with it no recomputation is needed. It takes at least
# two nodes of 8 (73.7 GB).
source "$(dirname "${BASH_SOURCE[0]}")/paper.sh"
num_layers=40
hidden_size=5120
ffn_hidden_size=13824
num_attention_heads=40
seq_length=2048

global_batch_size=1024 # 2,097,152 tokens
train_iters=238418     # 500 B tokens
micro_batch_size=1
tensor_parallel=2
