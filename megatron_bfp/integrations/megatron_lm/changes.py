"""Which modules of Megatron-LM are changed for ``--data-impl bfp``, and how."""

import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...errors import IntegrationError
from ..balance import refuse_other_batches
from ..data_impl import without_data_impl
from ..hooks import Hook, replace
from . import builder, options
from .pipelines import of_joined_rows


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
    replace(module, "train_step", of_step, lambda original: watch_first_step(original, options.parsed_options))
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
    from .model import by_rows

    _wrap(module.GPTModel, "forward", "packed_seq_params", by_rows)
    _wrap(module.GPTModel, "build_schedule_plan", "packed_seq_params", by_rows)


def _change_delta_nets(module: ModuleType) -> None:
    from .delta_nets import accept_boundaries, convolution_in_documents, rule_in_documents

    _wrap(module.GatedDeltaNet, "_setup_variant_attrs", "self", accept_boundaries)
    _wrap(module, "torch_chunk_gated_delta_rule", "cu_seqlens", rule_in_documents)
    _wrap(module, "causal_conv1d", "cu_seqlens", convolution_in_documents)  # None without flash-linear-attention


def _change_rotary_angles(module: ModuleType) -> None:
    from .model import repeat_for_joined_rows

    embedding = getattr(module, "YarnRotaryEmbedding", None) or module.RotaryEmbedding
    _wrap(embedding, "get_emb", "max_seq_len", repeat_for_joined_rows)


def _change_loss(module: ModuleType) -> None:
    from .model import count_targets_of_the_row

    _wrap(module, "forward_step_calc_loss", "loss_func", count_targets_of_the_row)


def _wrap(owner: Any, name: str, parameter: str, make: Callable) -> None:
    """Replace a function that other versions of megatron-core, and Megatron-DeepSpeed's modules of the same names, lack
    or have in another form. They go on without: attention then stops a run with context parallelism, which needs
    boundaries by rows.

    Args:
        parameter: the one that the replacement looks at.
        make: gets the original and what gives Megatron-LM's options; these are checked once, not in every step.
    """
    function = getattr(owner, name, None)
    if callable(function) and parameter in inspect.signature(function).parameters:
        setattr(owner, name, make(function, functools.cache(options.parsed_options)))


def _take_off_data_impl(_: ModuleType) -> None:
    """Remove ``--data-impl mmap``, which Megatron-LM does not know, from the command line."""
    sys.argv[:] = without_data_impl(sys.argv)


HOOKS: dict[str, Hook] = {
    "megatron.training.arguments": _change_arguments,
    "megatron.core.datasets.blended_megatron_dataset_builder": _change_builder,
    "megatron.core.models.backends": _change_local_layers,
    "megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs": _change_heterogeneous_layers,
    "megatron.core.models.gpt.gpt_model": _change_model,
    "megatron.core.models.common.embeddings.rotary_pos_embedding": _change_rotary_angles,
    "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding": _change_rotary_angles,
    "megatron.core.pipeline_parallel.schedules": _change_loss,
    "megatron.core.ssm.gated_delta_net.gdn": _change_delta_nets,
    "megatron.training.checkpointing": _change_checkpoints,
    "megatron.training.training": _change_training,
}
"""Module -> what is done to it right after its import with ``--data-impl bfp``."""

HOOKS_FOR_MMAP: dict[str, Hook] = {"megatron.training.arguments": _take_off_data_impl}
"""The same with ``--data-impl mmap``."""
