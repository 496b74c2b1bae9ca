"""What Megatron-LM's options do with ``--data-impl bfp``, in the order of the documentation: data, batches,
parallelism, layers and kernels, other kinds of samples."""

from ..option_table import Refused, Row, Untried, Works
from .option_conditions import (
    CAPTURES_NO_ATTENTION,
    captures_attention,
    captures_other_modules,
    joins_rows_for_allgather,
    other_loader,
    transformer_engine,
)

_TESTS = "tests/integration/test_real_megatron_lm.py::"
_DATA = "tests/integration/test_real_megatron_lm_data.py::"
_BALANCE = "tests/integration/test_real_megatron_lm_balance.py::"
_SPLIT_ROWS = "tests/integration/test_real_megatron_lm_context_parallel.py::"
_CHECKS = "tests/integrations/test_megatron_lm_options.py::"
_LAYERS = "tests/integrations/test_megatron_lm_attention.py::"

_PACKED_BY_ITSELF = "its samples are packed by its own dataset"
_STATE = "a state space layer would carry its state across documents"
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
        why="samples are read from memory maps",
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
    Refused(
        options=("--per-dataset-sequences-path",),
        why="counts come from the .idx itself, which is opened in constant time",
        instead="leave it out",
        shown_by=("megatron.core.datasets.gpt_dataset:GPTDatasetConfig",),
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
    Works(
        options=("--calculate-per-token-loss",),
        how="recommended; see [Loss](#what-to-expect)",
        shown_by=(_TESTS + "test_the_first_loss_is_that_of_the_chunks_alone",),
    ),
    Refused(
        options=("--dataloader-type",),
        label="`--dataloader-type cyclic`",
        condition=other_loader,
        why="the order of samples would depend on the data-parallel size",
        instead="leave it out, packed samples are shuffled anyway",
        shown_by=("megatron.training.datasets.data_samplers:MegatronPretrainingRandomSampler",),
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
        how="Megatron-LM joins rows, so tensor shapes vary and pipeline stages exchange them",
        shown_by=(
            _TESTS + "test_two_pipeline_stages_train_alike_whatever_the_micro_batch",
            _TESTS + "test_fault_B01_an_evaluation_of_larger_micro_batches_runs_through_two_stages",
        ),
    ),
    Refused(
        options=("--moe-token-dispatcher-type",),
        label="with it: experts with `--moe-token-dispatcher-type allgather`",
        condition=joins_rows_for_allgather,
        beside="pipeline parallelism and --micro-batch-size or --eval-micro-batch-size above 1",
        why="pipeline stages would exchange shapes, which this dispatcher does not allow",
        instead="give --moe-token-dispatcher-type alltoall, or 1 for both",
        shown_by=("megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",),
    ),
    Works(
        options=("--context-parallel-size",),
        label="`--context-parallel-size` above 1",
        how="with `--transformer-impl local`; see [Long context](long-context.md)",
        shown_by=(_SPLIT_ROWS + "test_losses_are_those_of_one_rank",),
    ),
    Refused(
        options=("--transformer-impl",),
        label="with it: Transformer Engine's layers",
        beside=_IN_CONTEXT_PARALLEL,
        why="its own context parallelism expects documents that are aligned to it",
        instead="give --transformer-impl local",
        checked_by=_BY_CONTEXT_CHECK,
        shown_by=("megatron.core.utils:get_batch_on_this_cp_rank",),
    ),
    Refused(
        options=(
            "--mtp-num-layers",
            "--reset-position-ids",
            "--hierarchical-context-parallel-sizes",
            "--cp-comm-type",
        ),
        label="with it: `--mtp-num-layers`, `--reset-position-ids`, `--hierarchical-context-parallel-sizes`, "
        "`--cp-comm-type a2a+p2p`",
        beside=_IN_CONTEXT_PARALLEL,
        why="positions, later tokens and groups are those of whole rows",
        instead="leave them out",
        checked_by=_BY_CONTEXT_CHECK,
        shown_by=(_CHECKS + "test_options_that_cannot_be_honoured_are_refused",),
    ),
    Refused(
        options=("--hybrid-context-parallel",),
        why="Megatron-LM does not support it with document masking",
        instead="give --context-parallel-size",
        shown_by=("pretrain_gpt:get_batch",),
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
        shown_by=(_TESTS + "test_fault_A01_a_schedule_that_loses_boundaries_stops_in_the_first_step",),
    ),
    Refused(
        options=("--overlap-moe-expert-parallel-comm",),
        why="its schedule calls the model without document boundaries",
        instead="leave it out",
        shown_by=("pretrain_gpt:forward_step",),
    ),
    Refused(
        options=("--hybrid-layer-pattern", "--hybrid-override-pattern", "--mtp-hybrid-override-pattern"),
        label="hybrid layers: `--hybrid-layer-pattern`, `--hybrid-override-pattern`, `--mtp-hybrid-override-pattern`",
        why=_STATE,
        shown_by=("megatron.core.ssm.mamba_mixer:MambaMixer",),
    ),
    Untried(
        options=("--cuda-graph-impl",),
        label="`--cuda-graph-impl` with `--cuda-graph-modules` of `mlp`, `moe`, `moe_router`, `moe_preprocess`",
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
        + ", ".join(sorted(CAPTURES_NO_ATTENTION)),
        shown_by=("megatron.core.transformer.cuda_graphs:_CudaGraphRunner",),
    ),
    Refused(
        options=("--fim-data",),
        why="it rearranges samples after they were packed",
        shown_by=("megatron.training.datasets.fim_dataset:GPTFIMDataset",),
    ),
    Refused(
        options=("--sft",),
        why="its samples are conversations, packed by its own dataset",
        shown_by=("megatron.training.datasets.sft_dataset:SFTDataset",),
    ),
    Refused(
        options=("--use-varlen-dataset",),
        why=_PACKED_BY_ITSELF,
        shown_by=("megatron.training.datasets.varlen_dataset:VarlenDataset",),
    ),
    Refused(
        options=("--perform-rl-step",),
        why="it makes its own samples",
        shown_by=("megatron.training.training:train",),
    ),
    Refused(
        options=("--mock-data",),
        why="there are no documents to pack",
        shown_by=("megatron.core.datasets.gpt_dataset:MockGPTDataset",),
    ),
    Refused(
        options=("--yaml-cfg",),
        label="`--yaml-cfg` that replaces `--data-impl bfp`",
        why="options on the command line would not count",
        instead="give all options on the command line",
        checked_by="parsed_options",
        shown_by=(_CHECKS + "test_options_from_elsewhere_are_refused",),
    ),
)
"""Every option that this package knows something about. Options without a row do not concern samples or boundaries."""
