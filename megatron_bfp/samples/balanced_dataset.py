"""``BalancedDataset``: the samples of a packed dataset in an order in which ranks need not wait for each other."""

import operator
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..arguments import checked_count
from ..errors import OptionError
from .balance import balanced_order, dealt_order

BLOCKS_KEPT = 4
"""Orders in memory: of the batches that loader workers are reading."""


class _Block(NamedTuple):
    """Some consecutive places of the order."""

    first: int
    samples: list[int]
    """The sample at each place, as a list: reading a number from an array would take longer than the rest."""


class BalancedDataset:
    """A packed dataset whose global batches are ordered by work, so that ranks need not wait for each other.

    Every global batch holds the samples that it would hold without this, in another order, so its gradient is the same
    sum. (With ``num_batches`` above 1, several global batches together do.) The order depends on the global batch size
    and the micro-batch size alone: data-parallel size, loader workers and what was read before do not matter. It takes
    no communication, stores nothing that grows with the corpus, and costs less than a millisecond per 1,024 samples.

    All attributes of ``dataset`` can be read here, too. Instances can be pickled if ``dataset`` can.

    Args:
        dataset: a ``BFPGPTDataset``, the packed dataset of Megatron-DeepSpeed, or a blend of them; any number of
            corpora.
        global_batch_size: samples per step. For sizes that change in a run: pairs of the first sample of a stage and
            its global batch size, in ascending order. Samples before the first stage keep their order.
        num_batches: how many global batches to balance together; above 1, which samples share a batch depends on their
            work.
        tile: samples that all ranks together work on at once: data-parallel size times micro-batch size. It must divide
            the global batch size, and is needed if ``num_batches`` is above 1.
        micro_batch_size: samples that a rank runs together. Each global batch holds the same samples for any value.

    Raises:
        OptionError: an argument is not what is described above.

    Example:
        >>> train = BalancedDataset(train, global_batch_size=1024)
        >>> train[4711]                              # a sample, as before
        >>> train.work(4711)                         # its work, without reading it
    """

    def __init__(
        self,
        dataset: Any,
        global_batch_size: int | Sequence[tuple[int, int]],
        num_batches: int = 1,
        tile: int | None = None,
        micro_batch_size: int = 1,
    ) -> None:
        self.dataset = dataset
        self.num_batches = checked_count("num_batches", num_batches)
        self._micro_batch_size = checked_count("micro_batch_size", micro_batch_size)
        self._stages = _checked_stages(global_batch_size)
        self._firsts = [first for first, _ in self._stages]
        self._tile = self._checked_tile(tile) if self.num_batches > 1 else 0
        self._samples_per_epoch = getattr(dataset, "samples_per_epoch", 0) or len(dataset) or 1
        self._blocks: dict[int, _Block] = {}
        self._current = _Block(0, [])

    @property
    def stages(self) -> list[tuple[int, int]]:
        """The first sample and the global batch size of each stage, in ascending order."""
        return list(self._stages)

    def _checked_tile(self, tile: int | None) -> int:
        if tile is None:
            raise OptionError("num_batches above 1 needs tile, the data-parallel size times the micro-batch size")
        for _, size in self._stages:
            if size % checked_count("tile", tile):
                raise OptionError(f"a global batch size of {size} is not a multiple of {tile}, the tile")
        if tile % self._micro_batch_size:
            raise OptionError(f"tile {tile} is not a multiple of {self._micro_batch_size}, the micro-batch size")
        return tile

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":  # not there yet while an instance is unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_blocks": {}, "_current": _Block(0, [])}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, idx: int | None) -> Any:
        """Sample ``idx`` of the balanced order. ``None`` gives what ``dataset[None]`` gives.

        Raises:
            IndexError: there is no such sample.
        """
        return self.dataset[None if idx is None else self.sample_of(idx)]

    def work(self, idx: int) -> int:
        """The work of sample ``idx`` of the balanced order, without reading it: the sum of its squared chunk lengths.

        Raises:
            IndexError: there is no such sample.
        """
        return int(work_of(self.dataset, np.array([self.sample_of(idx)]))[0])

    def sample_of(self, idx: int) -> int:
        """The sample of ``dataset`` that comes ``idx``-th.

        Raises:
            IndexError: there is no such sample.
        """
        idx = operator.index(idx)
        block = self._current
        if not block.first <= idx < block.first + len(block.samples):
            block = self._current = self._block_of(idx)
        return block.samples[idx - block.first]

    def _block_of(self, idx: int) -> "_Block":
        """The block that holds place ``idx`` of the order."""
        if not 0 <= idx < len(self):
            raise IndexError(f"sample {idx} is not in [0, {len(self)})")
        stage = bisect_right(self._firsts, idx) - 1
        if stage < 0:
            return _Block(idx, [idx])
        start, end, num_batches = self._bounds(idx, stage)
        block = self._blocks.get(start)
        if block is None:
            while len(self._blocks) >= BLOCKS_KEPT:
                self._blocks.pop(next(iter(self._blocks)), None)
            samples = (start + self._order(start, end, num_batches)).tolist()
            block = self._blocks[start] = _Block(start, samples)
        return block

    def _bounds(self, idx: int, stage: int) -> tuple[int, int, int]:
        """The samples that are ordered together with ``idx``: start, end, and the number of global batches.

        A block ends with its global batches, its epoch, its stage or the dataset. Several batches that are cut short
        are balanced one by one.
        """
        first, size = self._stages[stage]
        epoch = idx // self._samples_per_epoch
        least = max(first, epoch * self._samples_per_epoch)
        most = min((epoch + 1) * self._samples_per_epoch, len(self))
        if stage + 1 < len(self._stages):
            most = min(most, self._firsts[stage + 1])
        for num_batches in (self.num_batches, 1):
            step = num_batches * size
            start = idx - (idx - first) % step
            end = start + step
            if num_batches == 1 or least <= start and end <= most:
                break
        return max(start, least), min(end, most), num_batches

    def _order(self, start: int, end: int, num_batches: int) -> np.ndarray:
        work = work_of(self.dataset, np.arange(start, end))
        if num_batches == 1:
            return balanced_order(work, self._micro_batch_size)
        return dealt_order(work, num_batches, self._tile, start, self._micro_batch_size)


