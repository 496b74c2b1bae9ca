"""Attention inside documents with the rows split over a context-parallel group. Documents need no alignment.

Two ways, for any boundaries, any kernel and any number of rows:

``ulysses``
    Each rank gets the whole rows for its share of the heads, runs the ordinary kernel, and gives the result back. Work
    is perfectly even. The size of the group must divide the heads; key and value groups are repeated where there are
    fewer than ranks. Moves (2 heads + 2 groups) / CP of a rank's tensors.

``gather``
    Queries stay where they are; each rank gets the keys and values that its queries' documents need, and no others. For
    any number of heads. Work is as uneven as the documents are.

How a row of 8 positions is split over a group of 2::

    contiguous   rank 0: 0 1 2 3        rank 1: 4 5 6 7
    zigzag       rank 0: 0 1 6 7        rank 1: 2 3 4 5      in pieces of 2, as Megatron does

Both are exact: the output is that of one rank that holds everything, and so are the gradients, up to the order of sums.

Sources: Jacobs et al., "DeepSpeed Ulysses" (2023); Llama Team, "The Llama 3 Herd of Models" (2024), section 3.3.2, for
gathering.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import lcm
from typing import Any

try:
    import torch
except ModuleNotFoundError as error:
    from ..optional import not_installed

    raise not_installed(error, __name__) from None
from torch import Tensor, distributed

from ..errors import OptionError
from .boundaries import Boundaries
from .kernels import Attend


@dataclass(frozen=True)
class Shards:
    """How the joined rows of a micro-batch are split over a context-parallel group."""

    num_ranks: int
    num_rows: int
    row_length: int
    """Positions of a row, over all ranks."""
    is_zigzag: bool = True
    """Each row is cut into 2 * ``num_ranks`` pieces, of which rank r holds the r-th and the r-th last; otherwise into
    ``num_ranks`` pieces, one for each rank."""

    def __post_init__(self) -> None:
        pieces = 2 * self.num_ranks if self.is_zigzag else self.num_ranks
        if self.row_length % pieces:
            raise OptionError(
                f"rows of {self.row_length} positions cannot be split over {self.num_ranks} context-parallel ranks: "
                f"give a length that is a multiple of {pieces}"
            )

    @property
    def positions_per_rank(self) -> int:
        """Positions of all rows that a rank holds."""
        return self.num_rows * self.row_length // self.num_ranks

    def pieces(self, rank: int) -> list[tuple[int, int]]:
        """Start and end, in the joined rows, of the consecutive positions that a rank holds, in its order."""
        of_a_row = [rank, 2 * self.num_ranks - 1 - rank] if self.is_zigzag else [rank]
        length = self.row_length // (2 * self.num_ranks if self.is_zigzag else self.num_ranks)
        starts = [row * self.row_length + piece * length for row in range(self.num_rows) for piece in of_a_row]
        return [(start, start + length) for start in starts]

    def positions(self, rank: int) -> Tensor:
        """int64 [positions_per_rank]: where in the joined rows a rank's positions are, in its order."""
        return _ranges(self.pieces(rank))


def ulysses(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: Boundaries,
    shards: Shards,
    group: distributed.ProcessGroup,
    attend: Attend,
    softmax_scale: float,
    dropout: float,
) -> Tensor:
    """Attention by heads instead of positions: exchange, the ordinary kernel, exchange back.

    Args:
        query: [n, heads, head size], n being this rank's positions of all rows, rows joined.
        key, value: [n, groups, head size].
        boundaries: of the whole rows.
        shards: how the rows are split over ``group``.
        attend, softmax_scale, dropout: as in ``kernels``.

    Returns:
        [n, heads, head size of ``value``].

    Raises:
        OptionError: the size of the group does not divide the heads.
    """
    ranks, heads = shards.num_ranks, query.shape[1]
    if heads % ranks:
        raise OptionError(f"{heads} attention heads cannot be divided among {ranks} context-parallel ranks")
    groups = lcm(key.shape[1], ranks)
    parts = [query, _repeated(key, groups), _repeated(value, groups)]
    order, back = _orders(shards, query.device)
    query, key, value = (part[back] for part in _heads_for_positions(parts, ranks, group))
    attended = attend(query, key, value, boundaries, softmax_scale, dropout)[order]
    return _positions_for_heads(attended, ranks, group)


