"""Write .bin/.idx, byte for byte as megatron-core's ``IndexedDatasetBuilder`` does; ``format`` has the byte table.

``IdxWriter`` writes every .idx: for ``IndexedDatasetWriter``, for merging and for preprocessing, which joins its tasks.
``DatasetFiles`` and ``move_files`` publish a dataset: it can be opened when it is complete and on disk, and not before.
"""

import os
import struct
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

from ..errors import IndexedDatasetError, InputError
from ..files import open_exclusively, sync_file
from ..progress import Progress, without_progress
from .format import HEADER_BYTES, MAGIC, VERSION, bin_path, dtype_code, idx_path

WRITTEN_AT_ONCE = 1 << 16
"""Sequences or documents whose part of the .idx is computed at once when it is written."""


class DatasetFiles:
    """PREFIX.bin.part and PREFIX.idx.part, until they get their names, the .idx last: a dataset that can be opened is
    complete. Leaving the ``with`` block before that removes them; what a killed process left is overwritten by the
    next, and only one process at a time writes a dataset.

    Args:
        prefix: path of the two files without ".bin" and ".idx".

    Attributes:
        bin: the empty PREFIX.bin.part, open for writing and buffered.
        idx_part: path of the other, which is for the caller to write.

    Raises:
        IndexedDatasetError: another process is writing the same dataset, or a file cannot be written.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.idx_part, self._bin_part = idx_path(prefix) + ".part", bin_path(prefix) + ".part"
        try:
            self.bin = open(self._bin_part, "wb", 1 << 20, opener=lambda path, _: open_exclusively(path))
        except BlockingIOError:
            raise IndexedDatasetError(f"{prefix}: another process is writing this dataset") from None
        except OSError as error:
            raise IndexedDatasetError(f"{self._bin_part}: cannot be written: {error.strerror}") from None

    def __enter__(self) -> "DatasetFiles":
        return self

    def __exit__(self, *_: Any) -> None:
        if not self.bin.closed:
            self._remove()

    def publish(self) -> None:
        """Give both files their names, once their content is on disk. The .idx must be there already.

        Raises:
            IndexedDatasetError: the disk is full, or they cannot be renamed.
        """
        try:
            self.bin.flush()
            os.fsync(self.bin.fileno())
            move_files(self._bin_part, self.idx_part, self.prefix)
        except OSError as error:
            raise IndexedDatasetError(f"{self.prefix}: cannot be written: {error.strerror}") from None
        self.bin.close()

    def _remove(self) -> None:
        for path in (self._bin_part, self.idx_part):
            if os.path.exists(path):
                os.remove(path)
        _close(self.bin)


def move_files(bin_file: str, idx_file: str, prefix: str) -> None:
    """Give two files that are on disk the names of a dataset, the .idx last: what can be opened is complete.

    Raises:
        OSError: they cannot be renamed.
    """
    folder = os.path.dirname(os.path.abspath(prefix))
    if os.path.exists(idx_path(prefix)):
        os.remove(idx_path(prefix))
        sync_file(folder)  # so that a crash cannot leave the old .idx beside the new .bin
    os.replace(bin_file, bin_path(prefix))
    os.replace(idx_file, idx_path(prefix))
    sync_file(folder)


class IdxWriter:
    """Write an .idx block by block, in constant memory: its lengths, pointers and documents grow side by side, each
    from its own offset, which follows from their numbers.

    Args:
        path: file to write; an existing one is overwritten.
        dtype: of a token, one of ``TOKEN_DTYPES``.
        num_sequences, num_documents: how many will be added.

    Raises:
        IndexedDatasetError: the file cannot be written, which any method may find.
    """

    def __init__(self, path: str, dtype: np.dtype, num_sequences: int, num_documents: int) -> None:
        self.path, self._itemsize = path, dtype.itemsize
        self._missing_sequences, self._missing_documents = num_sequences, num_documents
        self._next_pointer = self._next_sequence = 0
        pointers_at = HEADER_BYTES + num_sequences * 4
        header = struct.pack("<QBQQ", VERSION, dtype_code(dtype), num_sequences, num_documents + 1)
        try:
            with open(path, "wb") as file:
                file.write(MAGIC + header)
            offsets = (HEADER_BYTES, pointers_at, pointers_at + num_sequences * 8)
            self._lengths, self._pointers, self._documents = (_open_at(path, offset) for offset in offsets)
        except OSError as error:
            raise self._cannot_write(error) from None
        self._write(self._documents, np.zeros(1, dtype=np.int64))

    def __enter__(self) -> "IdxWriter":
        return self

    def __exit__(self, *_: Any) -> None:
        for file in (self._lengths, self._pointers, self._documents):
            _close(file)

    def add_sequences(self, lengths: np.ndarray) -> None:
        """Append sequences.

        Args:
            lengths: int32 [sequences], tokens of each.
        """
        for block in _blocks(lengths):
            pointers = np.zeros(len(block) + 1, dtype=np.int64)
            np.cumsum(block, dtype=np.int64, out=pointers[1:])
            pointers *= self._itemsize
            pointers += self._next_pointer
            self._next_pointer = int(pointers[-1])
            self._write(self._lengths, block)
            self._write(self._pointers, pointers[:-1])
        self._missing_sequences -= len(lengths)

    def add_documents(self, sequences_per_document: np.ndarray) -> None:
        """Append documents.

        Args:
            sequences_per_document: integers [documents].
        """
        for block in _blocks(sequences_per_document):
            ends = np.cumsum(block, dtype=np.int64)
            ends += self._next_sequence
            self._next_sequence = int(ends[-1])
            self._write(self._documents, ends)
        self._missing_documents -= len(sequences_per_document)

    def finish(self) -> None:
        """Force everything to disk.

        Raises:
            IndexedDatasetError: other numbers of sequences and documents were added than announced.
        """
        if self._missing_sequences or self._missing_documents:
            raise IndexedDatasetError(f"{self.path}: not as many sequences and documents as announced; write it again")
        try:
            for file in (self._lengths, self._pointers, self._documents):
                file.close()
            sync_file(self.path)
        except OSError as error:
            raise self._cannot_write(error) from None

    def _write(self, file: BinaryIO, block: np.ndarray) -> None:
        try:
            file.write(block.data)
        except OSError as error:
            raise self._cannot_write(error) from None

    def _cannot_write(self, error: OSError) -> IndexedDatasetError:
        return IndexedDatasetError(f"{self.path}: cannot be written: {error.strerror}")


class IndexedDatasetWriter:
    """Write a .bin/.idx pair from blocks of tokens.

    Lengths are kept as numpy arrays (4 bytes per sequence); the rest of the .idx is computed from them, block by block,
    while it is written at the end. The two files get their names in ``finalize``. Leaving the ``with`` block without it
    removes what was written.

    Args:
        prefix: path of the two files without ".bin" and ".idx".
        dtype: a dtype of ``TOKEN_DTYPES``.

    Raises:
        IndexedDatasetError: another process is writing the same dataset, or a file cannot be written.
    """

    def __init__(self, prefix: str, dtype: Any) -> None:
        self.prefix, self.dtype = str(prefix), np.dtype(dtype)
        dtype_code(self.dtype)
        self._lengths: list[np.ndarray] = []
        self._sequences_per_document: list[np.ndarray] = []
        self._files = DatasetFiles(self.prefix)
        self._bin = self._files.bin

    def __enter__(self) -> "IndexedDatasetWriter":
        return self

    def __exit__(self, *exception: Any) -> None:
        self._files.__exit__(*exception)

    def add(self, tokens: np.ndarray, lengths: np.ndarray, sequences_per_document: np.ndarray | None = None) -> None:
        """Append documents.

        Args:
            tokens: integers [sum of lengths], all documents one after another.
            lengths: integers [sequences], tokens of each.
            sequences_per_document: integers [documents]; None for one sequence per document.

        Raises:
            InputError: a token does not fit the dtype, a sequence has 2**31 tokens or more, or the sums do not match.
            IndexedDatasetError: the disk is full.
        """
        tokens, lengths = np.asarray(tokens), _counts(self.prefix, "lengths", lengths)
        if sequences_per_document is None:
            sequences_per_document = _ones(len(lengths))
        else:
            sequences_per_document = _counts(self.prefix, "sequences_per_document", sequences_per_document)
            if np.all(sequences_per_document == 1):
                sequences_per_document = _ones(len(sequences_per_document))
        if lengths.sum() != len(tokens):
            raise InputError(f"{self.prefix}: lengths add up to {lengths.sum()}, there are {len(tokens)} tokens")
        if sequences_per_document.sum() != len(lengths):
            raise InputError(
                f"{self.prefix}: documents add up to {sequences_per_document.sum()} sequences, there are {len(lengths)}"
            )
        if tokens.dtype != self.dtype and len(tokens):
            limits = np.iinfo(self.dtype)
            if tokens.dtype.kind not in "iu" or tokens.min() < limits.min or tokens.max() > limits.max:
                raise InputError(f"{self.prefix}: a token does not fit {self.dtype}; is the vocabulary size right?")
        try:
            self._bin.write(np.ascontiguousarray(tokens, dtype=self.dtype).data)
        except OSError as error:
            raise IndexedDatasetError(f"{self.prefix}.bin.part: cannot be written: {error.strerror}") from None
        self._lengths.append(lengths)
        self._sequences_per_document.append(sequences_per_document)

    def finalize(self, progress: Progress = without_progress) -> None:
        """Write the .idx and give both files their names. The instance cannot be used afterwards.

        Raises:
            IndexedDatasetError: they cannot be written.
        """
        num_sequences, num_documents = (sum(map(len, x)) for x in (self._lengths, self._sequences_per_document))
        with IdxWriter(self._files.idx_part, self.dtype, num_sequences, num_documents) as idx:
            for lengths in progress(self._lengths, len(self._lengths), "writing lengths"):
                idx.add_sequences(lengths)
            counts = self._sequences_per_document
            for sequences_per_document in progress(counts, len(counts), "writing documents"):
                idx.add_documents(sequences_per_document)
            idx.finish()
        self._files.publish()


def _ones(number: int) -> np.ndarray:
    """int32 [number], all 1, in the memory of one: a sequence for each document, as in most datasets."""
    return np.broadcast_to(np.int32(1), number)


def _blocks(values: np.ndarray) -> Iterator[np.ndarray]:
    for first in range(0, len(values), WRITTEN_AT_ONCE):
        yield values[first : first + WRITTEN_AT_ONCE]


def _open_at(path: str, offset: int) -> BinaryIO:
    """Open an existing file for writing from an offset on, buffered."""
    file = open(path, "r+b", buffering=1 << 20)
    file.seek(offset)
    return file


def _close(file: BinaryIO) -> None:
    """Close a file that is not wanted."""
    try:
        file.close()
    except OSError:
        pass  # what was still buffered does not fit the disk, and is not wanted


def _counts(prefix: str, name: str, values: Any) -> np.ndarray:
    """``values`` as int32 [n], if they are integers from 0 to 2**31 - 1, the limit of the .idx format."""
    values = np.asarray(values)
    if values.size == 0:
        return np.empty(0, dtype=np.int32)
    if values.ndim != 1 or values.dtype.kind not in "iu" or values.min() < 0 or values.max() >= 1 << 31:
        raise InputError(f"{prefix}: {name} must be integers from 0 to 2**31 - 1 in one dimension, the .idx's limits")
    return values.astype(np.int32)
