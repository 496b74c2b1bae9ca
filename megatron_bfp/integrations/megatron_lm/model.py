"""Megatron-LM's model with ``--data-impl bfp``: positions that run on through a row, and rows split over ranks.

Megatron-LM joins the rows of a micro-batch and passes their boundaries in the form "thd". In this form it restarts
rotary positions in each document, and expects documents that are a multiple of twice the context-parallel size. So
``by_rows`` hands the model the same boundaries in the form "sbhd", of one row: rotary positions are then those of the
row, context parallelism cuts the row as it cuts any row, and core attention gets the boundaries and keeps to them.

Each function takes one of Megatron-LM's and returns its replacement. It imports megatron-core when that is called: the
modules that are changed are imported while megatron-core itself is.
"""

import argparse
import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, distributed, nn

from ...attention.boundaries import Boundaries
from ...attention.mixers import JOINED_ROWS_ONLY, has_class, mixers_of
from ...errors import OptionError

Options = Callable[[], argparse.Namespace | None]


def attend_inside_documents(initialize: Callable, options: Options) -> Callable:
    """``GPTModel.__init__``, whose attention becomes ``DocumentAttention`` if rows are split over ranks, whatever layer
    spec describes it. All else in its layers stays, Transformer Engine's linear layers and norms for example.

    Raises:
        OptionError: a layer mixes positions by something else than dot-product attention.
    """
    signature = inspect.signature(initialize)

    @functools.wraps(initialize)
    def initialize_inside_documents(*arguments: Any, **keywords: Any) -> None:
        args = options()
        call = signature.bind(*arguments, **keywords)
        if args is not None and args.context_parallel_size > 1:
            from ...megatron_core.attention import replace_attention

            call.arguments["transformer_layer_spec"], _ = replace_attention(call.arguments["transformer_layer_spec"])
        initialize(*call.args, **call.kwargs)

    return initialize_inside_documents


def by_rows(forward: Callable, options: Options) -> Callable:
    """``GPTModel.forward``, which gets the boundaries of joined rows as those of one row, unless positions restart.

    Args:
        options: gives what Megatron-LM parsed; None if the run is none of ours.

    Raises:
        OptionError: a layer cannot take them so, and rows are split over ranks.
    """

    @functools.wraps(forward)
    def forward_by_rows(*arguments: Any, packed_seq_params: Any = None, **keywords: Any) -> Any:
        args = options() if getattr(packed_seq_params, "qkv_format", None) == "thd" else None
        if args is not None:
            if not args.reset_position_ids and attends_by_rows(arguments[0]):
                joined, packed_seq_params = packed_seq_params, boundaries_of_one_row(packed_seq_params)
                if args.context_parallel_size == 1:  # a mixture of experts balances each sample by itself
                    packed_seq_params.tokens_per_sample = getattr(joined, "tokens_per_sample", None)
            elif args.context_parallel_size > 1:
                raise OptionError(
                    "--context-parallel-size above 1 with --data-impl bfp needs layers of attention inside documents "
                    "alone; see docs/long-context.md"
                )
        return forward(*arguments, packed_seq_params=packed_seq_params, **keywords)

    return forward_by_rows


@functools.lru_cache
def attends_by_rows(model: nn.Module) -> bool:
    """Whether everything in a model that mixes positions takes the boundaries of rows: Transformer Engine's attention
    and state space layers know only joined rows."""
    mixers, _ = mixers_of(model)
    return all(
        has_class(module, {"DocumentAttention"}) and not has_class(module, JOINED_ROWS_ONLY)
        for module in mixers.values()
    )


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

        def loss_by_all_targets(*arguments: Any, **given: Any) -> Any:
            outputs = loss_func(*arguments, **given)
            if not isinstance(outputs, tuple) or len(outputs) != 3:
                return outputs
            loss, num_targets, report = outputs
            num_targets = num_targets.clone()
            distributed.all_reduce(num_targets, group=parallel_state.get_context_parallel_group())
            return loss * ranks, num_targets, report  # gradients are averaged over these ranks, not added up

        return calculate_loss(model, output_tensor, loss_by_all_targets, config, *others, **keywords)

    return calculate_loss_of_the_row
