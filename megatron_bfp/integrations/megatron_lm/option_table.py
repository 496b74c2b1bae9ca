"""What Megatron-LM's options do with ``--data-impl bfp``, in the order of the documentation: data, batches,
parallelism, layers and kernels, other kinds of samples."""

from ..option_table import NotNeeded, Refused, Row, Source, Untried, Works
from .layer_options import OF_LAYERS
from .option_conditions import (
    CAPTURES_NO_ATTENTION,
    captures_attention,
    captures_other_modules,
    deterministic_gdn2,
    external_loader,
    gated_delta_net,
    learned_sinks_of_split_rows,
    other_order,
    sparse_attention,
    transformer_engine,
)
from .sample_options import OF_OTHER_SAMPLES, OF_SAMPLES

_TESTS = "tests/integration/test_real_megatron_lm.py::"
_DATA = "tests/integration/test_real_megatron_lm_data.py::"
_BALANCE = "tests/integration/test_real_megatron_lm_balance.py::"
_SPLIT_ROWS = "tests/integration/test_real_megatron_lm_context_parallel.py::"
_CHECKS = "tests/integrations/test_megatron_lm_options.py::"
_STAGES = "tests/integration/test_real_megatron_lm_pipelines.py::"
_EXPERTS = "tests/integration/test_real_megatron_lm_experts.py::"
_HYBRID = "tests/integration/test_real_megatron_lm_hybrid.py::"
_KINDS = "tests/integration/test_real_megatron_lm_kinds.py::"
_OPTIONS = "tests/integration/test_real_megatron_lm_options.py::"
_LAYERS = "tests/integrations/test_megatron_lm_attention.py::"

_IN_CONTEXT_PARALLEL = "--context-parallel-size above 1"
_BY_CONTEXT_CHECK = "check_context_parallelism"

