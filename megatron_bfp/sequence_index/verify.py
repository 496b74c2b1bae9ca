"""Check everything about the sequence indexes of a dataset: each byte of their files, and what they say."""

import json
import os
from typing import Any, NoReturn

import numpy as np

from ..errors import SequenceIndexError
from ..indexed_dataset.memory_maps import expect_next
from ..indexed_dataset.reader import IndexedDataset
from ..packing.census import BLOCK, Census, take_census
from ..progress import Progress, without_progress
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
    return [verify(path, dataset, progress) for path in paths]


def verify(path: str, dataset: IndexedDataset, progress: Progress = without_progress) -> SequenceIndex:
    """Check everything about an index: each byte of its files, and what it says against the .idx.

    All of index.json is computed anew from the .idx and the arrays and compared byte for byte. Then every remainder
    chunk must be in exactly one sequence and every sequence must fit.

    Raises:
        SequenceIndexError, IndexedDatasetError: something is wrong.
    """
    index = SequenceIndex(path, dataset)
    lengths = dataset.document_lengths.range(index.key.first_document, index.key.end_document)
    census = take_census(lengths, index.key.seq_length, progress)
    try:
        expected = metadata(index.key, census, index.table.num_sequences, path, dataset, progress)
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
    _check_coverage(index, lengths, census, progress)
    return index


def _check_coverage(index: SequenceIndex, lengths: Any, census: Census, progress: Progress) -> None:
    """Every full chunk is listed, every remainder chunk is in exactly one sequence, and every sequence fits."""
    key, table = index.key, index.table

    def refuse(reason: str) -> NoReturn:
        raise damaged(index.path, index.dataset, reason)

    if not np.array_equal(table.long_documents, census.long_documents + np.array([key.first_document, 0])):
        refuse("long_documents.npy does not match the lengths in the .idx")
    if len(table.document_ids) != census.num_remainders:
        refuse("document_ids.npy does not name every document once")
    if key.max_documents_per_sequence and np.any(table.runs[:, 2] > key.max_documents_per_sequence):
        refuse("a sequence has more documents than max_documents_per_sequence")
    remainders = np.empty(len(lengths), dtype=np.uint32)
    for first in progress(range(0, len(lengths), BLOCK), -(-len(lengths) // BLOCK), "reading lengths"):
        remainders[first : first + BLOCK] = lengths[first : first + BLOCK] % key.seq_length
    firsts = np.append(table.runs[:, 0], table.num_sequences)
    for (_, entry, chunks, work), count in progress(
        zip(table.runs.tolist(), np.diff(firsts).tolist()), len(table.runs), "checking sequences"
    ):
        step = max(1, BLOCK // chunks)
        for first in range(0, count, step):
            rows = expect_next(table.document_ids, entry + first * chunks, entry + min(first + step, count) * chunks)
            documents = rows.astype(np.int64) - key.first_document
            if documents.min() < 0 or documents.max() >= len(lengths):
                refuse("document_ids.npy names documents outside the range")
            num_tokens = remainders[documents].astype(np.int64)
            remainders[documents] = 0  # so that a second mention of a document has no tokens left
            if num_tokens.min() < 1 or len(np.unique(documents)) != len(documents):
                refuse("document_ids.npy does not name every document once")
            if num_tokens.reshape(-1, chunks).sum(axis=1).max() > key.seq_length:
                refuse("document_ids.npy has a sequence that does not fit")
            if np.any((num_tokens**2).reshape(-1, chunks).sum(axis=1) != work):
                refuse("the work in runs.npy is not that of the sequences in document_ids.npy")


def _first_difference(expected: Any, actual: Any, name: str = "") -> str:
    if isinstance(expected, dict) and isinstance(actual, dict):
        for entry in expected:
            if expected[entry] != actual.get(entry):
                return _first_difference(expected[entry], actual.get(entry), f"{name}.{entry}" if name else entry)
    return name or "its form"
