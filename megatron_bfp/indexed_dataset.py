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
from collections.abc import Iterator
from typing import Any, BinaryIO, NoReturn

import numpy as np

from .errors import IndexedDatasetError, InputError
from .files import open_exclusively, sync_file
from .memory_maps import ScatteredReads, expect_next, expect_scattered_reads, map_file, open_unmapped
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
WRITTEN_AT_ONCE = 1 << 16
"""Sequences or documents whose part of the .idx is computed at once when it is written."""


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
        has_modes: whether the .idx has a mode for each sequence, as multimodal datasets have; nothing here reads it.
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

    def spans(self, documents: np.ndarray, sequences: np.ndarray | None = None) -> list[tuple[int, int]]:
        """Where documents lie in the .bin.

        Args:
            documents: int64 [k] document ids.
            sequences: int64 [k], where it is known that each of them is one sequence: which. It saves looking that up,
                a third of what is read.

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
        for _ in progress(self.checked_lengths(), -(-self.num_sequences // CHECKED_AT_ONCE), "checking pointers"):
            pass
        for _ in progress(self.checked_documents(), -(-self.num_documents // CHECKED_AT_ONCE), "checking documents"):
            pass

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
        self.dtype = np.dtype(TOKEN_DTYPES[code])
        self.num_documents = num_indices - 1
        expected = HEADER_BYTES + self.num_sequences * 12 + num_indices * 8
        if size not in (expected, expected + self.num_sequences):  # multimodal datasets add a byte a sequence
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
        self._file = self._tokens = None
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
        IndexedDatasetError: another process is writing the same dataset, or the place cannot be written.
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
    """Write an .idx block by block, in constant memory: its lengths, pointers and documents grow side by side, each in
    its place, which is known from their number.

    Args:
        path: file to write; what it holds is lost.
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
        header = struct.pack("<QBQQ", VERSION, _dtype_code(dtype), num_sequences, num_documents + 1)
        try:
            with open(path, "wb") as file:
                file.write(MAGIC + header)
            places = (HEADER_BYTES, pointers_at, pointers_at + num_sequences * 8)
            self._lengths, self._pointers, self._documents = (_open_at(path, place) for place in places)
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

    Lengths are kept as numpy arrays (4 bytes a sequence); the rest of the .idx is computed from them, block by block,
    while it is written at the end. The two files get their names in ``finalize``. Leaving the ``with`` block without it
    removes what was written.

    Args:
        prefix: path of the two files without ".bin" and ".idx".
        dtype: a dtype of ``TOKEN_DTYPES``.

    Raises:
        IndexedDatasetError: another process is writing the same dataset, or the place cannot be written.
    """

    def __init__(self, prefix: str, dtype: Any) -> None:
        self.prefix, self.dtype = str(prefix), np.dtype(dtype)
        _dtype_code(self.dtype)
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
            sequences_per_document: integers [documents]; None for one sequence a document.

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


def _dtype_code(dtype: np.dtype) -> int:
    """Megatron's code of a token dtype."""
    codes = {np.dtype(known): code for code, known in TOKEN_DTYPES.items()}
    if dtype not in codes:
        raise IndexedDatasetError(f"{dtype} cannot hold tokens; use uint16 or int32")
    return codes[dtype]


def _ones(number: int) -> np.ndarray:
    """int32 [number], all 1, in the memory of one: a sequence for each document, as in most datasets."""
    return np.broadcast_to(np.int32(1), number)


def _blocks(values: np.ndarray) -> Iterator[np.ndarray]:
    for first in range(0, len(values), WRITTEN_AT_ONCE):
        yield values[first : first + WRITTEN_AT_ONCE]


def _open_at(path: str, place: int) -> BinaryIO:
    """Open an existing file for writing from a place on, buffered."""
    file = open(path, "r+b", buffering=1 << 20)
    file.seek(place)
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
