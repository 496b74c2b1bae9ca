# shellcheck shell=bash disable=SC2034  # the launchers read these
# A model that two CPU ranks train in a minute, to try launchers, data and checkpoints before GPUs are needed.
#
# Memory per rank, by `python examples/estimate_memory.py --nodes 1 --gpus-per-node 2 examples/cluster/recipes/tiny.sh`:
# 426.3 MB: weights 30.4, gradients 60.8, optimizer 45.6, activations 289.4
source "$(dirname "${BASH_SOURCE[0]}")/paper.sh"
num_layers=4
hidden_size=256
ffn_hidden_size=768
num_attention_heads=8
seq_length=512
vocab_size=8192 # of the quickstart's tokenizer
tokenizer_type=HuggingFaceTokenizer

global_batch_size=16
train_iters=100
micro_batch_size=4
tensor_parallel=1

lr=3e-3
min_lr=3e-4
lr_warmup_iters=10
precision=fp32
device=cpu
save_interval=50
eval_interval=50
: "${GPUS_PER_NODE:=2}" # ranks of a node
