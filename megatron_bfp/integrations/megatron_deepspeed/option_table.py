"""What Megatron-DeepSpeed's options do with ``--data-impl bfp``, in the order of the documentation: data, batches,
parallelism, attention and layers, other kinds of samples and losses."""

from ..option_table import NotNeeded, Refused, Row, Source, Untried, Works
from .option_conditions import curriculum, other_layers, other_loader, saves_rotary_table, ulysses_without_flash

_TESTS = "tests/integration/test_real_megatron_deepspeed.py::"
_DATA = "tests/integration/test_real_megatron_deepspeed_data.py::"
_BALANCE = "tests/integration/test_real_megatron_deepspeed_balance.py::"
_CHECKS = "tests/integrations/test_megatron_deepspeed_options.py::"


OPTIONS: tuple[Row, ...] = (
    Works(
        options=("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path"),
        label="`--data-path`, or `--train-data-path`, `--valid-data-path`, `--test-data-path`; `--split`, "
        "`--data-cache-path`",
        how="a blend takes a weight before each prefix",
        shown_by=(
            _DATA + "test_a_blend_with_prebuilt_indexes_is_exact",
            _DATA + "test_separate_data_paths_and_the_cache",
        ),
    ),
    Refused(
        options=("--data-path",),
        label="a blend of more than 254 corpora",
        why="Megatron-DeepSpeed's blends take no more",
        instead="join corpora with megatron-bfp merge",
        checked_by="check_data_paths",
        shown_by=(Source("megatron.data.blendable_dataset:BlendableDataset.__init__", "assert num_datasets < 255"),),
    ),
    Works(
        options=("--max-documents-per-sequence",),
        is_new=True,
        how="the largest number of documents in a sequence",
        shown_by=(_TESTS + "test_the_first_loss_is_that_of_the_chunks_alone",),
    ),
    Works(
        options=("--even-sequences",),
        is_new=True,
        how="about as many documents in every sequence, without padding",
        shown_by=(_BALANCE + "test_the_option_of_even_sequences_arrives",),
    ),
    Works(
        options=("--targets-only",),
        is_new=True,
        how="[no position without a target](training.md#no-position-without-a-target)",
        shown_by=(_TESTS + "test_the_first_loss_is_that_of_the_chunks_alone",),
    ),
    Works(
        options=(
            "--fim-rate",
            "--fim-spm-rate",
            "--fim-prefix-token",
            "--fim-middle-token",
            "--fim-suffix-token",
        ),
        is_new=True,
        how="[fill-in-the-middle](script.md#fill-in-the-middle); the tokens must be in the tokenizer's vocabulary",
        shown_by=(
            "tests/integration/test_real_megatron_deepspeed_data.py::test_documents_are_rearranged_for_fill_in_the_middle",
        ),
    ),
    Works(
        options=("--seq-length",),
        how="up to 16,777,216",
        shown_by=("tests/guarantees/test_seq_length_limit.py::test_fault_B09_the_longest_is_taken",),
    ),
    Works(
        options=("--balance-batches",),
        label="`--balance-batches N`",
        is_new=True,
        how="see [Balanced batches](#what-to-expect). 1, the default: training samples are ordered by work inside each "
        "global batch. 0: off. More: over N global batches",
        shown_by=(_BALANCE + "test_balancing_changes_the_order_inside_a_batch_alone",),
    ),
    Works(
        options=("--rampup-batch-size",),
        how="every global batch keeps its samples. Refused with `--balance-batches` above 1",
        shown_by=(
            _BALANCE + "test_batches_that_grow_keep_their_samples",
            _BALANCE + "test_growing_batches_are_not_composed_by_cost",
        ),
    ),
    Refused(
        options=("--dataloader-type",),
        label="`--dataloader-type cyclic`",
        condition=other_loader,
        why="the order of samples would depend on the data-parallel size, since each rank shuffles its own share",
        instead="leave it out, packed samples are shuffled anyway",
        shown_by=(
            Source(
                "megatron.data.data_samplers:MegatronPretrainingRandomSampler",
                "start_idx = self.data_parallel_rank * bucket_size",
            ),
        ),
    ),
    Works(
        options=("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--zero-stage"),
        label="`--tensor-model-parallel-size`, `--pipeline-model-parallel-size`, data parallelism, "
        "`--zero-stage` 1 and 3",
        shown_by=(
            _TESTS + "test_three_ways_in_with_two_ranks",
            _TESTS + "test_pipelines_train_as_one_stage",
            _TESTS + "test_zero_trains_as_one_rank",
        ),
    ),
    Works(
        options=("--enable-zbh1-pipeline", "--enable-zbh1-exact-semantics"),
        how="its schedule changes when gradients of weights are computed. By itself it stops with DeepSpeed 0.17.5 and "
        "later, which lack a function that it calls; it was tested with that mended",
        shown_by=(_TESTS + "test_the_zero_bubble_schedule_trains_as_the_usual_one",),
    ),
    Works(
        options=("--ds-sequence-parallel-size", "--force-ds-sequence-parallel"),
        label="Ulysses: `--ds-sequence-parallel-size` above 1, `--force-ds-sequence-parallel`",
        how="with flash attention",
        shown_by=(_TESTS + "test_sequence_parallel_ranks_train_as_one",),
    ),
    Refused(
        options=("--ds-sequence-parallel-size", "--force-ds-sequence-parallel"),
        label="the same without flash attention",
        condition=ulysses_without_flash,
        why="without flash attention Megatron-DeepSpeed hands the mask to DeepSpeed in place of another argument, so "
        "attention gets none",
        needs="--use-flash-attn-v2",
        shown_by=(
            Source(
                "megatron.model.transformer:ParallelAttention.forward",
                "self.dist_attn(query_layer, key_layer, value_layer, attention_mask)",
            ),
        ),
    ),
    Refused(
        options=("--ds-sequence-parallel-fpdt",),
        label="FPDT: `--ds-sequence-parallel-fpdt`",
        why="its attention takes no boundaries",
        instead="use --ds-sequence-parallel-size alone, with --use-flash-attn-v2",
        shown_by=(
            Source(
                "megatron.model.transformer:launch_chunk_attention",
                "chunk_size=args.ds_sequence_parallel_fpdt_chunk_size",
            ),
        ),
    ),
    Works(
        options=("--use-flash-attn-v2",),
        shown_by=(
            _TESTS + "test_the_first_loss_is_that_of_the_chunks_alone",
            "tests/gpu/test_gpu_megatron_deepspeed.py::test_flash_attention_is_that_of_the_documents_alone",
        ),
    ),
    Untried(
        options=("--use-flash-attn-v1",),
        label="`--use-flash-attn`, `--use-flash-attn-v1`",
        why="flash-attn 1 takes boundaries like version 2, but has not been run with them",
        shown_by=(
            "tests/integrations/test_megatron_deepspeed_model.py::test_attention_is_that_of_the_documents_alone",
        ),
    ),
    Works(
        options=("--no-masked-softmax-fusion",),
        label="half precision without flash attention",
        how="the fused softmax ignores masks, so `--no-masked-softmax-fusion` is added, with a line in the log. "
        "`--use-flash-attn-v2` is faster and needs less memory",
        shown_by=(
            _DATA + "test_scripts_of_megatron_deepspeed_train_as_they_are",
            _CHECKS + "test_the_fused_softmax_is_switched_off_with_a_line",
        ),
    ),
    Refused(
        options=("--use-flash-attn-triton", "--use-flash-attn-builder"),
        why="its kernel takes no boundaries",
        instead="use --use-flash-attn-v2",
        shown_by=(
            Source(
                "megatron.model.transformer:FlashSelfAttentionTriton.forward",
                "output = flash_attn_func(q, k, v, None, self.causal)",
            ),
            Source(
                "megatron.model.transformer:FlashSelfAttention.forward",
                "q, k, v, self.dropout_p, self.softmax_scale, is_causal",
            ),
        ),
    ),
    Refused(
        options=("--transformer-impl",),
        label="`--transformer-impl transformer_engine`",
        condition=other_layers,
        why="its layers are made for a causal mask alone",
        instead="use --transformer-impl local, with --use-flash-attn-v2",
        shown_by=(
            Source(
                "megatron.model.transformer:ParallelTransformer.__init__",
                "self_attn_mask_type=self_attn_mask_type.name,",
            ),
        ),
    ),
    Works(
        options=("--use-rotary-position-embeddings",),
        how="applied correctly; see [Positions](#what-to-expect)",
        shown_by=(_TESTS + "test_fault_B18_rotary_positions_are_those_of_the_documents_alone",),
    ),
    Refused(
        options=("--use-rotary-position-embeddings",),
        label="the same with `--recompute-granularity full` without pipeline parallelism",
        condition=saves_rotary_table,
        why="Megatron-DeepSpeed's own recomputation cannot save the rotary table",
        needs="--deepspeed-activation-checkpointing",
        shown_by=(
            Source("megatron.core.tensor_parallel.random:CheckpointFunction.forward", "ctx.save_for_backward(*args)"),
        ),
    ),
    Works(
        options=("--reset-position-ids",),
        how="it restarts learned positions in each document",
        shown_by=(_TESTS + "test_the_first_loss_is_that_of_the_chunks_alone",),
    ),
    Works(options=("--eod-mask-loss",), shown_by=(_TESTS + "test_the_first_loss_is_that_of_the_chunks_alone",)),
    NotNeeded(
        options=("--reset-attention-mask",),
        why="attention always stays inside documents",
        shown_by=(_TESTS + "test_the_first_loss_is_that_of_the_chunks_alone",),
    ),
    Works(
        options=("--recompute-granularity", "--recompute-method", "--recompute-num-layers"),
        shown_by=(_TESTS + "test_recomputation_changes_nothing",),
    ),
    Works(
        options=("--num-experts",),
        label="`--num-experts`",
        how="padding passes the router as other tokens do",
        shown_by=(_TESTS + "test_layers_of_experts_train_in_a_pipeline_as_without",),
    ),
    Refused(
        options=("--data-efficiency-curriculum-learning",),
        why="it shortens and reorders samples after they were packed",
        shown_by=(Source("pretrain_gpt:data_post_process", "data['text'] = data['text'][:, :(current_seqlen+1)]"),),
    ),
    Refused(
        options=(),
        label="`curriculum_learning` in DeepSpeed's configuration",
        condition=curriculum,
        why="it cuts samples after they were packed",
        shown_by=(Source("pretrain_gpt:get_batch_pipe", "tokens = tokens[:, :args.curriculum_seqlen]"),),
    ),
    Refused(
        options=("--random-ltd",),
        why="it drops tokens between attention layers, so boundaries would no longer fit",
        shown_by=(
            Source(
                "megatron.training:setup_model_and_optimizer",
                "convert_to_random_ltd(model[0], ParallelTransformerLayer)",
            ),
        ),
    ),
    Refused(
        options=("--retro-add-retriever", "--retro-workdir"),
        label="Retro: `--retro-add-retriever`, `--retro-workdir`",
        why="it retrieves for chunks of so many positions, which cross documents",
        shown_by=(
            Source(
                "megatron.model.transformer:ParallelTransformerLayer.retro_decoder_cross_attention",
                "l = int(np.ceil(ns / self.retro_chunk_length))",
            ),
        ),
    ),
    Refused(
        options=("--kd", "--mos"),
        label="distillation: `--kd`, `--mos`",
        why="the teacher's loss counts positions without a target",
        shown_by=(
            Source(
                "pretrain_gpt:calculate_mos_loss", "nn.KLDivLoss(reduction='batchmean')(student_logits, tea_logits)"
            ),
        ),
    ),
    Refused(
        options=(
            "--train-idx-path",
            "--train-desc-path",
            "--train-doc-idx-path",
            "--train-sample-idx-path",
            "--train-shuffle-idx-path",
            "--train-data-exact-num-epochs",
            "--return-data-index",
        ),
        label="ready-made index files: `--train-idx-path`, `--train-desc-path`, `--train-doc-idx-path`, "
        "`--train-sample-idx-path`, `--train-shuffle-idx-path`, and `--train-data-exact-num-epochs`, "
        "`--return-data-index`",
        why="it is for samples that concatenate documents",
        instead="leave it out",
        shown_by=(
            Source(
                "megatron.data.gpt_dataset:_build_index_mappings", "sample_idx_filename = args.train_sample_idx_path"
            ),
        ),
    ),
    Refused(
        options=("--use-dataset-only",),
        why="other scripts take the samples, by other names and without their boundaries",
        shown_by=(Source("megatron.data.gpt_dataset:GPTDataset.__getitem__", "text_name = 'input_ids'"),),
    ),
)
"""Every option that this package knows something about. Options without a row do not concern samples or boundaries."""
