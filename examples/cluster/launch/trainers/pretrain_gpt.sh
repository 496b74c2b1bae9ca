# shellcheck shell=bash disable=SC2034,SC2154  # between common.sh and the recipe
# A recipe as options of examples/pretrain_gpt.py.
module=
script=$examples/pretrain_gpt.py
options=(
    --num-layers "$num_layers" --hidden-size "$hidden_size" --ffn-hidden-size "$ffn_hidden_size"
    --num-attention-heads "$num_attention_heads" --seq-length "$seq_length"
    --micro-batch-size "$micro_batch_size" --global-batch-size "$global_batch_size" --train-iters "$train_iters"
    --lr "$lr" --min-lr "$min_lr" --lr-decay-style cosine --lr-warmup-iters "$lr_warmup_iters"
    --weight-decay "$weight_decay" --adam-beta1 "$adam_beta1" --adam-beta2 "$adam_beta2" --clip-grad "$clip_grad"
    --zero-stage "$zero_stage" --tensor-model-parallel-size "$tensor_parallel"
    --data-impl "$data_impl" --data-path "${data_path[@]}" --split "$split"
    --tokenizer-type "$tokenizer_type" --tokenizer-model "$TOKENIZER_MODEL"
    --save "$OUTPUT/checkpoints" --load "$OUTPUT/checkpoints" --save-interval "$save_interval"
    --eval-interval "$eval_interval" --eval-iters "$eval_iters" --log-interval "$log_interval"
    --json-log "$OUTPUT/log.jsonl"
)
[ -z "${EOD_TOKEN:-}" ] || options+=(--eod-token "$EOD_TOKEN")
[ "${context_parallel:-1}" = 1 ] || options+=(--context-parallel-size "$context_parallel")
[ "$precision" != bf16 ] || options+=(--bf16)
[ "$recompute" != full ] || options+=(--recompute-granularity full)
[ "$document_mask" != yes ] || options+=(--dataloader-inter-document-masking)