def _repeated(tensor: Tensor, groups: int) -> Tensor:
    """Key or value groups, each repeated so that there are ``groups``."""
    return tensor if tensor.shape[1] == groups else tensor.repeat_interleave(groups // tensor.shape[1], dim=1)


@lru_cache(maxsize=8)
def _orders(shards: Shards, device: torch.device) -> tuple[Tensor, Tensor]:
    """For all ranks' positions, one rank after another, where they are in the joined rows; and the inverse."""
    order = torch.cat([shards.positions(rank) for rank in range(shards.num_ranks)])
    return order.to(device), order.argsort().to(device)


def _heads_for_positions(parts: list[Tensor], ranks: int, group: distributed.ProcessGroup) -> list[Tensor]:
    """Exchange [n, heads, size] for [ranks * n, heads / ranks, size], of several tensors at once."""
    sizes = [(part.shape[1] // ranks, part.shape[2]) for part in parts]
    by_rank = [part.unflatten(1, (ranks, -1)).transpose(0, 1).flatten(2) for part in parts]
    joined = torch.cat(by_rank, dim=2)  # [ranks, n, heads / ranks * size of all parts]
    received = exchange(joined.flatten(0, 1), group)
    split = received.split([heads * size for heads, size in sizes], dim=1)
    return [part.unflatten(1, shape) for part, shape in zip(split, sizes, strict=True)]


def _positions_for_heads(tensor: Tensor, ranks: int, group: distributed.ProcessGroup) -> Tensor:
    """The reverse for one tensor: [ranks * n, heads / ranks, size] for [n, heads, size]."""
    received = exchange(tensor, group).unflatten(0, (ranks, -1))
    return received.transpose(0, 1).flatten(1, 2)


def gather(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: Boundaries,
    shards: Shards,
    group: distributed.ProcessGroup,
    attend: Attend,
    softmax_scale: float,
    dropout: float,
) -> Tensor:
    """Attention of this rank's queries to the keys and values that their documents need; arguments as ``ulysses``."""
    plan = GatherPlan.of(boundaries, shards, distributed.get_rank(group), query.device)
    groups, size = key.shape[1:]
    both = torch.cat([key.flatten(1), value.flatten(1)], dim=1)
    received = exchange(both[plan.sent], group, plan.send_counts, plan.receive_counts)[plan.keys]
    key, value = received.split([groups * size, value[0].numel()], dim=1)
    key, value = key.unflatten(1, (groups, size)), value.unflatten(1, (groups, -1))
    return attend(query, key, value, plan.boundaries, softmax_scale, dropout)


@dataclass(frozen=True, eq=False)
class GatherPlan:
    """Which keys and values a rank sends and gets, for the boundaries of one micro-batch. All ranks know them, so no
    communication is needed to agree."""

    sent: Tensor
    """int64: this rank's positions that it sends, for rank 0, then for rank 1, and so on."""
    send_counts: list[int]
    """How many of them go to each rank."""
    receive_counts: list[int]
    """How many positions come from each rank."""
    keys: Tensor
    """int64: which of the received positions the keys are, one document after another."""
    boundaries: Boundaries
    """Of this rank's queries, and of these keys."""

    @classmethod
    def of(cls, boundaries: Boundaries, shards: Shards, rank: int, device: torch.device) -> "GatherPlan":
        """The plan of a rank, made in the first layer and kept with the boundaries for the others."""
        plan = boundaries.plans.get((shards, rank))
        if plan is None:
            plan = boundaries.plans[shards, rank] = cls._make(boundaries, shards, rank, device)
        return plan

    @classmethod
    def _make(cls, boundaries: Boundaries, shards: Shards, rank: int, device: torch.device) -> "GatherPlan":
        ranks = range(shards.num_ranks)
        holder = torch.empty(shards.num_rows * shards.row_length, dtype=torch.int64)  # the rank of each position
        slot = torch.empty_like(holder)  # its number there
        for holding in ranks:
            positions = shards.positions(holding)
            holder[positions], slot[positions] = holding, torch.arange(len(positions))
        keys_of_ranks = [_keys_needed(boundaries, shards.pieces(needing)) for needing in ranks]
        needed = [torch.unique(_ranges(keys)) for keys in keys_of_ranks]
        sent = [slot[positions[holder[positions] == rank]] for positions in needed]
        mine = needed[rank]
        arrival = mine[holder[mine].argsort(stable=True)]  # one rank after another, ascending
        where = torch.empty_like(holder)
        where[arrival] = torch.arange(len(arrival))
        return cls(
            torch.cat(sent).to(device),
            list(map(len, sent)),
            torch.bincount(holder[mine], minlength=shards.num_ranks).tolist(),
            where[_ranges(keys_of_ranks[rank])].to(device),
            _boundaries_of(boundaries, shards.pieces(rank), keys_of_ranks[rank], device),
        )


def _keys_needed(boundaries: Boundaries, pieces: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """For each piece of queries and each document in it, start and end of the keys that it attends to."""
    starts = torch.tensor(boundaries.offsets)
    needed = []
    for start, end in pieces:
        first = int(torch.searchsorted(starts, start, side="right")) - 1
        for document_start, document_end in pairwise(boundaries.offsets[first:]):
            if document_start >= end:
                break
            needed.append((document_start, min(document_end, end)))
    return needed


def _boundaries_of(
    boundaries: Boundaries, pieces: list[tuple[int, int]], keys: list[tuple[int, int]], device: torch.device
) -> Boundaries:
    """Of queries and of their keys: a chunk of each for every piece and every document in it."""
    lengths = []
    remaining = iter(keys)
    for start, end in pieces:
        reached = start
        while reached < end:
            _, key_end = next(remaining)
            lengths.append(key_end - reached)
            reached = key_end
    of_keys = Boundaries.of_lengths([end - start for start, end in keys], device)
    return Boundaries.of_lengths(lengths, device, keys=of_keys)


def _ranges(bounds: list[tuple[int, int]]) -> Tensor:
    """All integers of several ranges, one range after another."""
    return torch.cat([torch.arange(start, end) for start, end in bounds])


def exchange(
    tensor: Tensor,
    group: distributed.ProcessGroup,
    send_counts: list[int] | None = None,
    receive_counts: list[int] | None = None,
) -> Tensor:
    """All-to-all along the first dimension, with its gradient.

    Args:
        tensor: [sent, ...]: what goes to the first rank, then to the second, and so on.
        send_counts, receive_counts: how much goes to and comes from each rank; None for equal parts.

    Returns:
        [received, ...], in order of the ranks that sent it.
    """
    return _Exchange.apply(tensor, group, send_counts, receive_counts)


class _Exchange(torch.autograd.Function):
    """``exchange``: its gradient goes the other way."""

    @staticmethod
    def forward(
        context: Any,
        tensor: Tensor,
        group: distributed.ProcessGroup,
        send_counts: list[int] | None,
        receive_counts: list[int] | None,
    ) -> Tensor:
        context.group, context.counts = group, (send_counts, receive_counts)
        return _all_to_all(tensor, group, send_counts, receive_counts)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        send_counts, receive_counts = context.counts
        return _all_to_all(gradient, context.group, receive_counts, send_counts), None, None, None


def _all_to_all(
    tensor: Tensor, group: distributed.ProcessGroup, send_counts: list[int] | None, receive_counts: list[int] | None
) -> Tensor:
    number = len(tensor) if receive_counts is None else sum(receive_counts)
    received = tensor.new_empty((number, *tensor.shape[1:]))
    distributed.all_to_all_single(received, tensor.contiguous(), receive_counts, send_counts, group=group)
    return received
