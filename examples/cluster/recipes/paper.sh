# shellcheck shell=bash disable=SC2034  # the launchers read these
# What the paper's runs have in common: 2 M tokens per batch, AdamW, a learning rate of 3e-4 with 3,000 steps of warm-up
# and cosine decay. Where the paper does not say, LLaMA's values: betas, weight decay, clipping, decay to a tenth.
vocab_size=32000 # of LLaMA's tokenizer; for the memory estimate and preflight
tokenizer_type=SentencePieceTokenizer
split=969,30,1

lr=3e-4
min_lr=3e-5
lr_warmup_iters=3000
weight_decay=0.1
adam_beta1=0.9
adam_beta2=0.95
clip_grad=1.0
precision=bf16

data_impl=bfp    # mmap: concatenation
document_mask=no # yes: with mmap, attention inside documents; bfp always has it

# ZeRO 1: each GPU sums all gradients in fp32, exactly, and sends them once per step
zero_stage=1
recompute=none # full: keep only the layers' inputs, at the cost of a third more computation
device=gpu

save_interval=1000
eval_interval=1000
eval_iters=20
log_interval=1
