"""Options of Megatron-LM about positions and attention, whatever the layers are made of: rows of ``option_table``."""

from ..option_table import Refused, Row, Source, Untried, Works
from .option_conditions import fused_projection, multimodal_positions

_OPTIONS = "tests/integration/test_real_megatron_lm_options.py::"
_PIPELINES = "tests/integration/test_real_megatron_lm_pipelines.py::"
_POSITIONS = "tests/integration/test_real_megatron_lm_positions.py::"
_TESTS = "tests/integration/test_real_megatron_lm.py::"

OF_LAYERS: tuple[Row, ...] = (
    Works(
        options=("--sequence-parallel",),
        shown_by=(_OPTIONS + "test_sequence_parallel_ranks_train_as_one",),
    ),
    Works(
        options=("--num-virtual-stages-per-pipeline-rank",),
        shown_by=(_PIPELINES + "test_virtual_stages_train_alike_whatever_the_micro_batch",),
    ),
    Works(
        options=("--recompute-granularity", "--recompute-method", "--recompute-num-layers", "--recompute-modules"),
        shown_by=(_OPTIONS + "test_losses_stay_the_same",),
    ),
    Works(
        options=("--heterogeneous-layers-config-path",),
        how="with `--transformer-impl local`",
        shown_by=("tests/integrations/test_megatron_lm_attention.py::test_fault_B02_heterogeneous_layers_get_it_too",),
    ),
    Works(
        options=("--position-embedding-type", "--rotary-percent", "--no-rope-freq", "--reset-position-ids"),
        label="`--position-embedding-type` `rope`, `yarn`, `learned_absolute`, `none`; `--rotary-percent`, "
        "`--no-rope-freq`, `--reset-position-ids`",
        how="see [Positions](#what-to-expect)",
        shown_by=(
            _POSITIONS + "test_the_first_loss_is_that_of_the_documents_alone",
            _TESTS + "test_fault_A14_what_is_printed_of_positions_is_true",
        ),
    ),
    Refused(
        options=("--position-embedding-type",),
        label="`--position-embedding-type mrope`",
        condition=multimodal_positions,
        why="it takes three position ids for each token, and samples of text have one",
        instead="give rope, which is the same for text",
        shown_by=(
            Source(
                "megatron.core.models.common.embeddings.rotary_pos_embedding:MultimodalRotaryEmbedding.forward",
                "seq_expanded = seq[:, :, None, :].float()",
            ),
            _OPTIONS + "test_multimodal_positions_are_refused_by_name",
        ),
    ),
    Works(
        options=(
            "--rotary-base",
            "--rotary-interleaved",
            "--rotary-seq-len-interpolation-factor",
            "--use-rope-scaling",
            "--rope-scaling-factor",
            "--qk-layernorm",
            "--attention-output-gate",
        ),
        shown_by=(_OPTIONS + "test_options_of_attention_leave_documents_alone",),
    ),
    Refused(
        options=(),
        label="`fused_single_qkv_rope` in a configuration",
        condition=fused_projection,
        why="it is for attention without boundaries alone",
        instead="leave it out",
        shown_by=(Source("megatron.core.transformer.attention:Attention.forward", "packed_seq_params is None,"),),
    ),
    Refused(
        options=("--qk-clip", "--log-max-attention-logit"),
        label="with `--transformer-impl local` or `--context-parallel-size` above 1: `--qk-clip`, "
        "`--log-max-attention-logit`",
        why="this package's attention does not keep the largest logit",
        checked_by="DocumentAttention",
        shown_by=("tests/megatron_core/test_attention.py::test_what_would_be_ignored_is_refused",),
    ),
    Untried(
        options=("--use-kitchen-attention",),
        why="its package is not public; the first step checks that its attention gets boundaries",
        shown_by=(
            Source(
                "megatron.core.models.gpt.gpt_layer_specs:get_gpt_layer_with_transformer_engine_submodules",
                "use_kitchen_attention=use_kitchen_attention,",
            ),
        ),
    ),
    Untried(
        options=("--logits-save-dir", "--logits-load-dir"),
        why="a teacher's logits are matched to tokens by their place in a batch, so both runs need the same order and "
        "micro-batches; they have not been run yet",
        shown_by=(Source("pretrain_gpt:loss_func", "loss_func_cached_logits(loss_mask, output_tensor, model=model)"),),
    ),
)
"""In the order of the documentation."""
