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
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, distributed, nn

from ...attention.boundaries import Boundaries
from ...attention.mixers import JOINED_ROWS_ONLY, has_class, mixers_of
from ...errors import OptionError

Options = Callable[[], argparse.Namespace | None]


def attend_inside_documents(initialize: Callable, options: Options) -> Callable:
    """``GPTModel.__init__``, or ``HybridModel``'s, whose attention becomes ``DocumentAttention`` if rows are split over
    ranks, whatever layer spec describes it. All else in its layers stays, Transformer Engine's linear layers and norms
    for example.

    Raises:
        OptionError: a layer of a GPT model mixes positions by something else than dot-product attention.
    """
    signature = inspect.signature(initialize)

    @functools.wraps(initialize)
    def initialize_inside_documents(*arguments: Any, **keywords: Any) -> None:
        args = options()
        call = signature.bind(*arguments, **keywords)
        if args is not None and args.context_parallel_size > 1:
            for name, replace in (("transformer_layer_spec", _in_layers), ("hybrid_stack_spec", _in_kinds_of_layers)):
                if name in call.arguments:
                    call.arguments[name] = replace(call.arguments[name])
        initialize(*call.args, **call.kwargs)

    return initialize_inside_documents


def _in_layers(spec: Any) -> Any:
    """A copy of a spec whose layers attend inside documents."""
    from ...megatron_core.attention import replace_attention

    return replace_attention(spec)[0]


def _in_kinds_of_layers(spec: Any) -> Any:
    """The same of a hybrid model's spec, which describes each kind of layer, whether the model has it or not."""
    if getattr(spec, "submodules", None) is None:
        return spec
    spec = copy.copy(spec)
    spec.submodules = copy.copy(spec.submodules)
    for name in ("attention_layer", "mla_layer"):
        if hasattr(spec.submodules, name):
            setattr(spec.submodules, name, _in_layers(getattr(spec.submodules, name)))
    return spec


def by_rows(forward: Callable, options: Options) -> Callable:
    """``GPTModel.forward``, or ``HybridModel``'s, which gets the boundaries of joined rows as those of one row, unless
    positions restart.

    Args:
        options: gives what Megatron-LM parsed; None if the run is none of ours.

    Raises:
        OptionError: a layer cannot take them so, and rows are split over ranks.
    """

    @functools.wraps(forward)
    def forward_by_rows(*arguments: Any, packed_seq_params: Any = None, **keywords: Any) -> Any:
        args = options() if getattr(packed_seq_params, "qkv_format", None) == "thd" else None
        if args is not None:
            is_split = args.context_parallel_size > 1
            if is_split or args.sequence_parallel:  # experts balance shares of sequences by ``balance_in_sequences``
                packed_seq_params.tokens_per_sample = None
            if not args.reset_position_ids and attends_by_rows(arguments[0], is_split):
                joined, packed_seq_params = packed_seq_params, boundaries_of_one_row(packed_seq_params)
                packed_seq_params.seq_idx = getattr(joined, "seq_idx", None)  # for state space layers
                packed_seq_params.tokens_per_sample = getattr(joined, "tokens_per_sample", None)
            elif is_split:
                raise OptionError(
                    "--context-parallel-size above 1 with --data-impl bfp needs layers of attention inside documents "
                    "and of Mamba alone; see docs/long-context.md"
                )
        return forward(*arguments, packed_seq_params=packed_seq_params, **keywords)

    return forward_by_rows


@functools.lru_cache
def attends_by_rows(model: nn.Module, is_split: bool) -> bool:
    """Whether everything in a model that mixes positions takes the boundaries of rows: Transformer Engine's attention
    and other mixers know only joined rows. State space layers do if rows are split over ranks, by
    ``in_order_of_rows``."""
    by_rows = {"DocumentAttention", "MambaMixer"} if is_split else {"DocumentAttention"}
    mixers, _ = mixers_of(model)
    return all(
        has_class(module, by_rows) and not has_class(module, JOINED_ROWS_ONLY - by_rows) for module in mixers.values()
    )


def in_order_of_rows(exchange: Callable, _: Options) -> Callable:
    """``MambaContextParallel.pre_conv_ssm`` or ``post_conv_ssm``, which bring positions from the order in which
    attention has them over all ranks into their own, or back. They expect each joined document to be split over ranks;
    here the row is, as a row of one document is."""

    @functools.wraps(exchange)
    def exchange_rows(*arguments: Any, **keywords: Any) -> Any:
        from ...megatron_core.boundaries_of_rows import without_boundaries_of_rows

        return without_boundaries_of_rows(exchange)(*arguments, **keywords)

    return exchange_rows


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
