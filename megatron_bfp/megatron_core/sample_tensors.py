"""A sample's or a batch's tensors, which travel from a DataLoader's worker to the trainer as one."""

from typing import SupportsIndex

try:
    import torch
except ModuleNotFoundError as error:
    from ..optional import not_installed

    raise not_installed(error, __name__) from None

WORTH_JOINING = 1 << 21
"""Bytes; copying more than this takes longer than sending the tensors one by one."""


class SampleTensors(dict[str, torch.Tensor]):
    """name -> tensor; a dict in every respect, but pickled as a single tensor of bytes where that is faster.

    Between processes torch hands over each tensor's memory by itself, as a file descriptor that travels through a
    socket of its own. For batches of a few thousand tokens that takes longer than making them, and grows with the
    number of tensors. ``default_collate`` and ``pin_memory`` keep the class, so any DataLoader gains by it; the samples
    of a blend are plain dicts, as BlendedDataset makes new ones.
    """

    def __copy__(self) -> "SampleTensors":
        return SampleTensors(self)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple:
        if not all(isinstance(value, torch.Tensor) and value.is_cpu for value in self.values()):
            return SampleTensors, (dict(self),)
        if not 0 < sum(tensor.nbytes for tensor in self.values()) <= WORTH_JOINING:
            return SampleTensors, (dict(self),)
        layout = [(name, tensor.dtype, tensor.shape) for name, tensor in self.items()]
        layout.sort(key=lambda row: -row[1].itemsize)  # large dtypes first: then each starts at a multiple of its size
        parts = [self[name].reshape(-1).view(torch.uint8) for name, _, _ in layout]
        return _separate, (_join(parts), layout, list(self))


def _join(parts: list[torch.Tensor]) -> torch.Tensor:
    """One tensor of all bytes; in a DataLoader's worker in shared memory at once, as default_collate does it."""
    if torch.utils.data.get_worker_info() is None:
        return torch.cat(parts)
    joined = torch.empty(0, dtype=torch.uint8)
    joined.set_(joined.untyped_storage()._new_shared(sum(map(len, parts)), device=joined.device))
    return torch.cat(parts, out=joined)


def _separate(
    joined: torch.Tensor, layout: list[tuple[str, torch.dtype, torch.Size]], names: list[str]
) -> SampleTensors:
    tensors, end = {}, 0
    for name, dtype, shape in layout:
        start, end = end, end + dtype.itemsize * shape.numel()
        tensors[name] = joined[start:end].view(dtype).view(shape)
    return SampleTensors({name: tensors[name] for name in names})
