"""Megatron's indexed datasets, PREFIX.bin and PREFIX.idx: a reader that opens in constant time and a bulk writer.

The format is megatron-core's (``megatron/core/datasets/indexed_dataset.py``): the .bin holds all tokens one after
another, the .idx a header, the length of each sequence (int32, tokens), its pointer into the .bin (int64, bytes) and,
for each document, the number of its first sequence (int64, with one entry more at the end). Most datasets have one
sequence a document, but a document may have several. Files written here are byte for byte those of
``IndexedDatasetBuilder``.

A document is read as one range of tokens. Its length and its pointers state the same thing twice, and every read
compares the two, so that a damaged .idx gives an error and not other tokens.
"""

import os
import struct
from typing import Any, NoReturn

import numpy as np

from .errors import IndexedDatasetError, InputError
from .files import open_exclusively, sync_file
from .memory_maps import expect_next, expect_scattered_reads, map_file
from .progress import Progress, without_progress

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER_BYTES = len(MAGIC) + 8 + 1 + 8 + 8
TOKEN_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
"""Megatron's dtype codes that can hold tokens; its codes 6 and 7 are floating point."""
CHECKED_AT_OPEN = 1 << 15
"""Pointers at each end of the .idx that are checked at open; the rest by ``check_pointers`` and at each read."""
CHECKED_AT_ONCE = 1 << 20
"""Pointers in one step of a full check."""


def bin_path(prefix: str) -> str:
    """The file of a dataset's tokens."""
    return prefix + ".bin"


def idx_path(prefix: str) -> str:
    """The file of a dataset's lengths, pointers and documents."""
    return prefix + ".idx"


def optimal_dtype(vocab_size: int) -> type:
    """The token dtype Megatron chooses for a vocabulary: uint16 below 65,500 tokens, else int32."""
    return np.uint16 if vocab_size < 65500 else np.int32


