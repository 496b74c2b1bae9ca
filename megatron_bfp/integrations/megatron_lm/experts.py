"""Megatron-LM's mixtures of experts with ``--data-impl bfp``: balance inside each sequence of joined rows.

With ``--moe-router-load-balancing-type seq_aux_loss`` a router balances experts inside each sequence, and takes
positions in the form [L, b]. Joined rows come as [b * L, 1], of which a rank has a share with sequence or context
parallelism, and would be balanced as one sequence. The router's loss is of sums over the positions of a sequence. So
here positions are added up, those of each sequence by themselves, until the share has as many as b sequences would have
on this rank. The router's own loss, and its sums over ranks, stay as they are.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor, nn

from ...attention.context_parallel import Shards
from ...errors import OptionError

Options = Callable[[], argparse.Namespace | None]


def balance_in_sequences(balance: Callable, options: Options) -> Callable:
    """``TopKRouter._apply_seq_aux_loss``, for joined rows.

    Args:
        options: gives what Megatron-LM parsed; None if the run is none of ours.
    """

    @functools.wraps(balance)
    def balance_sequences(
        self: nn.Module,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        seq_length: int,
        bsz: int,
        *others: bool,
        **keywords: bool,
    ) -> Tensor:
        args = options()
        own = None
        if args is not None and bsz == 1:
            own = sequences_of_share(seq_length, self.config, args.seq_length, probs.device)
        if own is None:
            return balance(self, probs, scores_for_aux_loss, routing_map, seq_length, bsz, *others, **keywords)
        num_rows = own.shape[1]
        scores = _by_sequence(scores_for_aux_loss, own)
        routes = _by_sequence(routing_map.to(scores.dtype), own).to(torch.int64)
        return balance(self, probs, scores, routes, seq_length // num_rows, num_rows, *others, **keywords)

    return balance_sequences


def _by_sequence(tensor: Tensor, own: Tensor) -> Tensor:
    """[n, experts] -> [n / sequences, sequences * experts], with the same sum for each sequence and expert.

    Args:
        own: as ``sequences_of_share``.
    """
    parts = own.to(tensor.dtype).unflatten(0, (own.shape[1], -1)), tensor.unflatten(0, (own.shape[1], -1))
    return torch.einsum("pns,pne->nse", *parts).flatten(1)


def sequences_of_share(num_positions: int, config: Any, row_length: int, device: torch.device) -> Tensor | None:
    """Which sequence each position of this rank's share of joined rows belongs to.

    Args:
        num_positions: of this rank.
        config: of the model.
        row_length: positions of a sequence, over all ranks.

    Returns:
        bool [num_positions, sequences]; None if there is a single sequence, or no number of whole ones.

    Raises:
        OptionError: ranks cannot have equal shares of a sequence.
    """
    parts = config.tensor_model_parallel_size if config.sequence_parallel else 1
    num_rows, rest = divmod(num_positions * parts * config.context_parallel_size, row_length)
    if rest or num_rows < 2:
        return None
    if num_positions % num_rows:
        raise OptionError(
            f"--moe-router-load-balancing-type seq_aux_loss needs a --seq-length that is a multiple of "
            f"{parts * config.context_parallel_size}, the ranks that share a sequence, not {row_length}"
        )
    part = parallel_state.get_tensor_model_parallel_rank() if parts > 1 else 0
    rank = parallel_state.get_context_parallel_rank() if config.context_parallel_size > 1 else 0
    is_split = config.context_parallel_size > 1
    joined = Shards(config.context_parallel_size, 1, num_rows * row_length, is_zigzag=is_split)
    return _sequences(joined, rank, part, parts, row_length, device)


@functools.lru_cache(maxsize=8)
def _sequences(joined: Shards, rank: int, part: int, parts: int, row_length: int, device: torch.device) -> Tensor:
    """``sequences_of_share`` of a context-parallel rank, of whose positions a tensor-parallel rank has a part."""
    positions = joined.positions(rank).chunk(parts)[part].to(device)
    return torch.nn.functional.one_hot(positions // row_length, joined.row_length // row_length).bool()
