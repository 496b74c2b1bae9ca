"""A reader of .bin/.idx that opens in constant time.

A document is read as one range of tokens. Its length and its pointers state the same thing twice, and every read
compares the two, so that a damaged .idx gives an error and not other tokens.
"""

import os
import struct
from collections.abc import Iterator
from typing import BinaryIO, NoReturn

import numpy as np

from ..errors import IndexedDatasetError
from ..progress import Progress, without_progress
from .format import HEADER_BYTES, MAGIC, TOKEN_DTYPES, VERSION, bin_path, idx_path
from .memory_maps import ScatteredReads, expect_next, expect_scattered_reads, map_file, open_unmapped

CHECKED_AT_OPEN = 1 << 15
"""Pointers at each end of the .idx that are checked at open; the rest by ``check_pointers`` and at each read."""

CHECKED_AT_ONCE = 1 << 20
"""Pointers in one step of a full check."""


class IndexedDataset:
    """Read access to a .bin/.idx pair.

    Opening costs the same for ten documents and for ten billion. Instances are pickled as their path and reopened, so
    they are cheap to hand to DataLoader workers.

    Args:
        prefix: path of the two files without ".bin" and ".idx".
        mmap: map the .bin into memory; otherwise every read is a system call, which suits some network file systems.
        needs_bin: if off, the .bin may be missing, and only lengths can be read. If it exists, its size is checked all
            the same.

    Attributes:
        dtype: numpy dtype of a token.
        has_modes: whether the .idx has a mode for each sequence, as multimodal datasets have; nothing here reads it.
        num_sequences, num_documents: counts in the .idx format's sense.
        num_tokens: tokens in the .bin.
        sequence_lengths: int32 [sequences], tokens.
        sequence_pointers: int64 [sequences], bytes.
        document_indices: int64 [documents + 1], the first sequence of each document.
        idx_content: uint8 [bytes], the whole .idx as it was when it was opened.
        is_checked_and_one_each: whether ``check_pointers`` has found every document to be one sequence.

    Raises:
        IndexedDatasetError: a file is missing, is not of this format, does not match the other, or has impossible
            pointers.
    """

    def __init__(self, prefix: str, mmap: bool = True, needs_bin: bool = True) -> None:
        self.prefix, self.mmap, self.needs_bin = str(prefix), bool(mmap), bool(needs_bin)
        self.is_checked_and_one_each = False
        for path in [idx_path(self.prefix)] + [bin_path(self.prefix)] * self.needs_bin:
            if not os.path.isfile(path):
                raise IndexedDatasetError(f"{path}: no such file; give the path without .bin or .idx")
        try:
            self._read_idx()
            self._open_bin()
        except OSError as error:
            raise IndexedDatasetError(f"{error.filename or self.prefix}: cannot be read: {error.strerror}") from None
        self._check_size()
        for first in {0, max(0, self.num_sequences - CHECKED_AT_OPEN)}:
            self._check_sequences(first, min(first + CHECKED_AT_OPEN, self.num_sequences))
        for first in {0, max(0, self.num_documents - CHECKED_AT_OPEN)}:
            self._check_documents(first, min(first + CHECKED_AT_OPEN, self.num_documents))

    def __reduce__(self) -> tuple:
        return type(self), (self.prefix, self.mmap, self.needs_bin)

    def __repr__(self) -> str:
        return f"IndexedDataset({self.prefix!r}: {self.num_documents} documents, {self.num_tokens} tokens)"

    @property
    def document_lengths(self) -> "DocumentLengths":
        """Tokens of each document, as something that slices like an array."""
        return DocumentLengths(self)

    def spans(self, documents: np.ndarray, sequences: np.ndarray | None = None) -> list[tuple[int, int]]:
        """Where documents are in the .bin.

        Args:
            documents: int64 [k] document ids.
            sequences: int64 [k], the idx sequence of each document, if each is known to be one sequence. That saves a
                look-up, a third of the reads.

        Returns:
            The first token and the end of each, counted in tokens from the start of the .bin.

        Raises:
            IndexError: no such document.
            IndexedDatasetError: the .idx contradicts itself there.
        """
        itemsize = self.dtype.itemsize
        reads = self._reads_of_documents if sequences is None else self._reads_of_sequences
        reads.begin(documents if sequences is None else sequences)
        try:  # one sequence a document, its length and the next pointer in accord: few operations, this is a hot path
            if sequences is None:
                sequences, next_sequences = self.document_indices[documents], self.document_indices[documents + 1]
            else:
                next_sequences = sequences + 1
            starts = self.sequence_pointers[sequences].tolist()
            lengths = self.sequence_lengths[sequences].tolist()
            ends = self.sequence_pointers[next_sequences].tolist()
        except IndexError:  # also where the last document is among them: no pointer follows it
            return self._checked_spans(documents)
        reads.end(len(documents))
        spans = []
        for document, sequence, start, length, end in zip(
            documents.tolist(), sequences.tolist(), starts, lengths, ends, strict=True
        ):
            is_wrong = start + length * itemsize != end or start % itemsize
            if is_wrong or length < 0 or start < 0 or sequence < 0 or document < 0:
                return self._checked_spans(documents)
            spans.append((start // itemsize, end // itemsize))
        return spans

    def _checked_spans(self, documents: np.ndarray) -> list[tuple[int, int]]:
        """``spans`` for documents of any number of sequences."""
        if np.any((documents < 0) | (documents >= self.num_documents)):
            raise IndexError(f"{self.prefix}: documents {documents.tolist()} are not all in [0, {self.num_documents})")
        firsts, ends = self.document_indices[documents], self.document_indices[documents + 1]
        wrong = (firsts < 0) | (firsts > ends) | (ends > self.num_sequences)
        if wrong.any():
            self._refuse(f"first sequence of document {documents[np.argmax(wrong)]}")
        for first, end in zip(firsts.tolist(), ends.tolist()):
            self._check_sequences(first, end)
        itemsize = self.dtype.itemsize
        pointers = (self._pointer(firsts) // itemsize).tolist(), (self._pointer(ends) // itemsize).tolist()
        return list(zip(*pointers, strict=True))

    def tokens(self, start: int, count: int) -> np.ndarray:
        """``count`` tokens from position ``start`` of the .bin, as ``dtype`` [count]; read-only where it is mapped.

        Raises:
            IndexedDatasetError: the .bin ends before them, or the dataset was opened without it.
        """
        if self._tokens is not None:
            tokens = self._tokens[start : start + count]
        elif self._file is None:
            raise IndexedDatasetError(f"{bin_path(self.prefix)}: tokens are wanted, it was opened for lengths alone")
        else:
            tokens = self._read(self._file, start, count)
        if len(tokens) != count:
            raise IndexedDatasetError(
                f"{bin_path(self.prefix)}: tokens {start} to {start + count} are wanted, {len(tokens)} of them exist"
            )
        return tokens

    def view(self, start: int, count: int) -> memoryview:
        """As ``tokens``, as a memoryview: its slices are taken and copied in half the time of an array's.

        Raises:
            IndexedDatasetError: as ``tokens``.
        """
        if self._view is None:
            return self.tokens(start, count).data
        view = self._view[start : start + count]
        return view if len(view) == count else self.tokens(start, count).data

    def document(self, document: int) -> np.ndarray:
        """All tokens of a document, ``dtype`` [length]."""
        ((start, end),) = self.spans(np.array([document]))
        return self.tokens(start, end - start)

    def check_pointers(self, progress: Progress = without_progress) -> None:
        """Check every length and pointer of the .idx, in one pass.

        Raises:
            IndexedDatasetError: one is impossible.
        """
        for _ in progress(self.checked_lengths(), -(-self.num_sequences // CHECKED_AT_ONCE), "checking pointers"):
            pass
        num_blocks, is_one_each = -(-self.num_documents // CHECKED_AT_ONCE), True
        for numbers in progress(self.checked_documents(), num_blocks, "checking documents"):
            is_one_each &= bool(np.all(numbers == 1))
        self.is_checked_and_one_each = is_one_each

    def checked_lengths(self) -> Iterator[np.ndarray]:
        """The lengths of all sequences in blocks, each checked against its pointers, in one pass.

        Yields:
            int32 [at most ``CHECKED_AT_ONCE``], tokens; read-only.

        Raises:
            IndexedDatasetError: a length or pointer of the block is impossible.
        """
        for first in range(0, self.num_sequences, CHECKED_AT_ONCE):
            end = min(first + CHECKED_AT_ONCE, self.num_sequences)
            expect_next(self.sequence_pointers, first, end)
            lengths = expect_next(self.sequence_lengths, first, end)
            self._check_sequences(first, end)
            yield lengths

    def checked_documents(self) -> Iterator[np.ndarray]:
        """The number of sequences of each document in blocks, checked, in one pass.

        Yields:
            int64 [at most ``CHECKED_AT_ONCE``].

        Raises:
            IndexedDatasetError: the first sequence of a document of the block is impossible.
        """
        for first in range(0, self.num_documents, CHECKED_AT_ONCE):
            end = min(first + CHECKED_AT_ONCE, self.num_documents)
            expect_next(self.document_indices, first, end)
            self._check_documents(first, end)
            yield np.diff(self.document_indices[first : end + 1])

    def _read_idx(self) -> None:
        path = idx_path(self.prefix)
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            header = file.read(HEADER_BYTES)
        if len(header) < HEADER_BYTES or not header.startswith(MAGIC):
            raise IndexedDatasetError(f"{path}: not a Megatron .idx file (no MMIDIDX header)")
        version, code, self.num_sequences, num_indices = struct.unpack("<QBQQ", header[len(MAGIC) :])
        if version != VERSION or code not in TOKEN_DTYPES or num_indices < 1:
            raise IndexedDatasetError(f"{path}: version {version}, dtype code {code}: not a dataset of tokens")
        self.dtype: np.dtype = np.dtype(TOKEN_DTYPES[code])
        self.num_documents = num_indices - 1
        expected = HEADER_BYTES + self.num_sequences * 12 + num_indices * 8
        if size not in (expected, expected + self.num_sequences):  # multimodal datasets add a byte per sequence
            raise IndexedDatasetError(
                f"{path}: has {size} bytes, its header promises {expected}; it is damaged or was cut while copying"
            )
        self.has_modes = size != expected
        self.idx_content = content = map_file(path)
        expect_scattered_reads(content)
        pointers_at = HEADER_BYTES + self.num_sequences * 4
        self.sequence_lengths = np.frombuffer(content, np.int32, self.num_sequences, HEADER_BYTES)
        self.sequence_pointers = np.frombuffer(content, np.int64, self.num_sequences, pointers_at)
        self.document_indices = np.frombuffer(content, np.int64, num_indices, pointers_at + self.num_sequences * 8)
        self._reads_of_sequences = ScatteredReads(self.sequence_pointers, self.sequence_lengths)
        self._reads_of_documents = ScatteredReads(self.document_indices, self.sequence_pointers, self.sequence_lengths)

    def _open_bin(self) -> None:
        path = bin_path(self.prefix)
        self._file: BinaryIO | None = None
        self._tokens: np.ndarray | None = None
        self._view: memoryview | None = None
        self._bin_bytes = self._described_bytes()
        if self.needs_bin or os.path.exists(path):
            self._bin_bytes = os.path.getsize(path)
        self.num_tokens = self._bin_bytes // self.dtype.itemsize
        if not self.needs_bin:
            return
        if not self.mmap:
            self._file = open_unmapped(path)
        elif self._bin_bytes == 0:
            self._tokens = np.empty(0, self.dtype)
        else:
            self._tokens = np.frombuffer(map_file(path), self.dtype, self.num_tokens)
            self._view = self._tokens.data

    def _described_bytes(self) -> int:
        """Size of the .bin according to the .idx."""
        if not self.num_sequences:
            return 0
        return int(self.sequence_pointers[-1]) + int(self.sequence_lengths[-1]) * self.dtype.itemsize

    def _check_size(self) -> None:
        if self._bin_bytes != self._described_bytes():
            raise IndexedDatasetError(
                f"{bin_path(self.prefix)}: has {self._bin_bytes} bytes, {idx_path(self.prefix)} describes "
                f"{self._described_bytes()}; one of them is incomplete or belongs to another dataset"
            )
        if self.document_indices[0] != 0 or self.document_indices[-1] != self.num_sequences:
            raise IndexedDatasetError(
                f"{idx_path(self.prefix)}: its documents cover sequences {self.document_indices[0]} to "
                f"{self.document_indices[-1]} of {self.num_sequences}; write the dataset again (was finalize called?)"
            )

    def _check_sequences(self, first: int, end: int) -> None:
        lengths = self.sequence_lengths[first:end]
        starts, ends = self.sequence_pointers[first:end], self.sequence_pointers[first + 1 : end + 1]
        if len(ends) < len(starts):
            ends = np.append(ends, self._bin_bytes)
        itemsize = self.dtype.itemsize
        wrong = (lengths < 0) | (starts < 0) | (starts + lengths.astype(np.int64) * itemsize != ends)
        if len(starts):  # the others follow from it and the lengths
            wrong[0] |= starts[0] != 0 if first == 0 else starts[0] % itemsize != 0
        if wrong.any():
            self._refuse(f"length or pointer of sequence {first + int(np.argmax(wrong))}")

    def _check_documents(self, first: int, end: int) -> None:
        indices = self.document_indices[first : end + 1]
        wrong = (indices < 0) | (indices > self.num_sequences)
        wrong[1:] |= np.diff(indices) < 0
        if wrong.any():
            self._refuse(f"first sequence of document {first + int(np.argmax(wrong))}")

    def _refuse(self, what: str) -> NoReturn:
        raise IndexedDatasetError(
            f"{idx_path(self.prefix)}: impossible {what}; the file is damaged, write the dataset again"
        )

    def _pointer(self, sequences: np.ndarray) -> np.ndarray:
        """int64 [k]: where sequences start in the .bin, in bytes; its end for the one after the last."""
        pointers = np.full(len(sequences), self._bin_bytes, dtype=np.int64)
        is_inside = sequences < self.num_sequences
        pointers[is_inside] = self.sequence_pointers[sequences[is_inside]]  # take would copy the unaligned array
        return pointers

    def _read(self, file: BinaryIO, start: int, count: int) -> np.ndarray:
        """Read without a memory map. A read may return less than asked for, so go on until the file ends."""
        itemsize = self.dtype.itemsize
        pieces, offset, left = [], start * itemsize, count * itemsize
        while left:
            piece = os.pread(file.fileno(), left, offset)
            if not piece:
                break
            pieces.append(piece)
            offset, left = offset + len(piece), left - len(piece)
        return np.frombuffer(b"".join(pieces), dtype=np.uint8)[: (count * itemsize - left) // itemsize * itemsize].view(
            self.dtype
        )


class DocumentLengths:
    """Tokens of each document of an ``IndexedDataset``, read from the mapped .idx when sliced; never held in memory.

    A slice is an integer array. It checks what it covers, and a second pass over documents of one sequence each, as
    most are, does not check again: it reads four bytes per document instead of twenty.
    """

    def __init__(self, dataset: IndexedDataset, first: int = 0, end: int | None = None) -> None:
        self.dataset, self.first = dataset, first
        self.end = dataset.num_documents if end is None else end
        self._num_checked = 0  # documents at the start that are known to have one sequence each
        if dataset.is_checked_and_one_each:
            self._num_checked = len(self)

    def __len__(self) -> int:
        return self.end - self.first

    def range(self, first: int, end: int) -> "DocumentLengths":
        """The lengths of documents ``first`` to ``end`` (exclusive), counted from the first of these."""
        return DocumentLengths(self.dataset, self.first + first, self.first + end)

    def __getitem__(self, documents: slice) -> np.ndarray:
        dataset = self.dataset
        first, end, _ = documents.indices(len(self))
        if first >= end:
            return np.empty(0, dtype=np.int32)
        if end <= self._num_checked:
            low = int(dataset.document_indices[self.first]) + first
            return expect_next(dataset.sequence_lengths, low, low + end - first)
        indices = expect_next(dataset.document_indices, self.first + first, self.first + end + 1)
        low, high = int(indices[0]), int(indices[-1])
        dataset._check_documents(self.first + first, self.first + end)
        expect_next(dataset.sequence_pointers, low, high)
        dataset._check_sequences(low, high)
        lengths = expect_next(dataset.sequence_lengths, low, high)
        if np.all(np.diff(indices) == 1):
            if first <= self._num_checked:
                self._num_checked = end
            return lengths
        cumulative = np.cumsum(lengths, dtype=np.int64)
        return np.diff(np.concatenate([[0], cumulative])[indices - low])