OPTIONS: tuple[Row, ...] = (
    Works(
        options=("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path"),
        label="`--data-path`, or `--train-data-path`, `--valid-data-path`, `--test-data-path`; weights",
        shown_by=(_DATA + "test_a_blend_of_three_is_exact",),
    ),
    Works(
        options=("--split", "--data-cache-path"),
        shown_by=(_DATA + "test_options_of_data_keep_their_meaning",),
    ),
    Refused(
        options=(),
        label="object storage (`s3://` and the like)",
        why="samples are read from local files",
        instead="copy the dataset to disk",
        checked_by="BFPGPTDataset",
        shown_by=(_TESTS + "test_what_cannot_be_honoured_is_refused",),
    ),
    Works(
        options=("--max-documents-per-sequence",),
        is_new=True,
        how="the largest number of documents in a sequence",
        shown_by=(_DATA + "test_options_of_data_keep_their_meaning",),
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
        how="without `--fim-data`: [fill-in-the-middle](script.md#fill-in-the-middle) of whole documents",
        shown_by=(_TESTS + "test_the_first_loss_is_that_of_the_chunks_alone",),
    ),
    NotNeeded(
        options=("--per-dataset-sequences-path",),
        why="counts come from the .idx itself, which is opened in constant time",
        shown_by=(_DATA + "test_options_of_data_keep_their_meaning",),
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
        options=("--step-batch-size-schedule", "--decrease-batch-size-if-needed"),
        how="every global batch keeps its samples. With `--balance-batches` above 1 the schedule is refused, and so "
        "are `--rampup-batch-size` and `--phase-transition-iterations`",
        shown_by=(
            _BALANCE + "test_batches_that_grow_keep_their_samples",
            _BALANCE + "test_growing_batches_are_not_composed_by_cost",
        ),
    ),
    *OF_SAMPLES,
    Works(
        options=("--calculate-per-token-loss",),
        how="recommended; see [Loss](#what-to-expect)",
        shown_by=(_TESTS + "test_the_first_loss_is_that_of_the_chunks_alone",),
    ),
    Refused(
        options=("--dataloader-type",),
        label="`--dataloader-type cyclic`",
        condition=other_order,
        why="the order of samples would depend on the data-parallel size, since each rank shuffles its own share",
        instead="leave it out, packed samples are shuffled anyway",
        shown_by=(
            Source(
                "megatron.training.datasets.data_samplers:MegatronPretrainingRandomSampler",
                "start_idx = self.data_parallel_rank * bucket_size",
            ),
        ),
    ),
    Refused(
        options=("--dataloader-type",),
        label="`--dataloader-type external`",
        condition=external_loader,
        why="Megatron-LM takes what the script builds for a loader, and packed samples are a dataset",
        instead="leave it out",
        shown_by=(
            Source(
                "megatron.training.datasets.data_samplers:build_pretraining_data_loader",
                'if args.dataloader_type == "external":',
            ),
        ),
    ),
    Works(
        options=("--tensor-model-parallel-size", "--pipeline-model-parallel-size"),
        label="`--tensor-model-parallel-size`, `--pipeline-model-parallel-size`, data parallelism",
        shown_by=(
            _TESTS + "test_two_ranks_train_as_one",
            _TESTS + "test_two_pipeline_stages_train_alike_whatever_the_micro_batch",
            _TESTS + "test_the_middle_stage_of_three_gets_the_boundaries",
        ),
    ),
    Works(
        options=("--micro-batch-size", "--eval-micro-batch-size"),
        label="`--micro-batch-size` or `--eval-micro-batch-size` above 1 with pipeline parallelism",
        how="Megatron-LM joins rows; stages know the shapes and exchange none",
        shown_by=(
            _TESTS + "test_two_pipeline_stages_train_alike_whatever_the_micro_batch",
            _TESTS + "test_fault_B01_an_evaluation_of_larger_micro_batches_runs_through_two_stages",
        ),
    ),
    Works(
        options=("--use-megatron-fsdp", "--use-torch-fsdp2"),
        how="with `--use-torch-fsdp2` leave out `--calculate-per-token-loss`: with both, Megatron-LM adds up gradients "
        "over tokens and does not divide them",
        shown_by=(
            _OPTIONS + "test_fully_sharded_ranks_train_as_whole_ones",
            _OPTIONS + "test_gradients_of_torchs_sharding_are_not_divided_by_tokens",
        ),
    ),
    Works(
        options=("--context-parallel-size",),
        label="`--context-parallel-size` above 1",
        how="without alignment, with all parallelism above. With Transformer Engine, attention becomes this package's, "
        "and its other layers stay; see [Long context](long-context.md)",
        shown_by=(_SPLIT_ROWS + "test_losses_are_those_of_one_rank",),
    ),
    Refused(
        options=("--mtp-num-layers", "--reset-position-ids"),
        label="with it: `--mtp-num-layers`, `--reset-position-ids`",
        beside=_IN_CONTEXT_PARALLEL,
        why="positions and later tokens are those of whole rows",
        instead="leave them out",
        checked_by=_BY_CONTEXT_CHECK,
        shown_by=(_CHECKS + "test_options_that_cannot_be_honoured_are_refused",),
    ),
    Refused(
        options=("--hybrid-layer-pattern", "--hybrid-override-pattern"),
        label="with it: `--hybrid-layer-pattern` with `G` or `D`",
        beside=_IN_CONTEXT_PARALLEL,
        why="gated delta nets and DeepSeek's sparse attention expect each document to be split over ranks",
        instead="leave them out",
        checked_by=_BY_CONTEXT_CHECK,
        shown_by=(
            Source(
                "megatron.core.ssm.gated_delta_net.common:_GDNBase._resolve_cu_seqlens",
                "All per-sequence lengths in cu_seqlens must be divisible by cp_size={cp_size}, ",
            ),
            Source(
                "megatron.core.transformer.experimental_attention_variant.dsa:DSAttention.forward",
                "dsa_layout.build_packed_allgather_cp_query_positions_and_key_reorder(",
            ),
        ),
    ),
    Works(
        options=("--cp-comm-type", "--hierarchical-context-parallel-sizes"),
        how="`p2p`, the default, and `a2a+p2p` leave the choice to this package; see "
        "[What to choose when](long-context.md#what-to-choose-when)",
        shown_by=(_SPLIT_ROWS + "test_losses_are_those_of_one_rank_in_other_layouts_too",),
    ),
    Refused(
        options=("--hybrid-context-parallel",),
        why="it sends each document of a sample to other ranks, and expects documents that are aligned to them",
        instead="give --context-parallel-size",
        shown_by=(
            Source(
                "megatron.core.datasets.data_schedule:HybridCPDataLoaderWrapper",
                'start_idx = sample["cu_seqlens"][sub_sample]',
            ),
        ),
    ),
    Works(
        options=("--transformer-impl",),
        label="`--transformer-impl local`",
        how="needs no `--spec`; its layers get this package's attention, also with multi-latent attention and "
        "heterogeneous layers",
        shown_by=(
            _TESTS + "test_fault_B02_local_layers_train_without_a_spec",
            _LAYERS + "test_fault_B02_local_layers_get_attention_inside_documents",
            _LAYERS + "test_fault_B02_heterogeneous_layers_get_it_too",
        ),
    ),
    Untried(
        options=("--transformer-impl",),
        label="`--transformer-impl transformer_engine`, Megatron-LM's default",
        condition=transformer_engine,
        why="its kernels take boundaries, but need a GPU, on which they have not been run yet",
        shown_by=("tests/gpu/test_gpu_megatron_lm.py::test_joined_rows_equal_the_chunks_alone",),
    ),
    Works(
        options=("--num-experts",),
        label="`--num-experts`",
        how="padding passes the router as other tokens do",
        shown_by=(_KINDS + "test_the_first_loss_is_that_of_the_documents_alone",),
    ),
    Works(
        options=("--moe-token-dispatcher-type",),
        how="with pipelines of any micro-batch size",
        shown_by=(_STAGES + "test_experts_by_allgather_train_alike_whatever_the_micro_batch",),
    ),
    Works(
        options=("--overlap-moe-expert-parallel-comm",),
        how="its schedule is given the boundaries, also those of later tokens (`--mtp-num-layers`)",
        shown_by=(
            _STAGES + "test_fault_A01_a_plan_of_the_forward_pass_gets_the_boundaries",
            _EXPERTS + "test_a_plan_of_later_tokens_has_the_losses_of_an_ordinary_step",
        ),
    ),
    Works(
        options=("--moe-router-load-balancing-type",),
        how="`seq_aux_loss` balances each sequence of a micro-batch by itself, with all parallelism above",
        shown_by=(_EXPERTS + "test_experts_are_balanced_in_each_sequence",),
    ),
    Works(
        options=("--multi-latent-attention", "--mtp-num-layers"),
        how="later tokens are those of the same document",
        shown_by=(_KINDS + "test_the_first_loss_is_that_of_the_documents_alone",),
    ),
    Works(
        options=("--window-size", "--window-attn-skip-freq", "--softmax-type"),
        how="with `--transformer-impl local`, sinks (`--softmax-type learnable`) have no fused kernel",
        shown_by=(
            _KINDS + "test_the_first_loss_is_that_of_the_documents_alone",
            "tests/megatron_core/test_windows_and_sinks.py::test_windows_and_sinks_are_those_of_megatron_core",
        ),
    ),
    Refused(
        options=("--softmax-type",),
        label="with `--context-parallel-size` above 1: `--softmax-type` `learnable` or `off-by-one`",
        condition=learned_sinks_of_split_rows,
        beside=_IN_CONTEXT_PARALLEL,
        why="sinks are not divided among ranks",
        shown_by=("tests/megatron_core/test_attention.py::test_what_would_be_ignored_is_refused",),
    ),
    *OF_LAYERS,
    Untried(
        options=("--hybrid-layer-pattern", "--hybrid-override-pattern", "--mtp-hybrid-override-pattern"),
        label="hybrid layers: `--hybrid-layer-pattern`, `--hybrid-override-pattern`, `--mtp-hybrid-override-pattern`",
        why="state begins anew in each document, also with context parallelism, which a scan on the CPU shows, but "
        "mamba_ssm's kernels need a GPU, on which they have not been run yet",
        shown_by=(
            _KINDS + "test_the_state_of_hybrid_layers_begins_anew_in_each_document",
            _HYBRID + "test_losses_and_gradients_of_hybrid_models_are_those_of_one_rank",
        ),
    ),
    Untried(
        options=("--experimental-attention-variant",),
        label="`--experimental-attention-variant` `gdn`, `gdn2`, `gated_delta_net`",
        condition=gated_delta_net,
        why="state begins anew in each document, which a delta rule on the CPU shows, but the kernels need a GPU, on "
        "which they have not been run yet",
        shown_by=(_KINDS + "test_the_state_of_hybrid_layers_begins_anew_in_each_document",),
    ),
    Refused(
        options=("--deterministic-mode",),
        condition=deterministic_gdn2,
        label="with `gdn2`: `--deterministic-mode`",
        beside="--experimental-attention-variant gdn2",
        why="Megatron-LM's deterministic one takes no boundaries",
        instead="leave it out",
        shown_by=(
            Source(
                "megatron.core.ssm.gated_delta_net.gdn2:GatedDeltaNet2.forward",
                "Packed sequence does not support deterministic mode.",
            ),
        ),
    ),
    Untried(
        options=("--experimental-attention-variant",),
        label="`--experimental-attention-variant dsa`",
        condition=sparse_attention,
        why="it takes boundaries, which the first step checks, but needs Transformer Engine and so a GPU, on which it "
        "has not been run yet",
        shown_by=(
            "tests/attention/test_boundaries_of_mixers.py::test_classes_that_know_joined_rows_alone_get_joined_rows",
        ),
    ),
    Untried(
        options=("--cuda-graph-impl",),
        label="`--cuda-graph-impl` with `--cuda-graph-modules` of `moe_router`, `moe_preprocess`, and with "
        "`transformer_engine` of `mlp`, `moe`",
        condition=captures_other_modules,
        why="its graphs hold no attention, but need a GPU, on which they have not been run yet",
        shown_by=(_CHECKS + "test_fault_B11_graphs_without_attention_are_fine",),
    ),
    Refused(
        options=("--cuda-graph-impl", "--enable-cuda-graph", "--external-cuda-graph"),
        label="`--cuda-graph-impl`, `--enable-cuda-graph`, `--external-cuda-graph` otherwise",
        condition=captures_attention,
        why="where attention is captured, a graph cannot take the document boundaries of each micro-batch",
        instead="leave it out, or give --cuda-graph-modules with nothing but "
        + ", ".join(sorted(CAPTURES_NO_ATTENTION["local"])),
        shown_by=(
            Source(
                "megatron.core.transformer.cuda_graphs:_CudaGraphRunner.get_mismatch_errors",
                "Value mismatch at {context}: {val.value} vs {ref.value}",
            ),
            Source(
                "megatron.core.transformer.transformer_layer:TransformerLayer.create_mcore_cudagraph_manager",
                "If full scope (no specific sub-scope), cudagraph the entire layer.",
            ),
            Source(
                "megatron.core.transformer.transformer_layer:TransformerLayer._te_cuda_graph_replay",
                "inference_context and packed_seq_params are excluded from input list.",
            ),
        ),
    ),
    *OF_OTHER_SAMPLES,
    Refused(
        options=("--yaml-cfg",),
        label="`--yaml-cfg` that replaces `--data-impl bfp`",
        why="Megatron-LM takes all options from the file, and none from the command line",
        instead="give all options on the command line",
        checked_by="parsed_options",
        shown_by=(
            _CHECKS + "test_options_from_elsewhere_are_refused",
            Source("megatron.training.yaml_arguments:load_yaml", "argparse arguments will be ignored"),
        ),
    ),
)
"""Every option that this package knows something about. Options without a row do not concern samples or boundaries."""
