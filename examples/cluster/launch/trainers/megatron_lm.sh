# shellcheck shell=bash disable=SC2034,SC2154  # between common.sh and the recipe
# A recipe as options of Megatron-LM's pretrain_gpt.py, MEGATRON_PATH being its checkout.
module=megatron_bfp
status_when_stopped=0
script=${MEGATRON_PATH:?set it to the checkout of Megatron-LM}/pretrain_gpt.py
options=(
    --num-layers "$num_layers" --hidden-size "$hidden_size" --ffn-hidden-size "$ffn_hidden_size"
    --num-attention-heads "$num_attention_heads" --seq-length "$seq_length" --max-position-embeddings "$seq_length"
    --position-embedding-type rope --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --attention-backend flash
    --micro-batch-size "$micro_batch_size" --global-batch-size "$global_batch_size" --train-iters "$train_iters"
    --lr "$lr" --min-lr "$min_lr" --lr-decay-style cosine --lr-warmup-iters "$lr_warmup_iters"
    --weight-decay "$weight_decay" --adam-beta1 "$adam_beta1" --adam-beta2 "$adam_beta2" --clip-grad "$clip_grad"
    --tensor-model-parallel-size "$tensor_parallel"
    --calculate-per-token-loss # micro-batches differ in targets: a mean of means would weight them alike
    --data-impl "$data_impl" --data-path "${data_path[@]}" --split "$split" --no-create-attention-mask-in-dataloader
    --tokenizer-type "$tokenizer_type" --tokenizer-model "$TOKENIZER_MODEL"
    --save "$OUTPUT/checkpoints" --load "$OUTPUT/checkpoints" --save-interval "$save_interval"
    --eval-interval "$eval_interval" --eval-iters "$eval_iters" --log-interval "$log_interval"
    --tensorboard-dir "$OUTPUT/tensorboard"
    --exit-signal-handler --exit-signal SIGUSR1 # SLURM's warning: a last checkpoint
)
# ZeRO 1 under its own name, with communication overlapping computation
[ "$zero_stage" = 0 ] || options+=(--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather)
[ "${context_parallel:-1}" = 1 ] || options+=(--context-parallel-size "$context_parallel")
[ "$tensor_parallel" = 1 ] || options+=(--sequence-parallel) # splits the norms between the ranks, too
[ "$precision" != bf16 ] || options+=(--bf16)
[ "$recompute" != full ] || options+=(--recompute-granularity full --recompute-method uniform --recompute-num-layers 1)
[ "$document_mask" != yes ] || options+=(--dataloader-inter-document-masking)
[ "$device" != cpu ] || die "$recipe trains on CPUs, Megatron-LM needs GPUs"
