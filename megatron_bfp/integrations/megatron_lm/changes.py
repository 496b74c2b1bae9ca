"""Which modules of Megatron-LM are changed for ``--data-impl bfp``, and how."""

import argparse
import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...errors import IntegrationError, UnsupportedMegatronError
from ..balance import refuse_other_batches
from ..data_impl import without_data_impl
from ..hooks import ADVICE, Hook, replace
from . import builder, options
from .pipelines import of_joined_rows, plan_later_tokens


def _change_arguments(module: ModuleType) -> None:
    replace(module, "_add_data_args", "parser", options.add_options)
    replace(module, "validate_args", "args, defaults", lambda original: options.check_options(original, HOOKS))


def _change_builder(module: ModuleType) -> None:
    builder_class = module.BlendedMegatronDatasetBuilder
    replace(builder_class, "__init__", "self, cls, sizes, is_built_on_rank, config", builder.choose_dataset)
    replace(builder_class, "build", "self", builder.check_and_sum_up)


def _change_training(module: ModuleType) -> None:
    from .first_step import watch_first_step

    of_loaders = "build_train_valid_test_datasets_provider"
    replace(module, "build_train_valid_test_data_loaders", of_loaders, builder.skip_empty_evaluation)
    of_step = (
        "forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config, forward_backward_func, "
        "iteration, pg_collection, p2p_communicator"
    )
    replace(module, "train_step", of_step, lambda original: watch_first_step(original, _options_of_known_version))
    of_schedule = "pp_size, vp_size, schedule_pg_collection"
    cached = functools.cache(options.parsed_options)
    replace(module, "get_forward_backward_func", of_schedule, lambda original: of_joined_rows(original, cached))


def _change_checkpoints(module: ModuleType) -> None:
    def refuse(original: Callable) -> Callable:
        return refuse_other_batches(original, options.parsed_options)

    known = getattr(module, "check_checkpoint_args", None)
    has_more = callable(known) and "skip_args" in inspect.signature(known).parameters  # some releases of core 0.19 on
    replace(module, "check_checkpoint_args", "checkpoint_args, skip_args" if has_more else "checkpoint_args", refuse)


def _change_local_layers(module: ModuleType) -> None:
    """Attention inside documents for ``--transformer-impl local``, whose own attention takes no boundaries."""
    replace(module.LocalSpecProvider, "core_attention", "self", _attention_inside_documents)


def _attention_inside_documents(_: Callable) -> Callable:
    def core_attention(self: Any) -> type:
        from ...megatron_core.attention import DocumentAttention  # later: it imports the module that this hook changes

        return DocumentAttention

    return core_attention


def _change_heterogeneous_layers(module: ModuleType) -> None:
    """The same for ``--heterogeneous-layers-config-path``, whose local layers name their core attention themselves."""
    from ...megatron_core.attention import DocumentAttention

    if not hasattr(module, "DotProductAttention"):
        raise IntegrationError(f"this Megatron has no {module.__name__}.DotProductAttention; see docs/megatron.md")
    setattr(module, "DotProductAttention", DocumentAttention)


def _change_model(module: ModuleType) -> None:
    from .model import attend_inside_documents, by_rows

    _wrap_needed(module.GPTModel, "__init__", "transformer_layer_spec", attend_inside_documents)
    _wrap_needed(module.GPTModel, "forward", "packed_seq_params", by_rows)
    _wrap(module.GPTModel, "build_schedule_plan", "packed_seq_params", by_rows)


def _change_hybrid_model(module: ModuleType) -> None:
    from .model import attend_inside_documents, by_rows

    _wrap_needed(module.HybridModel, "__init__", "hybrid_stack_spec", attend_inside_documents)
    _wrap_needed(module.HybridModel, "forward", "packed_seq_params", by_rows)


def _change_state_space_layers(module: ModuleType) -> None:
    from .model import in_order_of_rows

    for name in ("pre_conv_ssm", "post_conv_ssm"):
        _wrap(module.MambaContextParallel, name, "packed_seq_params", in_order_of_rows)


def _change_routers(module: ModuleType) -> None:
    from .experts import balance_in_sequences

    _wrap_needed(module.TopKRouter, "_apply_seq_aux_loss", "seq_length", balance_in_sequences)


def _change_plans(module: ModuleType) -> None:
    _wrap(module, "build_mtp_layer_callables", "layer", plan_later_tokens)


def _change_delta_nets(module: ModuleType) -> None:
    from .delta_nets import accept_boundaries, convolution_in_documents, rule_in_documents

    _wrap(module.GatedDeltaNet, "_setup_variant_attrs", "self", accept_boundaries)
    _wrap(module, "torch_chunk_gated_delta_rule", "cu_seqlens", rule_in_documents)
    _wrap(module, "causal_conv1d", "cu_seqlens", convolution_in_documents)  # None without flash-linear-attention


