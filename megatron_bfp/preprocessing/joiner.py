"""Finished shards to datasets, while other shards are still tokenized: the copying is done when the last of them is.

The datasets grow in the run's folder. When a shard's part of them is on disk, its own files are removed: all tokens
need their room once, and a run that is started again goes on behind what was joined.
"""

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, BinaryIO

import numpy as np

from ..errors import IndexedDatasetError, InputError
from ..files import sync_file
from ..indexed_dataset.format import bin_path, idx_path
from ..indexed_dataset.merging import copy_tokens
from ..indexed_dataset.reader import IndexedDataset
from ..indexed_dataset.writer import IdxWriter, IndexedDatasetWriter
from ..progress import Progress, without_progress
from .task import ShardRecord, shard_prefix

LENGTHS_AT_ONCE = 1 << 20
TOKENS_AT_ONCE = 1 << 22


class ShardJoiner:
    """Joins shards in the order in which they were announced, in a thread.

    Args:
        folder: where finished shards are.
        prefixes: [keys], paths of the datasets that grow.
        dtype: of their tokens, one of ``TOKEN_DTYPES``.
    """

    def __init__(self, folder: str, prefixes: Sequence[str], dtype: Any) -> None:
        self._folder, self._prefixes, self._dtype = folder, prefixes, dtype
        self._waiting: list[int] = []  # announced, in order
        self._finished: dict[int, tuple[ShardRecord, bool]] = {}
        self._datasets: list[GrowingDataset] = []
        self._thread = ThreadPoolExecutor(1)
        self._copies: list[Future] = []

    def __enter__(self) -> "ShardJoiner":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        for dataset in self._datasets:
            dataset.close()

    def announce(self, number: int) -> None:
        """A shard comes behind those announced before."""
        self._waiting.append(number)

    def add(self, number: int, record: ShardRecord, is_new: bool) -> None:
        """A shard that was announced is finished.

        Args:
            is_new: it was finished after ``__init__``, and so is not joined yet.

        Raises:
            IndexedDatasetError: one before cannot be read, or a dataset cannot be written.
            InputError: one before was joined, and is not there.
        """
        self._finished[number] = record, is_new
        while self._waiting and self._waiting[0] in self._finished:
            first = self._waiting.pop(0)
            self._copies.append(self._thread.submit(self._append, first, *self._finished.pop(first)))
        while self._copies and self._copies[0].done():
            self._copies.pop(0).result()

    def finish(self, progress: Progress = without_progress) -> None:
        """Write each dataset's .idx; all shards must be there.

        Raises:
            As ``add``.
        """
        for copy in progress(self._copies, len(self._copies), "joining shards"):
            copy.result()
        for dataset in self._opened():
            dataset.finish(progress)

    def _opened(self) -> list["GrowingDataset"]:
        if not self._datasets:
            self._datasets = [GrowingDataset(prefix, self._dtype) for prefix in self._prefixes]
            sync_file(self._folder)  # before any shard is removed
        return self._datasets

    def _append(self, number: int, record: ShardRecord, is_new: bool) -> None:
        datasets = self._opened()
        parts = [shard_prefix(self._folder, number, key) for key in range(len(datasets))]
        was_joined = not is_new and is_joined(self._folder, number, len(datasets))
        for dataset, part, *counts in zip(datasets, parts, record.num_documents, record.num_tokens, strict=True):
            dataset.pass_over(*counts) if was_joined else dataset.append(part, *counts)
        for path in _files_of(parts):
            with suppress(FileNotFoundError):
                os.remove(path)


def is_joined(folder: str, number: int, num_keys: int) -> bool:
    """Whether a finished shard was joined: the first of its own files is removed when all of it is on disk."""
    return not all(map(os.path.exists, _files_of([shard_prefix(folder, number, key) for key in range(num_keys)])))


def _files_of(parts: Sequence[str]) -> list[str]:
    return [path_of(part) for part in parts for path_of in (bin_path, idx_path)]


def joined_bytes(num_documents: int, num_tokens: int, dtype: Any) -> dict[str, int]:
    """The sizes of what a growing dataset holds, by the endings of its files' names."""
    return {".bin": num_tokens * np.dtype(dtype).itemsize, ".lengths": num_documents * 4}


def take_out(prefix: str, part: str, dtype: Any, documents: range, tokens: range) -> None:
    """Write a part of a growing dataset to files of its own again, and force them to disk.

    Args:
        prefix: of the dataset that grows, which keeps the part.
        part: prefix of the files to write.
        documents, tokens: where the part is in it.

    Raises:
        InputError: it is not there.
        IndexedDatasetError: the files cannot be written.
    """
    itemsize = np.dtype(dtype).itemsize
    lengths = _read(prefix + ".lengths", np.int32, documents.start * 4, len(documents))
    ends = np.cumsum(lengths, dtype=np.int64)
    with IndexedDatasetWriter(part, dtype) as writer:
        first = done = 0
        while first < len(lengths):
            end = max(first + 1, int(np.searchsorted(ends, done + TOKENS_AT_ONCE, "right")))
            num_tokens = int(ends[end - 1]) - done
            place = (tokens.start + done) * itemsize
            writer.add(_read(bin_path(prefix), dtype, place, num_tokens), lengths[first:end].astype(np.int64))
            first, done = end, done + num_tokens
        writer.finalize()
    if done != len(tokens):
        raise _is_shorter(prefix)


