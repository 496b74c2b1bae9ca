# shellcheck shell=bash disable=SC2034,SC2154  # between common.sh and the recipe
# A recipe as options of Megatron-DeepSpeed's pretrain_gpt.py, MEGATRON_PATH being its checkout.
case $tokenizer_type in # its names
    SentencePieceTokenizer) its_tokenizer_type=GPTSentencePieceTokenizer ;;
    HuggingFaceTokenizer) its_tokenizer_type=HFTokenizer ;;
    *) die "Megatron-DeepSpeed has no $tokenizer_type" ;;
esac
[ "$document_mask" != yes ] || die "Megatron-DeepSpeed cannot mask concatenated documents; use TRAINER=megatron_lm"
[ "$device" != cpu ] || die "$recipe trains on CPUs, Megatron-DeepSpeed needs GPUs"

# Its own rotary positions are not relative (f4157be); --data-impl bfp corrects them
positions=(--use-rotary-position-embeddings)
if [ "$data_impl" != bfp ]; then
    positions=()
    printf '%s: warning: Megatron-DeepSpeed trains --data-impl %s with learned positions, as its rotary positions are %s\n' \
        "$(basename "$0")" "$data_impl" "wrong without --data-impl bfp; to compare both, use TRAINER=megatron_lm" >&2
fi

module=megatron_bfp
stop_signal=TERM # it does not save at SIGUSR1
script=${MEGATRON_PATH:?set it to the checkout of Megatron-DeepSpeed}/pretrain_gpt.py
options=(
    --num-layers "$num_layers" --hidden-size "$hidden_size" --ffn-hidden-size "$ffn_hidden_size"
    --num-attention-heads "$num_attention_heads" --seq-length "$seq_length" --max-position-embeddings "$seq_length"
    "${positions[@]}" --normalization rmsnorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --use-flash-attn-v2
    --micro-batch-size "$micro_batch_size" --global-batch-size "$global_batch_size" --train-iters "$train_iters"
    --lr "$lr" --min-lr "$min_lr" --lr-decay-style cosine --lr-warmup-iters "$lr_warmup_iters"
    --weight-decay "$weight_decay" --adam-beta1 "$adam_beta1" --adam-beta2 "$adam_beta2" --clip-grad "$clip_grad"
    --tensor-model-parallel-size "$tensor_parallel" --no-pipeline-parallel
    --deepspeed --deepspeed_config "$OUTPUT/deepspeed.json" --zero-stage "$zero_stage"
    --data-impl "$data_impl" --data-path "${data_path[@]}" --split "$split"
    --tokenizer-type "$its_tokenizer_type" --tokenizer-model "$TOKENIZER_MODEL"
    --save "$OUTPUT/checkpoints" --load "$OUTPUT/checkpoints" --save-interval "$save_interval"
    --eval-interval "$eval_interval" --eval-iters "$eval_iters" --log-interval "$log_interval"
    --tensorboard-dir "$OUTPUT/tensorboard"
)
[ "${context_parallel:-1}" = 1 ] || options+=(--ds-sequence-parallel-size "$context_parallel")
[ "$precision" != bf16 ] || options+=(--bf16)
[ "$recompute" != full ] ||
    options+=(--deepspeed-activation-checkpointing --recompute-granularity full --recompute-method uniform)

last_value() { # of an option, the value that counts, in REPLY
    local index
    for ((index = 0; index < ${#options[@]}; index++)); do
        case ${options[index]} in
            "$1") REPLY=${options[index + 1]} ;;
            "$1="*) REPLY=${options[index]#*=} ;;
        esac
    done
}

prepare() { # write DeepSpeed's configuration, which must agree with the options, including those after the recipe
    local config option values=() bf16=false fp16=false
    for option in --global-batch-size --micro-batch-size --clip-grad --zero-stage; do
        last_value "$option" && values+=("$REPLY")
    done
    [[ " ${options[*]} " != *" --bf16 "* ]] || bf16=true
    [[ " ${options[*]} " != *" --fp16 "* ]] || fp16=true
    config=$(cat <<END
{
  "train_batch_size": ${values[0]},
  "train_micro_batch_size_per_gpu": ${values[1]},
  "gradient_clipping": ${values[2]},
  "zero_optimization": {"stage": ${values[3]}},
  "bf16": {"enabled": $bf16},
  "fp16": {"enabled": $fp16},
  "data_types": {"grad_accum_dtype": "fp32"}
}
END
    )
    if [ "${DRY_RUN:-0}" != 0 ]; then
        printf '%s:\n%s\n' "$OUTPUT/deepspeed.json" "$config"
    else
        printf '%s\n' "$config" >"$OUTPUT/.deepspeed.$HOSTNAME.$$" # other nodes may be reading it
        mv "$OUTPUT/.deepspeed.$HOSTNAME.$$" "$OUTPUT/deepspeed.json"
    fi
}
