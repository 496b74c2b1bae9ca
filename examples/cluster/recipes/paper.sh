# shellcheck shell=bash disable=SC2034  # the launchers read these
# What the paper's runs have in common: 2 M tokens a batch, AdamW, 3e-4 with 3,000 steps of warm-up and a cosine after
# them. What the paper leaves open is LLaMA's: betas, weight decay, clipping, and a last learning rate of a tenth.
vocab_size=32000 # of LLaMA's tokenizer; only the memory estimate reads it
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
document_mask=no # yes: with mmap, attention inside documents too; bfp has it always

# ZeRO 1: each GPU holds all gradients in fp32, so that micro-batches add up exactly, and they travel once a step
zero_stage=1
recompute=none # full: keep only the layers' inputs, for a third more computation
device=gpu

save_interval=1000
eval_interval=1000
eval_iters=20
log_interval=1