class IndexedDataset:
    """Read access to a .bin/.idx pair.

    Opening costs the same for ten documents and for ten billion. Instances are pickled as their path and reopened, so
    they are cheap to hand to DataLoader workers.

    Args:
        prefix: path of the two files without ".bin" and ".idx".
        mmap: map the .bin into memory; otherwise every read is a system call, which suits some network file systems.
        needs_bin: without it the .bin may be missing: lengths can be read then, tokens not. Where it is there, its size
            is checked nevertheless.

    Attributes:
        dtype: numpy dtype of a token.
        num_sequences, num_documents: counts in the .idx format's sense.
        num_tokens: tokens in the .bin.
        sequence_lengths: int32 [sequences], tokens.
        sequence_pointers: int64 [sequences], bytes.
        document_indices: int64 [documents + 1], the first sequence of each document.
        idx_content: uint8 [bytes], the whole .idx as it was when it was opened.

    Raises:
        IndexedDatasetError: a file is missing, is not of this format, does not match the other, or has impossible
            pointers.
    """

    def __init__(self, prefix: str, mmap: bool = True, needs_bin: bool = True) -> None:
        self.prefix, self.mmap, self.needs_bin = str(prefix), bool(mmap), bool(needs_bin)
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

    def spans(self, documents: np.ndarray) -> list[tuple[int, int]]:
        """Where documents lie in the .bin.

        Args:
            documents: int64 [k] document ids.

        Returns:
            The first token and the end of each, counted in tokens from the start of the .bin.

        Raises:
            IndexError: no such document.
            IndexedDatasetError: the .idx contradicts itself there.
        """
        itemsize = self.dtype.itemsize
        try:  # one sequence a document, its length and the next pointer in accord: few operations, this is a hot path
            sequences = self.document_indices[documents]
            starts = self.sequence_pointers[sequences].tolist()
            lengths = self.sequence_lengths[sequences].tolist()
            ends = self.sequence_pointers[self.document_indices[documents + 1]].tolist()
        except IndexError:  # also where the last document is among them: no pointer follows it
            return self._checked_spans(documents)
        spans = []
        for document, sequence, start, length, end in zip(
            documents.tolist(), sequences.tolist(), starts, lengths, ends, strict=True
        ):
            if start + length * itemsize != end or length < 0 or start < 0 or sequence < 0 or document < 0:
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
            found = self._tokens[start : start + count]
        elif not self.needs_bin:
            raise IndexedDatasetError(f"{bin_path(self.prefix)}: tokens are wanted, it was opened for lengths alone")
        else:
            found = self._read(start, count)
        if len(found) != count:
            raise IndexedDatasetError(
                f"{bin_path(self.prefix)}: tokens {start} to {start + count} are wanted, {len(found)} of them are there"
            )
        return found

    def document(self, document: int) -> np.ndarray:
        """All tokens of a document, ``dtype`` [length]."""
        ((start, end),) = self.spans(np.array([document]))
        return self.tokens(start, end - start)

    def check_pointers(self, progress: Progress = without_progress) -> None:
        """Check every length and pointer of the .idx, in one pass.

        Raises:
            IndexedDatasetError: one is impossible.
        """
        step = CHECKED_AT_ONCE
        for first in progress(range(0, self.num_sequences, step), -(-self.num_sequences // step), "checking pointers"):
            end = min(first + step, self.num_sequences)
            expect_next(self.sequence_lengths, first, end)
            expect_next(self.sequence_pointers, first, end)
            self._check_sequences(first, end)
        for first in progress(range(0, self.num_documents, step), -(-self.num_documents // step), "checking documents"):
            end = min(first + step, self.num_documents)
            expect_next(self.document_indices, first, end)
            self._check_documents(first, end)

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
        self.dtype = np.dtype(TOKEN_DTYPES[code])
        self.num_documents = num_indices - 1
        expected = HEADER_BYTES + self.num_sequences * 12 + num_indices * 8
        if size not in (expected, expected + self.num_sequences):  # multimodal datasets add a byte a sequence
            raise IndexedDatasetError(
                f"{path}: has {size} bytes, its header promises {expected}; it is damaged or was cut while copying"
            )
        self.idx_content = content = map_file(path)
        expect_scattered_reads(content)
        pointers_at = HEADER_BYTES + self.num_sequences * 4
        self.sequence_lengths = np.frombuffer(content, np.int32, self.num_sequences, HEADER_BYTES)
        self.sequence_pointers = np.frombuffer(content, np.int64, self.num_sequences, pointers_at)
        self.document_indices = np.frombuffer(content, np.int64, num_indices, pointers_at + self.num_sequences * 8)

    def _open_bin(self) -> None:
        path = bin_path(self.prefix)
        self._file = self._tokens = None
        self._bin_bytes = self._described_bytes()
        if self.needs_bin or os.path.exists(path):
            self._bin_bytes = os.path.getsize(path)
        self.num_tokens = self._bin_bytes // self.dtype.itemsize
        if not self.needs_bin:
            return
        if not self.mmap:
            self._file = open(path, "rb", buffering=0)
        elif self._bin_bytes == 0:
            self._tokens = np.empty(0, self.dtype)
        else:
            self._tokens = np.frombuffer(map_file(path), self.dtype, self.num_tokens)

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
        wrong = (lengths < 0) | (starts < 0) | (starts + lengths.astype(np.int64) * self.dtype.itemsize != ends)
        if first == 0 and end:
            wrong[0] |= starts[0] != 0
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

    def _read(self, start: int, count: int) -> np.ndarray:
        """Read without a memory map. A read may return less than asked for, so go on until the file ends."""
        itemsize = self.dtype.itemsize
        pieces, offset, left = [], start * itemsize, count * itemsize
        while left:
            piece = os.pread(self._file.fileno(), left, offset)
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
    most are, does not check again: it reads four bytes a document instead of twenty.
    """

    def __init__(self, dataset: IndexedDataset, first: int = 0, end: int | None = None) -> None:
        self.dataset, self.first = dataset, first
        self.end = dataset.num_documents if end is None else end
        self._num_checked = 0  # documents at the start that are known to have one sequence each

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


class IndexedDatasetWriter:
    """Write a .bin/.idx pair from blocks of tokens.

    Lengths are kept as numpy arrays (4 bytes a sequence) and pointers are computed from them at the end. Tokens go to
    PREFIX.bin.part; the two files get their names in ``finalize``, the .idx last, so a dataset that can be opened is
    complete. Leaving the ``with`` block without it removes what was written; what a killed process left is overwritten
    by the next.

    Args:
        prefix: path of the two files without ".bin" and ".idx".
        dtype: a dtype of ``TOKEN_DTYPES``.

    Raises:
        IndexedDatasetError: another process is writing the same dataset, or the place cannot be written.
    """

    def __init__(self, prefix: str, dtype: Any) -> None:
        self.prefix, self.dtype = str(prefix), np.dtype(dtype)
        codes = {np.dtype(known): code for code, known in TOKEN_DTYPES.items()}
        if self.dtype not in codes:
            raise IndexedDatasetError(f"{self.dtype} cannot hold tokens; use uint16 or int32")
        self._code = codes[self.dtype]
        self._lengths: list[np.ndarray] = []
        self._sequences_per_document: list[np.ndarray] = []
        try:
            self._bin = os.fdopen(open_exclusively(bin_path(self.prefix) + ".part"), "wb", buffering=1 << 20)
        except BlockingIOError:
            raise IndexedDatasetError(f"{self.prefix}: another process is writing this dataset") from None
        except OSError as error:
            raise IndexedDatasetError(f"{self.prefix}.bin.part: cannot be written: {error.strerror}") from None

    def __enter__(self) -> "IndexedDatasetWriter":
        return self

    def __exit__(self, *_: Any) -> None:
        if not self._bin.closed:
            self._abort()

    def add(self, tokens: np.ndarray, lengths: np.ndarray, sequences_per_document: np.ndarray | None = None) -> None:
        """Append documents.

        Args:
            tokens: integers [sum of lengths], all documents one after another.
            lengths: integers [sequences], tokens of each.
            sequences_per_document: integers [documents]; None for one sequence a document.

        Raises:
            InputError: a token does not fit the dtype, a sequence has 2**31 tokens or more, or the sums do not match.
            IndexedDatasetError: the disk is full.
        """
        tokens, lengths = np.asarray(tokens), _counts(self.prefix, "lengths", lengths)
        if sequences_per_document is None:
            sequences_per_document = np.ones(len(lengths), dtype=np.int32)
        sequences_per_document = _counts(self.prefix, "sequences_per_document", sequences_per_document)
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

    def finalize(self) -> None:
        """Write the .idx and give both files their names. The instance cannot be used afterwards.

        Raises:
            IndexedDatasetError: they cannot be written.
        """
        lengths = np.concatenate(self._lengths or [np.empty(0, np.int32)])
        per_document = np.concatenate(self._sequences_per_document or [np.empty(0, np.int32)])
        pointers = np.zeros(len(lengths), dtype=np.int64)
        np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
        pointers *= self.dtype.itemsize
        indices = np.zeros(len(per_document) + 1, dtype=np.int64)
        np.cumsum(per_document, dtype=np.int64, out=indices[1:])
        header = MAGIC + struct.pack("<QBQQ", VERSION, self._code, len(lengths), len(indices))
        try:
            with open(idx_path(self.prefix) + ".part", "wb") as idx:
                for content in (header, lengths.data, pointers.data, indices.data):
                    idx.write(content)
                idx.flush()
                os.fsync(idx.fileno())
            self._bin.flush()
            os.fsync(self._bin.fileno())
            if os.path.exists(idx_path(self.prefix)):
                os.remove(idx_path(self.prefix))
            os.replace(bin_path(self.prefix) + ".part", bin_path(self.prefix))
            os.replace(idx_path(self.prefix) + ".part", idx_path(self.prefix))
            sync_file(os.path.dirname(os.path.abspath(self.prefix)))
        except OSError as error:
            raise IndexedDatasetError(f"{self.prefix}: cannot be written: {error.strerror}") from None
        self._bin.close()

    def _abort(self) -> None:
        for path in (bin_path(self.prefix) + ".part", idx_path(self.prefix) + ".part"):
            if os.path.exists(path):
                os.remove(path)
        try:
            self._bin.close()
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
