"""Check everything about the sequence indexes of a dataset: each byte of their files, and what they say."""

import json
import os
from typing import Any

import numpy as np

from ..errors import SequenceIndexError
from ..indexed_dataset.memory_maps import expect_next
from ..indexed_dataset.reader import IndexedDataset
from ..packing.census import LongDocuments, take_census
from ..progress import Progress, without_progress
from .builder import packed_lengths
from .coverage import check_coverage
from .fingerprints import idx_sha256
from .format import ARRAYS, canonical_json, metadata
from .key import damaged, index_directories
from .reader import SequenceIndex


def verify_all(
    prefix: str, cache_path: str | None = None, progress: Progress = without_progress
) -> list[SequenceIndex]:
    """Verify every index of a dataset, beside it and under ``cache_path``.

    Raises:
        SequenceIndexError: one is wrong, or there is none.
        IndexedDatasetError: the dataset is wrong.
    """
    dataset = IndexedDataset(prefix, needs_bin=False)
    dataset.check_pointers(progress)
    directories = index_directories(dataset, cache_path)
    paths = [
        os.path.join(directory, name)
        for directory in directories
        if os.path.isdir(directory)
        for name in sorted(os.listdir(directory))
        if not name.startswith(".")
    ]
    if not paths:
        raise SequenceIndexError(
            f"{directories[0]}: there is no sequence index; build one with megatron-bfp index {prefix}"
        )
    of_idx = idx_sha256(dataset, progress)
    return [verify(path, dataset, progress, of_idx) for path in paths]


def verify(
    path: str, dataset: IndexedDataset, progress: Progress = without_progress, of_idx: str | None = None
) -> SequenceIndex:
    """Check everything about an index: each byte of its files, and what it says against the .idx.

    All of index.json is computed anew from the .idx and the arrays and compared byte for byte. Then every remainder
    chunk must be in exactly one sequence and every sequence must fit. Memory is constant for an index of this version's
    plan.

    Args:
        of_idx: sha256 of the whole .idx, if it is known.

    Raises:
        SequenceIndexError, IndexedDatasetError: something is wrong.
    """
    index = SequenceIndex(path, dataset)
    lengths = packed_lengths(dataset, index.key)
    long_documents = _Compared(index)
    census = take_census(lengths, index.key.seq_length, progress, long_documents)
    of_idx = of_idx or idx_sha256(dataset, progress)
    try:
        expected = metadata(index.key, census, index.table.num_sequences, path, dataset, of_idx, progress)
        with open(os.path.join(path, "index.json"), "rb") as file:
            content = file.read()
        names = set(os.listdir(path))
    except OSError as error:
        raise SequenceIndexError(f"{error.filename or path}: cannot be read: {error.strerror}") from None
    if content != canonical_json(expected):
        wrong = _first_difference(expected, json.loads(content))
        raise damaged(path, dataset, f"index.json: {wrong} does not match the data")
    if names != {"index.json", *(f"{name}.npy" for name in ARRAYS)}:
        raise damaged(path, dataset, "there are files that do not belong to it")
    if long_documents.differ:
        raise damaged(path, dataset, "long_documents.npy does not match the lengths in the .idx")
    check_coverage(index, lengths, census, progress)
    return index


class _Compared(LongDocuments):
    """The long documents of a census compared with those of an index, which are never in memory at once."""

    def __init__(self, index: SequenceIndex) -> None:
        self._expected, self._first_document = index.table.long_documents, index.key.first_document
        self._num_rows = self._num_full_chunks = 0
        self._differs = False

    def add(self, rows: np.ndarray) -> None:
        end = self._num_rows + len(rows)
        rows[:, 0] += self._first_document
        rows[:, 1] = self._num_full_chunks + np.cumsum(rows[:, 1])
        self._differs |= not np.array_equal(expect_next(self._expected, self._num_rows, end), rows)
        self._num_rows, self._num_full_chunks = end, int(rows[-1, 1]) if len(rows) else self._num_full_chunks

    def table(self) -> np.ndarray:
        """Those of the index, counted in the dataset; see ``differ``."""
        return self._expected

    @property
    def differ(self) -> bool:
        """Whether the index has others than the census."""
        return self._differs or self._num_rows != len(self._expected)


def _first_difference(expected: Any, actual: Any, name: str = "") -> str:
    if isinstance(expected, dict) and isinstance(actual, dict):
        for entry in expected:
            if expected[entry] != actual.get(entry):
                return _first_difference(expected[entry], actual.get(entry), f"{name}.{entry}" if name else entry)
    return name or "its form"
