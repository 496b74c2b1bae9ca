"""Document boundaries of a micro-batch, in the one form that every kernel takes.

A dataset row says where its chunks end, as ``cu_seqlens``. Kernels want the rows of a micro-batch joined end to end,
with one list of boundaries. Two rows of 8 positions, for example::

    cu_seqlens   [[0, 3, 5, 8, 8, 8, 8, 8, 8],      chunks of 3, 2 and 3 tokens
                  [0, 8, 8, 8, 8, 8, 8, 8, 8]]      one chunk of 8 tokens
    offsets      [0, 3, 5, 8, 16]
    max_seqlen   8

The end of a row is always a boundary, and padding is fenced off like a document of its own. ``Boundaries`` is made once
per micro-batch. Rows on the host cost no synchronization with the GPU; rows on a GPU cost one.
"""

from dataclasses import dataclass, field, replace
from typing import Any

try:
    import torch
except ModuleNotFoundError as error:
    from ..optional import not_installed

    raise not_installed(error, __name__) from None
from torch import Tensor

from ..errors import OptionError


class InvalidBoundaries(OptionError):
    """Boundaries that no attention can honour.

    Args:
        reason: what is wrong, as a predicate of "boundaries" or "cu_seqlens": "do not rise from 0".
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"cu_seqlens {self.reason}"


def join_rows(cu_seqlens: Tensor) -> Tensor:
    """The boundaries of rows laid end to end.

    Args:
        cu_seqlens: int [b, any], or int [any] for a single row. Each row rises from 0 to its number of positions;
            entries may repeat.

    Returns:
        int64 [chunks + 1] on the host, without repetitions: 0 < b1 < ... < t, the positions of all rows.

    Raises:
        InvalidBoundaries: a row does not rise from 0, or is empty.
    """
    rows = cu_seqlens.detach().to("cpu", torch.int64)
    rows = rows if rows.dim() == 2 else rows[None]
    if rows.dim() != 2 or rows.shape[1] < 2 or (rows[:, 0] != 0).any() or (rows.diff(dim=1) < 0).any():
        raise InvalidBoundaries("do not rise from 0")
    lengths = rows[:, -1]
    if (lengths < 1).any():
        raise InvalidBoundaries("hold no position")
    return torch.unique_consecutive(rows + (lengths.cumsum(0) - lengths)[:, None])


@dataclass(frozen=True, eq=False)
class Boundaries:
    """Where documents begin and end in the joined rows of a micro-batch. Each chunk lies between two boundaries, and so
    does the padding of a row."""

    offsets: list[int]
    """0 < b1 < b2 < ... < t on the host, so that no kernel has to wait for the GPU to know them; t is the positions of
    all rows."""
    cu_seqlens: Tensor
    """int32 [chunks + 1]: the same on the device."""
    max_seqlen: int
    """Positions of the longest chunk."""
    keys: "Boundaries | None" = None
    """Of keys and values, where a rank's queries attend to more positions than their own: as many chunks, each aligned
    with that of the queries at its end. None: they are those of the queries."""
    plans: dict[Any, Any] = field(default_factory=dict)
    """What context parallelism derives from them once per micro-batch."""

    @classmethod
    def of_lengths(
        cls, lengths: list[int], device: torch.device | str, keys: "Boundaries | None" = None
    ) -> "Boundaries":
        """The boundaries of chunks of these lengths, each at least 1.

        Args:
            device: where ``cu_seqlens`` of the result goes.
            keys: as the attribute.
        """
        joined = torch.tensor([0, *lengths]).cumsum(0)
        return replace(cls._of_offsets(joined, device), keys=keys)

    @classmethod
    def of_rows(cls, cu_seqlens: Tensor, device: torch.device | str | None = None) -> "Boundaries":
        """The boundaries of a micro-batch of dataset samples.

        Args:
            cu_seqlens: int32 [b, L + 1], the ``cu_seqlens`` of a sample in each row: 0 < b1 < b2 < ..., then L to the
                end. Best left on the host.
            device: where ``cu_seqlens`` of the result goes; None for where the argument is.

        Raises:
            InvalidBoundaries: a row does not rise from 0 to L.
        """
        rows = cu_seqlens.to("cpu", torch.int64)
        joined = join_rows(rows)
        length = rows.shape[1] - 1
        if (rows[:, -1] != length).any():
            raise InvalidBoundaries(f"do not rise from 0 to {length}, the sequence length, in every row")
        return cls._of_offsets(joined, cu_seqlens.device if device is None else device)

    @classmethod
    def of_joined_rows(cls, cu_seqlens: Tensor, num_positions: int | None = None) -> "Boundaries":
        """The boundaries of a micro-batch whose rows were joined before, as in Megatron-LM.

        Args:
            cu_seqlens: int32 [any], from 0 to ``num_positions``; entries may repeat.
            num_positions: positions of all rows; None if that is not known from elsewhere.

        Raises:
            InvalidBoundaries: they do not rise from 0 to ``num_positions``.
        """
        joined = join_rows(cu_seqlens)
        if num_positions is not None and joined[-1] != num_positions:
            raise InvalidBoundaries(f"do not rise from 0 to {num_positions}, the positions of the micro-batch")
        return cls._of_offsets(joined, cu_seqlens.device)

    @classmethod
    def _of_offsets(cls, joined: Tensor, device: torch.device | str) -> "Boundaries":
        """Of int64 [chunks + 1] on the host, as ``join_rows`` returns it."""
        cu_seqlens = joined.to(torch.int32)
        if torch.device(device).type == "cuda":
            cu_seqlens = cu_seqlens.pin_memory().to(device, non_blocking=True)
        return cls(joined.tolist(), cu_seqlens, int(joined.diff().max()))