def _read(path: str, dtype: Any, offset: int, number: int) -> np.ndarray:
    try:
        values = np.fromfile(path, dtype, number, offset=offset)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    if len(values) != number:
        raise _is_shorter(path.rsplit(".", 1)[0])
    return values


def _is_shorter(prefix: str) -> InputError:
    return InputError(
        f"{bin_path(prefix)}: is shorter than the shards that were joined in it; remove {os.path.dirname(prefix)} to "
        "begin anew"
    )


class GrowingDataset:
    """PREFIX.bin and PREFIX.lengths, which grow shard by shard, and at last PREFIX.idx. The files stay when they are
    closed, so that another process can go on with them.

    Args:
        prefix: path of the files without their endings.
        dtype: of a token, one of ``TOKEN_DTYPES``.

    Raises:
        IndexedDatasetError: the files cannot be written, which any method may find.
    """

    def __init__(self, prefix: str, dtype: Any) -> None:
        self._prefix, self._dtype = prefix, np.dtype(dtype)
        self._num_documents = self._num_tokens = 0
        self._bin, self._lengths = (_open_to_go_on(path) for path in (bin_path(prefix), prefix + ".lengths"))

    def close(self) -> None:
        """Close the files."""
        self._bin.close()
        self._lengths.close()

    def append(self, part: str, num_documents: int, num_tokens: int) -> None:
        """Copy a shard's dataset behind what is there, and force it to disk.

        Args:
            part: its prefix. Its documents have one sequence each.
            num_documents, num_tokens: what it must have.

        Raises:
            IndexedDatasetError: it is damaged.
        """
        source = IndexedDataset(part, mmap=False)
        if (source.dtype, source.num_documents, source.num_tokens) != (self._dtype, num_documents, num_tokens):
            raise IndexedDatasetError(
                f"{idx_path(part)}: is not what the shard's record says; remove {os.path.dirname(part)}, and the same "
                "command does this shard again"
            )
        itemsize = self._dtype.itemsize
        for _ in copy_tokens(part, num_tokens * itemsize, self._bin, self._num_tokens * itemsize):
            pass
        try:
            self._lengths.seek(self._num_documents * 4)
            for lengths in source.checked_lengths():
                _write_all(self._lengths, lengths)
            for file in (self._bin, self._lengths):
                os.fdatasync(file.fileno())
        except OSError as error:
            raise self._cannot_write(error) from None
        self._add(num_documents, num_tokens)

    def pass_over(self, num_documents: int, num_tokens: int) -> None:
        """Go on behind a shard that was appended before.

        Raises:
            InputError: it was not.
        """
        self._add(num_documents, num_tokens)
        if _size(self._bin) < self._num_bytes or _size(self._lengths) < self._num_documents * 4:
            raise _is_shorter(self._prefix)

    def finish(self, progress: Progress = without_progress) -> None:
        """Write the .idx."""
        try:
            os.ftruncate(self._bin.fileno(), self._num_bytes)
            os.fdatasync(self._bin.fileno())
        except OSError as error:
            raise self._cannot_write(error) from None
        with IdxWriter(idx_path(self._prefix), self._dtype, self._num_documents, self._num_documents) as idx:
            self._lengths.seek(0)
            for first in progress(range(0, self._num_documents, LENGTHS_AT_ONCE), None, "joining lengths"):
                lengths = np.fromfile(self._lengths, np.int32, min(LENGTHS_AT_ONCE, self._num_documents - first))
                idx.add_sequences(lengths)
                idx.add_documents(np.ones(len(lengths), np.int32))
            idx.finish()

    @property
    def _num_bytes(self) -> int:
        return self._num_tokens * self._dtype.itemsize

    def _add(self, num_documents: int, num_tokens: int) -> None:
        self._num_documents += num_documents
        self._num_tokens += num_tokens

    def _cannot_write(self, error: OSError) -> IndexedDatasetError:
        return IndexedDatasetError(f"{bin_path(self._prefix)}: cannot be written: {error.strerror}")


def _open_to_go_on(path: str) -> BinaryIO:
    try:
        return open(path, "r+b", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_CREAT, 0o666))
    except OSError as error:
        raise IndexedDatasetError(f"{path}: cannot be written: {error.strerror}") from None


def _write_all(file: BinaryIO, values: np.ndarray) -> None:
    """Write to an unbuffered file, which may take a part of it: what fits a disk that becomes full."""
    left = memoryview(values).cast("B")
    while left:
        left = left[file.write(left) :]


def _size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size
