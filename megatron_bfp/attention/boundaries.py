"""Where documents begin and end in a micro-batch, as a kernel takes it: rows joined, one segment per document."""

from typing import NamedTuple

try:
    import torch
except ModuleNotFoundError as error:
    from ..optional import not_installed

    raise not_installed(error, __name__) from None
from torch import Tensor

from ..errors import OptionError


class Segments(NamedTuple):
    """Where documents begin and end in the joined rows of a micro-batch. Padding is a segment of its own."""

    boundaries: list[int]
    """0 < b1 < b2 < ... < t, on the host: no kernel has to wait for the GPU to know them."""
    cu_seqlens: Tensor
    """int32 [segments + 1], the same on the device."""
    max_seqlen: int
    """Tokens of the longest segment."""


def join_rows(cu_seqlens: Tensor, device: torch.device | str | None = None) -> Segments:
    """The segments of a micro-batch.

    Args:
        cu_seqlens: int32 [b, L + 1], a sample's ``cu_seqlens`` in each row: 0 < b1 < b2 < ... and L to the end. On the
            host it costs nothing; on a GPU it makes the host wait once.
        device: where ``cu_seqlens`` of the result goes; None for where it came from.

    Raises:
        OptionError: a row is not what is described above.
    """
    device = cu_seqlens.device if device is None else device
    rows = cu_seqlens.to("cpu", torch.int64)
    length = rows.shape[1] - 1
    if length < 1 or (rows[:, 0] != 0).any() or (rows[:, -1] != length).any() or (rows.diff(dim=1) < 0).any():
        raise OptionError("cu_seqlens: each row must rise from 0 to the sequence length, as a dataset's samples do")
    return _segments(rows + length * torch.arange(len(rows))[:, None], device)


def joined_segments(cu_seqlens: Tensor, num_positions: int) -> Segments:
    """The segments of a micro-batch whose rows were joined before, as Megatron-LM does it.

    Args:
        cu_seqlens: int32 [any], from 0 to ``num_positions``, where entries may repeat. On a GPU the host waits once.

    Raises:
        OptionError: they do not rise from 0 to ``num_positions``.
    """
    boundaries = cu_seqlens.to("cpu", torch.int64)
    if boundaries[0] != 0 or boundaries[-1] != num_positions or (boundaries.diff() < 0).any():
        raise OptionError(f"cu_seqlens must rise from 0 to {num_positions}, the positions of the micro-batch")
    return _segments(boundaries, cu_seqlens.device)


def _segments(boundaries: Tensor, device: torch.device | str) -> Segments:
    joined = torch.unique_consecutive(boundaries)
    cu_seqlens = joined.to(torch.int32)
    if torch.device(device).type == "cuda":
        cu_seqlens = cu_seqlens.pin_memory().to(device, non_blocking=True)
    return Segments(joined.tolist(), cu_seqlens, int(joined.diff().max()))
