"""Megatron-LM's model with ``--data-impl bfp``: positions that run on through a row, and rows split over ranks.

Megatron-LM joins the rows of a micro-batch and passes their boundaries in the form "thd". In this form it restarts
rotary positions in each document, and expects documents that are a multiple of twice the context-parallel size. So
``by_rows`` hands the model the same boundaries in the form "sbhd", of one row: rotary positions are then those of the
row, context parallelism cuts the row as it cuts any row, and core attention gets the boundaries and keeps to them.

Each function takes one of Megatron-LM's and returns its replacement. It imports megatron-core when that is called: the
modules that are changed are imported while megatron-core itself is.
"""

import argparse
import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed

from ...attention.boundaries import Boundaries
from ...attention.context_parallel import Shards

Options = Callable[[], argparse.Namespace | None]


def by_rows(forward: Callable, options: Options) -> Callable:
    """``GPTModel.forward``, which gets the boundaries of joined rows as those of one row, unless positions restart.

    Args:
        options: gives what Megatron-LM parsed; None if the run is none of ours.
    """

    @functools.wraps(forward)
    def forward_by_rows(*arguments: Any, packed_seq_params: Any = None, **keywords: Any) -> Any:
        args = options()
        if args is not None and getattr(packed_seq_params, "qkv_format", None) == "thd":
            if not args.reset_position_ids:
                packed_seq_params = boundaries_of_one_row(packed_seq_params)
        return forward(*arguments, packed_seq_params=packed_seq_params, **keywords)

    return forward_by_rows


def boundaries_of_one_row(joined: Any) -> Any:
    """The boundaries of joined rows as those of a single row of all their positions.

    Args:
        joined: ``PackedSeqParams`` of Megatron-LM, in the form "thd".

    Returns:
        ``DocumentBoundaries``.

    Raises:
        InvalidBoundaries: they are no boundaries.
    """
    from ...megatron_core.attention import DocumentBoundaries

    boundaries = Boundaries.of_joined_rows(joined.cu_seqlens_q)
    num_positions = boundaries.offsets[-1]
    row = boundaries.cu_seqlens.new_full((1, num_positions + 1), num_positions)
    row[0, : len(boundaries.offsets)] = boundaries.cu_seqlens
    return DocumentBoundaries(
        qkv_format="sbhd",
        cu_seqlens_q=row,
        cu_seqlens_kv=row,
        max_seqlen_q=num_positions,
        max_seqlen_kv=num_positions,
        joined=boundaries,
    )


def repeat_for_joined_rows(get_emb: Callable, options: Options) -> Callable:
    """``get_emb`` of rotary embeddings: joined rows have the angles of the positions 0 .. L - 1, one row after another,
    as if they were not joined."""

    @functools.wraps(get_emb)
    def get_emb_of_rows(self: Any, max_seq_len: int, offset: int = 0) -> Any:
        args = options()
        length = max_seq_len if args is None else args.seq_length
        if offset or max_seq_len <= length or max_seq_len % length:
            return get_emb(self, max_seq_len, offset)
        angles = get_emb(self, length)
        if isinstance(angles, tuple):  # YaRN also gives a scale
            return angles[0].repeat(max_seq_len // length, 1, 1, 1), *angles[1:]
        return angles.repeat(max_seq_len // length, 1, 1, 1)

    return get_emb_of_rows


def count_targets_of_the_row(calculate_loss: Callable, options: Options) -> Callable:
    """``forward_step_calc_loss``: without ``--calculate-per-token-loss``, the loss of a micro-batch is divided by the
    targets of its whole rows, not by those of this rank's share, so that each target counts the same."""

    @functools.wraps(calculate_loss)
    def calculate_loss_of_the_row(
        model: Any, output_tensor: Tensor, loss_func: Callable | None, config: Any, *others: Any, **keywords: Any
    ) -> Any:
        from megatron.core import parallel_state

        ranks = parallel_state.get_context_parallel_world_size()
        if ranks == 1 or loss_func is None or config.calculate_per_token_loss or options() is None:
            return calculate_loss(model, output_tensor, loss_func, config, *others, **keywords)

        def loss_with_mean_targets(*arguments: Any, **given: Any) -> Any:
            outputs = loss_func(*arguments, **given)
            if not isinstance(outputs, tuple) or len(outputs) != 3:
                return outputs
            loss, num_targets, report = outputs
            num_targets = num_targets.to(torch.float32)
            distributed.all_reduce(num_targets, group=parallel_state.get_context_parallel_group())
            return loss, num_targets / ranks, report

        return calculate_loss(model, output_tensor, loss_with_mean_targets, config, *others, **keywords)

    return calculate_loss_of_the_row


def with_a_share_of_heads(initialize: Callable) -> Callable:
    """``TEDotProductAttention.__init__``: with context parallelism the kernel gets a share of the heads of whole rows.
    Transformer Engine's own context parallelism, which expects aligned documents, stays off."""

    @functools.wraps(initialize)
    def initialize_with_a_share(self: Any, config: Any, *arguments: Any, **keywords: Any) -> None:
        ranks = config.context_parallel_size
        if ranks == 1:
            initialize(self, config, *arguments, **keywords)
            return
        from ...megatron_core.attention import way_to_split

        self_split = way_to_split(config, "ulysses")
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        alone.num_attention_heads = config.num_attention_heads // ranks
        alone.num_query_groups = max(config.tensor_model_parallel_size, config.num_query_groups // ranks)
        initialize(self, alone, *arguments, **keywords)
        self.split, self.context_parallel_size = self_split, ranks

    return initialize_with_a_share


def attend_to_one_row(forward: Callable) -> Callable:
    """``TEDotProductAttention.forward``, which takes the boundaries of one row and hands its kernel joined rows."""

    @functools.wraps(forward)
    def forward_joined(
        self: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any,
        *others: Any,
        packed_seq_params: Any = None,
        **keywords: Any,
    ) -> Tensor:
        from megatron.core import parallel_state

        if not isinstance(getattr(packed_seq_params, "joined", None), Boundaries):
            of_rows = {"packed_seq_params": packed_seq_params, **keywords}
            return forward(self, query, key, value, attention_mask, attn_mask_type, *others, **of_rows)

        def attend(query: Tensor, key: Tensor, value: Tensor, boundaries: Boundaries, *_: float) -> Tensor:
            joined = _joined(boundaries)
            output = forward(
                self, query, key, value, None, attn_mask_type, *others, packed_seq_params=joined, **keywords
            )
            return output.view(len(query), query.shape[1], -1)

        boundaries = packed_seq_params.joined
        query, key, value = (tensor.squeeze(1) for tensor in (query, key, value))
        split = getattr(self, "split", None)
        if split is None:
            return attend(query, key, value, boundaries).flatten(1).unsqueeze(1)
        shards = Shards(self.context_parallel_size, 1, boundaries.offsets[-1])
        group = parallel_state.get_context_parallel_group()
        attended = split(query, key, value, boundaries, shards, group, attend, 0.0, 0.0)
        return attended.flatten(1).unsqueeze(1)

    return forward_joined


def _joined(boundaries: Boundaries) -> Any:
    """Boundaries in Megatron-LM's form of joined rows, made in the first layer and kept for the others."""
    from megatron.core.packed_seq_params import PackedSeqParams

    joined = boundaries.plans.get("thd")
    if joined is None:
        longest = boundaries.max_seqlen
        joined = boundaries.plans["thd"] = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=boundaries.cu_seqlens,
            cu_seqlens_kv=boundaries.cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
    return joined
