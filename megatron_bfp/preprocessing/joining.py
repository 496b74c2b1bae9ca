"""Finished shards to datasets, while other shards are still tokenized: the copying is done when the last of them is."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from ..indexed_dataset import IndexedDataset
from ..merging import Merging
from ..progress import Progress, without_progress
from .shards import shard_prefix


class ShardJoiner:
    """Joins shards in the order in which they were announced, in a thread. Leaving the ``with`` block without
    ``finish`` removes what was written.

    Args:
        folder: where finished shards are.
        prefixes: [keys], paths of the datasets to write.
    """

    def __init__(self, folder: str, prefixes: Sequence[str]) -> None:
        self._folder, self._prefixes = folder, prefixes
        self._waiting: list[int] = []  # announced, in order
        self._finished: set[int] = set()
        self._merged: list[Merging] = []
        self._thread = ThreadPoolExecutor(1)
        self._copies: list[Future] = []

    def __enter__(self) -> "ShardJoiner":
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        for merging in self._merged:
            merging.__exit__(*error)

    def announce(self, number: int) -> None:
        """A shard comes behind those announced before."""
        self._waiting.append(number)

    def add(self, number: int) -> None:
        """A shard that was announced is finished.

        Raises:
            What was raised in joining one before, as by ``merge``.
        """
        self._finished.add(number)
        while self._waiting and self._waiting[0] in self._finished:
            self._copies.append(self._thread.submit(self._append, self._waiting.pop(0)))
        while self._copies and self._copies[0].done():
            self._copies.pop(0).result()

    def finish(self, progress: Progress = without_progress) -> list[IndexedDataset]:
        """Give the datasets their names; all shards must be there.

        Raises:
            As ``merge``.
        """
        for copy in progress(self._copies, len(self._copies), "joining shards"):
            copy.result()
        return [merging.finish(progress) for merging in self._merged]

    def _append(self, number: int) -> None:
        if not self._merged:
            for prefix in self._prefixes:
                self._merged.append(Merging(prefix))
        for key, merging in enumerate(self._merged):
            merging.append(shard_prefix(self._folder, number, key))
            merging.sync()