def _change_rotary_angles(module: ModuleType) -> None:
    from .model import repeat_for_joined_rows

    embedding = getattr(module, "YarnRotaryEmbedding", None) or module.RotaryEmbedding
    _wrap_needed(embedding, "get_emb", "max_seq_len", repeat_for_joined_rows)


def _change_rotation(module: ModuleType) -> None:
    from .positions import rotate_by_rows

    _wrap(module, "apply_rotary_pos_emb", "cu_seqlens", rotate_by_rows)


def _change_fused_rotation(module: ModuleType) -> None:
    from .positions import rotate_by_rows

    for name in [name for name in vars(module) if name.startswith("fused_")]:
        for parameter in ("cu_seqlens_q", "cu_seqlens_kv"):
            _wrap(module, name, parameter, rotate_by_rows)


def _change_rotary_embedding(module: ModuleType) -> None:
    from .positions import as_long_as_rows

    _change_rotary_angles(module)
    rotate = getattr(module, "apply_rotary_pos_emb", None)
    if hasattr(rotate, "rotates_by_rows"):  # another would take a table of rows for one of all joined positions
        _wrap(module.RotaryEmbedding, "get_rotary_seq_len", "packed_seq_params", as_long_as_rows)


def _change_loss(module: ModuleType) -> None:
    from .model import count_targets_of_the_row

    _wrap_needed(module, "forward_step_calc_loss", "loss_func", count_targets_of_the_row)


def _wrap(owner: Any, name: str, parameter: str, make: Callable) -> bool:
    """Replace a function that other versions of megatron-core, and Megatron-DeepSpeed's modules of the same names, lack
    or have in another form. They go on without.

    Args:
        parameter: the one that the replacement looks at.
        make: gets the original and what gives Megatron-LM's options; these are checked once, not in every step.

    Returns:
        Whether it was replaced.
    """
    function = getattr(owner, name, None)
    is_known = callable(function) and parameter in inspect.signature(function).parameters
    if is_known:
        setattr(owner, name, make(function, functools.cache(options.parsed_options)))
    return is_known


_missed: list[str] = []
"""Functions that ``_wrap_needed`` did not know."""


def _wrap_needed(owner: Any, name: str, parameter: str, make: Callable) -> None:
    """``_wrap``, without which Megatron-LM itself stops before the first step."""
    if not _wrap(owner, name, parameter, make):
        _missed.append(f"{owner.__name__}.{name} with {parameter}")


def _options_of_known_version() -> argparse.Namespace | None:
    """As ``parsed_options``.

    Raises:
        UnsupportedMegatronError: a function that ``_wrap_needed`` was to replace is not the one it knows.
    """
    args = options.parsed_options()
    if args is not None and _missed:
        raise UnsupportedMegatronError(f"this Megatron has no {_missed[0]}; {ADVICE}")
    return args


def _take_off_data_impl(_: ModuleType) -> None:
    """Remove ``--data-impl mmap``, which Megatron-LM does not know, from the command line."""
    sys.argv[:] = without_data_impl(sys.argv)


OPTIONS = "megatron.training.arguments"
"""The module that parses options."""

HOOKS: dict[str, Hook] = {
    OPTIONS: _change_arguments,
    "megatron.core.datasets.blended_megatron_dataset_builder": _change_builder,
    "megatron.core.models.backends": _change_local_layers,
    "megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs": _change_heterogeneous_layers,
    "megatron.core.models.gpt.gpt_model": _change_model,
    "megatron.core.models.common.embeddings.rope_utils": _change_rotation,
    "megatron.core.fusions.fused_mla_yarn_rope_apply": _change_fused_rotation,
    "megatron.core.models.common.embeddings.rotary_pos_embedding": _change_rotary_embedding,
    "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding": _change_rotary_angles,
    "megatron.core.models.common.fine_grained_callables": _change_plans,
    "megatron.core.models.hybrid.hybrid_model": _change_hybrid_model,
    "megatron.core.pipeline_parallel.schedules": _change_loss,
    "megatron.core.ssm.gated_delta_net.gdn": _change_delta_nets,
    "megatron.core.ssm.mamba_context_parallel": _change_state_space_layers,
    "megatron.core.transformer.moe.router": _change_routers,
    "megatron.training.checkpointing": _change_checkpoints,
    "megatron.training.training": _change_training,
}
"""Module -> what is done to it right after its import with ``--data-impl bfp``."""

HOOKS_FOR_MMAP: dict[str, Hook] = {OPTIONS: _take_off_data_impl}
"""The same with ``--data-impl mmap``."""
