"""Context parallelism in Megatron-Bridge: joined rows are split over ranks as any row is, whatever documents they hold.

Megatron-Bridge splits each document of a joined row, which needs documents of a multiple of twice the number of ranks.
Here the row is split as a whole, by Megatron's zigzag. The model gets the boundaries of the whole row in the form of
one row, so that rotary positions are split in the same way, and ``DocumentAttention`` takes the place of each layer's
core attention. All else in a layer stays, Transformer Engine's linear layers and norms for example.
"""

import functools
from collections.abc import Callable
from typing import Any

from megatron.core.transformer.attention import SelfAttention
from megatron.core.utils import get_batch_on_this_cp_rank
from torch import distributed, nn

from ...attention.mixers import has_class, mixers_of
from ...errors import OptionError
from ...megatron_core.attention import DOT_PRODUCT_ATTENTION, DocumentAttention
from ..megatron_lm.model import boundaries_of_one_row
from .batches import JOINED, OF_POSITIONS


def split_whole_rows(partition: Callable) -> Callable:
    """Megatron-Bridge's ``_partition_packed_batch_for_cp``, which splits our batches by rows."""

    @functools.wraps(partition)
    def partition_rows(batch: dict[str, Any], cp_group: Any) -> dict[str, Any]:
        if JOINED not in batch:
            return partition(batch, cp_group)
        rows = {name: batch[name] for name in OF_POSITIONS if batch.get(name) is not None}
        return batch | get_batch_on_this_cp_rank(rows, is_hybrid_cp=False, cp_group=cp_group)

    return partition_rows


def attend_by_rows(models: list[nn.Module]) -> list[nn.Module]:
    """Let the model chunks of this rank attend inside documents that are split over ranks.

    Args:
        models: as Megatron-Bridge builds them, before they are wrapped.

    Raises:
        OptionError: a layer mixes positions by something else than dot-product attention.
    """
    for model in models:
        _replace_core_attention(model)
        model.register_forward_pre_hook(_by_rows, with_kwargs=True)
    return models


def _by_rows(_: nn.Module, arguments: tuple, keywords: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The arguments of a model's forward call, with the boundaries of joined rows as those of one row."""
    if getattr(keywords.get("packed_seq_params"), "qkv_format", None) == "thd":
        keywords = keywords | {"packed_seq_params": boundaries_of_one_row(keywords["packed_seq_params"])}
    return arguments, keywords


def _replace_core_attention(model: nn.Module) -> None:
    mixers, unknown = mixers_of(model)
    for name, mixer in mixers.items():
        owner: Any = model.get_submodule(name.rpartition(".")[0])
        if type(owner) is not SelfAttention or not has_class(mixer, set(DOT_PRODUCT_ATTENTION)):
            unknown.append(f"{name} ({type(mixer).__name__} of {type(owner).__name__})")
            continue
        kinds = owner.config.cp_comm_type
        owner.core_attention = DocumentAttention(
            owner.config,
            owner.layer_number,
            owner.attn_mask_type,
            owner.attention_type,
            softmax_scale=getattr(owner.config, "softmax_scale", None),
            cp_comm_type=kinds[owner.layer_number - 1] if isinstance(kinds, list) else kinds,
            pg_collection=owner.pg_collection,
        )
    if unknown:
        raise OptionError(
            "model.context_parallel_size above 1 cannot be used with packed samples in this model: attention inside "
            f"documents cannot replace {unknown[0]}; set it to 1"
        )


def count_targets_of_whole_rows(forward_step: Callable, group: Any) -> Callable:
    """A forward step whose loss is divided by the targets of whole rows, not by those of this rank's share, so that
    each target of a micro-batch counts the same.

    Args:
        forward_step: gives the model's output and a function of the loss; without ``calculate_per_token_loss``.
        group: of the ranks that share rows.
    """

    @functools.wraps(forward_step)
    def step(*arguments: Any, **keywords: Any) -> tuple[Any, Callable]:
        output, calculate_loss = forward_step(*arguments, **keywords)

        def loss_by_all_targets(*of_output: Any, **options: Any) -> Any:
            outputs = calculate_loss(*of_output, **options)
            if not isinstance(outputs, tuple) or len(outputs) != 3:
                return outputs
            loss, num_targets, report = outputs
            num_targets = num_targets.clone()
            distributed.all_reduce(num_targets, group=group)
            return loss * group.size(), num_targets, report  # gradients are averaged over these ranks, not added up

        return output, loss_by_all_targets

    return step