def work_of(dataset: Any, samples: np.ndarray) -> np.ndarray:
    """The work of samples of a packed dataset or a blend of them, without reading them.

    Args:
        dataset: with a method ``work_of``; or a blend of such datasets, of megatron-core or Megatron-DeepSpeed.
        samples: int64 [n].

    Returns:
        int64 [n], tokens squared.

    Raises:
        OptionError: a dataset does not know the work of its samples.
    """
    if hasattr(dataset, "dataset_sample_index"):
        if dataset.dataset_sample_index is None and len(samples):
            dataset[int(samples[0])]  # megatron-core can put off opening its index until a sample is read
        corpora, samples = dataset.dataset_index[samples], dataset.dataset_sample_index[samples]
        work = np.empty(len(samples), dtype=np.int64)
        for corpus in np.unique(corpora).tolist():
            of_corpus = corpora == corpus
            work[of_corpus] = work_of(dataset.datasets[corpus], samples[of_corpus])
        return work
    if not hasattr(dataset, "work_of"):
        raise OptionError(f"balanced batches need packed datasets, got {type(dataset).__name__}")
    return dataset.work_of(samples)


def _checked_stages(global_batch_size: int | Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The stages, as pairs of first sample and global batch size."""
    if isinstance(global_batch_size, (int, np.integer)):
        return [(0, checked_count("global_batch_size", global_batch_size))]
    stages = [(operator.index(first), checked_count("global_batch_size", size)) for first, size in global_batch_size]
    firsts = [first for first, _ in stages]
    if not stages or firsts[0] < 0 or any(first >= following for first, following in zip(firsts, firsts[1:])):
        raise OptionError(f"global_batch_size: stages must begin at ascending samples, got {firsts}")
    return stages
