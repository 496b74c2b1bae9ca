"""Boundaries that keep the batch dimension, ``DocumentBoundaries``, and what megatron-core does with them.

megatron-core takes a micro-batch with boundaries for joined rows in a few places, whatever form it has: multi-token
prediction looks for labels by the boundaries of one row, and multi-latent attention drops the batch dimension of a
single row. These functions are replaced here, for boundaries of this form alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import Any

try:
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams
except ModuleNotFoundError as error:
    from ..optional import not_installed

    raise not_installed(error, __name__) from None
from megatron.core.transformer import multi_latent_attention, multi_token_prediction
from torch import Tensor

from ..attention.boundaries import Boundaries
from ..errors import OptionError


@dataclass
class DocumentBoundaries(PackedSeqParams):
    """megatron-core's ``PackedSeqParams`` of a micro-batch whose rows are packed sequences."""

    joined: Boundaries = field(kw_only=True)
    """The same boundaries as kernels take them: of all rows, joined."""

    @cached_property
    def last_positions(self) -> Tensor:
        """int64 [b, L]: the last position of each document of a row, in any order, some of them repeated."""
        return self.cu_seqlens_q[:, 1:].to(self.joined.cu_seqlens.device, torch.int64) - 1


def shift_inside_documents(tensor: Tensor, boundaries: DocumentBoundaries) -> Tensor:
    """The value at each position's successor; 0 at the last position of a document.

    Args:
        tensor: [b, L], or [1, L] if all rows are alike.

    Returns:
        [b, L].
    """
    last = boundaries.last_positions.to(tensor.device)
    return tensor.roll(-1, dims=-1).expand_as(last).scatter(-1, last, 0)


def _shift_by_boundaries(roll_packed: Callable) -> Callable:
    """megatron-core's ``_roll_tensor_packed_seq``, which would take the boundaries of one row for those of all."""

    def roll(
        tensor: Tensor, shifts: int, dims: int, packed_seq_params: PackedSeqParams, *others: Any, **keywords: Any
    ) -> tuple[Tensor, Tensor | None]:
        if not isinstance(packed_seq_params, DocumentBoundaries):
            return roll_packed(tensor, shifts, dims, packed_seq_params, *others, **keywords)
        if shifts != -1 or dims not in (-1, tensor.dim() - 1):
            raise OptionError("inside documents, labels are only shifted by one position of the last dimension")
        shifted = shift_inside_documents(tensor, packed_seq_params)
        return shifted, shifted.sum() if keywords.get("return_sum", True) else None

    return roll


CAN_PREDICT_LATER_TOKENS = hasattr(multi_token_prediction, "_roll_tensor_packed_seq")
"""Whether this megatron-core, 0.16 or later, shifts labels by a function that can respect documents."""

if CAN_PREDICT_LATER_TOKENS:
    # roll_tensor looks this helper up each time, so it reaches every model that predicts later tokens
    multi_token_prediction._roll_tensor_packed_seq = _shift_by_boundaries(
        multi_token_prediction._roll_tensor_packed_seq
    )


def without_boundaries_of_rows(function: Callable) -> Callable:
    """A function that gets None for boundaries of this form, as for rows of one document each."""

    @wraps(function)
    def call_without(*arguments: Any, **keywords: Any) -> Any:
        arguments = tuple(None if isinstance(value, DocumentBoundaries) else value for value in arguments)
        others = {name: None if isinstance(value, DocumentBoundaries) else value for name, value in keywords.items()}
        return function(*arguments, **others)

    return call_without


# boundaries change nothing about queries, keys and values
multi_latent_attention.MLASelfAttention.get_query_key_value_tensors = without_boundaries_of_rows(
    multi_latent_attention.MLASelfAttention.get_query_key_value_tensors
)
