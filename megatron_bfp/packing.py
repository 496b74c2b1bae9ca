"""Best-fit decreasing packing, decided on the histogram of lengths and so at about the cost of a sort.

Documents of n tokens are cut into n // L chunks of exactly L = ``seq_length`` tokens and at most one shorter remainder
chunk; nothing else is ever cut. A full chunk is a training sequence by itself. Remainder chunks are packed best-fit
decreasing: longest first, each into the sequence with the least remaining space that still holds it (Ding et al.,
"Fewer Truncations Improve Language Modeling", ICML 2024, section 3.1 and algorithm 1).

The paper's algorithm treats one chunk at a time. Here chunks of equal length are interchangeable, and so are sequences
with equal remaining space, so a whole *run* of such sequences is filled in one *move*: once a sequence of the run has
taken a chunk, it stays the best fit for the next one of that length until it cannot hold another. The decisions, and
hence the number of sequences, are those of the per-document algorithm, but the number of moves grows with L and not
with the number of documents. Four steps, each a function below:

    take_census     lengths          -> histogram of remainder chunks, documents with full chunks
    plan_runs       histogram        -> runs of sequences that hold the same lengths, and the moves that filled them
    sort_documents  lengths          -> document ids, longest remainder chunk first, equal lengths in document order
    place_documents runs, sorted ids -> document ids, sequence by sequence

Only numpy is used. The price of the histogram is that which of two equally long documents joins which sequence is
decided by their order alone; training order is shuffled afterwards, so nothing depends on it.
"""

import math
import operator
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import numpy as np

from .errors import OptionError
from .progress import Progress, without_progress

BLOCK = 1 << 17
"""Documents handled at once: large enough for vectorised work, small enough to sort inside the processor's cache."""

PIECE = 1 << 22
"""Document ids assembled at once."""

SEARCHED_AT_ONCE = 1 << 9
"""Documents with full chunks, few enough to be bisected: two or three pages of a file."""

MOST_TOKENS = 1 << 24
"""Largest ``seq_length``. A sample of so many positions takes 0.6 GB, and packing some hundred MB beside the corpus."""

LONGEST_DOCUMENT = 1 << 40
"""Tokens; far above any document, and low enough that sums over a block stay in int64."""


@dataclass(frozen=True, eq=False)
class Census:
    """What packing needs to know of a corpus. All lengths are in tokens."""

    num_documents: int
    num_empty: int
    """Documents without a token. They are in no sequence."""
    num_tokens: int
    remainders: np.ndarray
    """int64 [L]: number of remainder chunks of each length; entry 0 is 0."""
    long_documents: np.ndarray
    """int64 [k, 2]: each document with full chunks, and the cumulative number of full chunks up to and with it."""

    @property
    def num_remainders(self) -> int:
        """Number of remainder chunks."""
        return int(self.remainders.sum())

    @property
    def num_full_chunks(self) -> int:
        """Number of chunks of exactly L tokens."""
        return int(self.long_documents[-1, 1]) if len(self.long_documents) else 0


class Move(NamedTuple):
    """``per_sequence`` chunks of one length go to each sequence from ``first_sequence`` on."""

    first_sequence: int
    per_sequence: int
    start: int
    """Position of the move's first chunk among all remainder chunks, longest first."""
    previous: "Move | None"
    """The move before it in the same sequences."""


class Run(NamedTuple):
    """``count`` consecutive sequences that hold the same lengths: ``chunks`` chunks each, put there by the moves."""

    first_sequence: int
    count: int
    chunks: int
    last_move: Move | None


@dataclass(frozen=True, eq=False)
class SequenceTable:
    """Which chunks make up which sequence, about four bytes a document.

    The first sequences are the full chunks of ``long_documents``, one each; after them come the runs.
    """

    seq_length: int
    num_sequences: int
    runs: np.ndarray
    """int64 [runs, 3]: first sequence, its first entry in ``document_ids``, chunks per sequence."""
    document_ids: np.ndarray
    """uint32 or uint64 [remainder chunks]: their documents, sequence by sequence, longest first in each."""
    long_documents: np.ndarray
    """int64 [k, 2], as in ``Census``."""

    def entry(self, sequence: int) -> "Entry":
        """What the table says of one sequence.

        Raises:
            IndexError: ``sequence`` is not in [0, num_sequences).
        """
        if not 0 <= sequence < self.num_sequences:
            raise IndexError(f"sequence {sequence} is not in [0, {self.num_sequences})")
        num_full_chunks = int(self.long_documents[-1, 1]) if len(self.long_documents) else 0
        if sequence < num_full_chunks:
            row = _first_above(self.long_documents[:, 1], sequence)
            before = int(self.long_documents[row - 1, 1]) if row else 0
            document = self.long_documents[row, :1].astype(np.int64)
            return Entry(document, sequence - before, int(self.long_documents[row, 1]) - before)
        row = int(self.runs[:, 0].searchsorted(sequence, side="right")) - 1
        first_sequence, first_entry, chunks = self.runs[row].tolist()
        entry = first_entry + (sequence - first_sequence) * chunks
        return Entry(self.document_ids[entry : entry + chunks].astype(np.int64), None, 0)


def _first_above(ascending: np.ndarray, value: int) -> int:
    """The position of the first item above ``value``, which is at least 0 and below the last item.

    Bisection of an array in a file waits for a page at each of its steps. Full chunks lie about evenly in a corpus, so
    the place can be guessed from the proportion: two probes around the guess leave about the square root of the items.
    Where the guess is bad they are halved.
    """
    low, high, before, after = 0, len(ascending) - 1, 0, int(ascending[-1])  # it is in [low, high]
    while high - low > SEARCHED_AT_ONCE:
        size = high - low
        guess, margin = low + size * (value - before) // max(1, after - before), 2 * math.isqrt(size)
        for probe in (guess - margin, guess + margin, (low + high) // 2):
            if not low <= probe < high:
                continue
            found = int(ascending[probe])
            if found > value:
                high, after = probe, found
            else:
                low, before = probe + 1, found
            if high - low < size // 16:
                break
    return low + int(ascending[low:high].searchsorted(value, side="right"))


class Entry(NamedTuple):
    """One sequence in a ``SequenceTable``: a full chunk of one document, or remainder chunks of several."""

    documents: np.ndarray
    """int64 [k]."""
    full_chunk: int | None
    """Number of the full chunk in its document, counted from 0; None for remainder chunks."""
    full_chunks: int
    """Number of full chunks the document has; 0 for remainder chunks, whose documents may have any."""

    def chunk_spans(self, document_spans: list[tuple[int, int]], seq_length: int) -> list[tuple[int, int]]:
        """Where the chunks begin and end, given where their documents do.

        Args:
            document_spans: k starts and ends, tokens from anywhere, such as from the start of each document or of a
                file.
        """
        if self.full_chunk is None:
            return [(end - (end - start) % seq_length, end) for start, end in document_spans]
        firsts = [start + self.full_chunk * seq_length for start, _ in document_spans]
        return [(first, first + seq_length) for first in firsts]


@dataclass(frozen=True, eq=False, repr=False)
class Packing:
    """The result of ``pack``: every chunk in exactly one sequence. ``packing[i]`` gives the chunks of sequence i."""

    lengths: np.ndarray
    census: Census
    table: SequenceTable

    @property
    def num_sequences(self) -> int:
        """Number of training sequences."""
        return self.table.num_sequences

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all documents."""
        return self.census.num_tokens

    @property
    def padding(self) -> int:
        """Number of positions that hold no token, over all sequences."""
        return self.num_sequences * self.table.seq_length - self.num_tokens

    def __repr__(self) -> str:
        return (
            f"Packing({len(self.lengths)} documents, {self.num_tokens} tokens in {self.num_sequences} sequences of "
            f"{self.table.seq_length}, padding {self.padding})"
        )

    def __len__(self) -> int:
        return self.num_sequences

    @overload
    def __getitem__(self, sequence: int) -> np.ndarray: ...

    @overload
    def __getitem__(self, sequence: slice) -> list[np.ndarray]: ...

    def __getitem__(self, sequence: int | slice) -> np.ndarray | list[np.ndarray]:
        """The chunks of a sequence, or, for a slice, a list of those of each of its sequences.

        Returns:
            int64 [k, 3]: document, offset and length (tokens) of each chunk, in order.

        Raises:
            IndexError: there is no such sequence. -1 is the last one.
        """
        if isinstance(sequence, slice):
            return [self[i] for i in range(*sequence.indices(len(self)))]
        number = operator.index(sequence)
        if not -len(self) <= number < len(self):
            raise IndexError(f"sequence {number} of {len(self)}")
        entry = self.table.entry(number % len(self))
        documents = [(0, length) for length in self.lengths[entry.documents].tolist()]
        spans = np.array(entry.chunk_spans(documents, self.table.seq_length), dtype=np.int64)
        return np.column_stack([entry.documents, spans[:, 0], spans[:, 1] - spans[:, 0]])


def pack(lengths: Any, seq_length: int, max_documents_per_sequence: int | None = None) -> Packing:
    """Pack documents into training sequences, best-fit decreasing, cutting only those longer than a sequence.

    Args:
        lengths: integers >= 0 [documents], tokens of each document with its EOD: anything numpy takes as a 1-d array.
            The result keeps it; do not change it afterwards.
        seq_length: L, the tokens a sequence holds; 1 to ``MOST_TOKENS``.
        max_documents_per_sequence: at most so many chunks go into one sequence (None: no limit). Keeps the number of
            documents, and so the time of a training step, even; costs padding where documents are tiny.

    Raises:
        OptionError: an argument is not what is described above.

    Example:
        >>> packing = pack([14, 7, 5, 2, 3], seq_length=8)      # the paper's figure 1
        >>> packing.num_sequences, packing.padding
        (4, 1)
        >>> packing[0].tolist(), packing[3].tolist()
        ([[0, 0, 8]], [[2, 0, 5], [4, 0, 3]])
    """
    seq_length = checked_seq_length("seq_length", seq_length)
    cap = checked_cap(max_documents_per_sequence)
    try:
        lengths = np.asarray(lengths)
    except ValueError as error:
        raise OptionError(f"lengths must be a 1-d array of integers: {error}") from None
    if lengths.size == 0:
        lengths = np.empty(0, dtype=np.int64)
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu":
        raise OptionError(f"lengths must be a 1-d array of integers, got {lengths.dtype} {list(lengths.shape)}")
    census = take_census(lengths, seq_length)
    runs = plan_runs(census.remainders, seq_length, cap)
    sorted_ids = sort_documents(lengths, census.remainders, id_dtype(len(lengths)))
    document_ids, end = np.empty_like(sorted_ids), 0
    for piece in place_documents(runs, sorted_ids):
        start, end = end, end + len(piece)
        document_ids[start:end] = piece
    rows = run_rows(runs, census.num_full_chunks)
    table = SequenceTable(seq_length, count_sequences(census, runs), rows, document_ids, census.long_documents)
    return Packing(lengths, census, table)


def checked_count(name: str, value: Any) -> int:
    """``value`` as an int, if it is an integer from 1 to 2**31 - 1 (cu_seqlens are int32).

    Raises:
        OptionError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 1 <= value < 1 << 31:
        raise OptionError(f"{name} must be an integer from 1 to 2**31 - 1, got {value!r}")
    return int(value)


def checked_seq_length(name: str, value: Any) -> int:
    """``value`` as an int, if it is an integer from 1 to ``MOST_TOKENS``: arrays of this length are made.

    Args:
        name: of the option or argument, for the message.

    Raises:
        OptionError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 1 <= value <= MOST_TOKENS:
        raise OptionError(f"{name} must be an integer from 1 to {MOST_TOKENS:,} tokens, got {value!r}")
    return int(value)


def checked_cap(value: Any) -> int | None:
    """``value`` as ``max_documents_per_sequence``: None, or as ``checked_count``."""
    return None if value is None else checked_count("max_documents_per_sequence", value)


def id_dtype(end: int) -> type:
    """The dtype that holds document ids below ``end``."""
    return np.uint32 if end <= 1 << 32 else np.uint64


def count_sequences(census: Census, runs: list[Run]) -> int:
    """Number of sequences of a corpus: its full chunks and those of the runs."""
    return census.num_full_chunks + (runs[-1].first_sequence + runs[-1].count if runs else 0)


def take_census(lengths: Any, seq_length: int, progress: Progress = without_progress) -> Census:
    """Count a corpus in one pass over its lengths.

    Args:
        lengths: integers [documents], tokens; anything with a length whose slices are numpy arrays.

    Raises:
        OptionError: a length is negative or beyond ``LONGEST_DOCUMENT``.
    """
    remainders = np.zeros(seq_length, dtype=np.int64)
    num_empty = num_tokens = 0
    long_blocks = [np.empty((0, 2), dtype=np.int64)]
    for first, block in progress(blocks_of(lengths), num_blocks(lengths), "counting lengths"):
        for document in (int(block.argmin()), int(block.argmax())):
            if not 0 <= block[document] <= LONGEST_DOCUMENT:
                raise OptionError(f"document {first + document} has the length {block[document]}, which cannot be")
        num_tokens += int(block.sum(dtype=np.int64))
        num_empty += len(block) - int(np.count_nonzero(block))
        remainders += np.bincount(_remainders(block, seq_length), minlength=seq_length)
        long = np.flatnonzero(block >= seq_length)
        long_blocks.append(np.stack([long + first, block[long].astype(np.int64) // seq_length], axis=1))
    remainders[0] = 0
    long_documents = np.concatenate(long_blocks)
    np.cumsum(long_documents[:, 1], out=long_documents[:, 1])
    return Census(len(lengths), num_empty, num_tokens, remainders, long_documents)


def plan_runs(remainders: np.ndarray, seq_length: int, max_documents_per_sequence: int | None = None) -> list[Run]:
    """Best-fit decreasing on a histogram.

    With a cap on the documents of a sequence, ties in remaining space go to the sequence with most chunks, and a
    sequence that reaches the cap is closed.

    Args:
        remainders: int64 [L], number of chunks of each length below L.

    Returns:
        Runs in order of their first sequence, counted from 0 and covering all sequences of remainder chunks.
    """
    cap = max_documents_per_sequence
    closed: list[Run] = []
    spaces: list[tuple[int, int]] = []  # sorted keys of open_runs: (remaining space, -chunks or 0 without a cap)
    open_runs: dict[tuple[int, int], list[Run]] = {}
    num_sequences = position = 0

    def put_back(run: Run, space: int) -> None:
        if space == 0 or run.chunks == cap:
            closed.append(run)
            return
        key = (space, -run.chunks if cap else 0)
        if key not in open_runs:
            insort(spaces, key)
            open_runs[key] = []
        open_runs[key].append(run)

    def take_best(length: int, chunks_left: int) -> tuple[Run, int]:
        nonlocal num_sequences
        best = bisect_left(spaces, (length,))
        if best < len(spaces):
            key = spaces[best]
            run = open_runs[key].pop()
            if not open_runs[key]:
                del open_runs[key], spaces[best]
            return run, key[0]
        per_sequence = _per_sequence(seq_length, length, 0, cap)
        run = Run(num_sequences, -(-chunks_left // per_sequence), 0, None)
        num_sequences += run.count
        return run, seq_length

    for length in np.flatnonzero(remainders)[::-1].tolist():
        chunks_left = int(remainders[length])
        while chunks_left:
            (first_sequence, count, chunks, last_move), space = take_best(length, chunks_left)
            per_sequence = _per_sequence(space, length, chunks, cap)
            filled = min(count, chunks_left // per_sequence)
            partial = chunks_left - filled * per_sequence if filled < count else 0
            for num_filled, taken in ((filled, per_sequence), (1 if partial else 0, partial)):
                if num_filled:
                    move = Move(first_sequence, taken, position, last_move)
                    put_back(Run(first_sequence, num_filled, chunks + taken, move), space - taken * length)
                    first_sequence, count = first_sequence + num_filled, count - num_filled
                    position += num_filled * taken
                    chunks_left -= num_filled * taken
            if count:
                put_back(Run(first_sequence, count, chunks, last_move), space)
    runs = closed + [run for same_space in open_runs.values() for run in same_space]
    return sorted(runs, key=lambda run: run.first_sequence)


def sort_documents(
    lengths: Any,
    remainders: np.ndarray,
    dtype: np.dtype | type,
    first_document: int = 0,
    progress: Progress = without_progress,
) -> np.ndarray:
    """Document ids of all remainder chunks: longest first, equal lengths in document order.

    A counting sort in blocks: the histogram says where each length begins, each block is sorted inside the cache and
    scattered to its places. Unlike one large argsort, its memory traffic stays linear, and the result does not depend
    on the machine or the numpy version.

    Returns:
        ``dtype`` [remainder chunks].
    """
    seq_length = len(remainders)
    next_place = remainders.sum() - np.cumsum(remainders)  # after all longer ones
    sorted_ids = np.empty(int(remainders.sum()), dtype=dtype)
    for first, block in progress(blocks_of(lengths), num_blocks(lengths), "sorting documents"):
        chunks = _remainders(block, seq_length)
        order = _stable_order(chunks)[np.count_nonzero(chunks == 0) :]
        chunks = chunks[order]
        is_first = np.ones(len(chunks), dtype=bool)  # of its length in the block
        np.not_equal(chunks[1:], chunks[:-1], out=is_first[1:])
        starts = np.flatnonzero(is_first)
        found, counts = chunks[starts], np.diff(starts, append=len(chunks))
        places = np.repeat(next_place[found] - starts, counts)
        places += np.arange(len(chunks))
        ids = order.astype(dtype)  # before they are scattered: numpy does not cast and scatter at once
        ids += np.dtype(dtype).type(first + first_document)
        sorted_ids[places] = ids
        next_place[found] += counts
    return sorted_ids


def place_documents(
    runs: list[Run], sorted_ids: np.ndarray, progress: Progress = without_progress
) -> Iterator[np.ndarray]:
    """The documents of all sequences, one sequence after another, as consecutive pieces of ``document_ids``.

    Each run is assembled by a strided copy for each move. A move may have been made before its run was split; each part
    takes its own share of the move's documents.

    Yields:
        Arrays of document ids, of some ``PIECE`` entries at the most.
    """
    for run in progress(runs, len(runs), "placing documents"):
        step = max(1, PIECE // run.chunks)
        for first in range(run.first_sequence, run.first_sequence + run.count, step):
            count = min(step, run.first_sequence + run.count - first)
            sequences = np.empty((count, run.chunks), dtype=sorted_ids.dtype)
            column, move = run.chunks, run.last_move
            while move is not None:
                start = move.start + (first - move.first_sequence) * move.per_sequence
                share = sorted_ids[start : start + count * move.per_sequence]
                sequences[:, column - move.per_sequence : column] = share.reshape(count, move.per_sequence)
                column, move = column - move.per_sequence, move.previous
            yield sequences.reshape(-1)


def run_rows(runs: list[Run], first_sequence: int) -> np.ndarray:
    """The runs as rows of a ``SequenceTable``, neighbours with equally many chunks a sequence joined.

    Args:
        first_sequence: number of sequences before the runs.

    Returns:
        int64 [runs, 3].
    """
    rows = np.array([(run.first_sequence, run.count, run.chunks) for run in runs], dtype=np.int64).reshape(-1, 3)
    entries = np.cumsum(rows[:, 1] * rows[:, 2]) - rows[:, 1] * rows[:, 2]
    rows = np.stack([rows[:, 0] + first_sequence, entries, rows[:, 2]], axis=1)
    return rows[np.diff(rows[:, 2], prepend=0) != 0]


def blocks_of(lengths: Any) -> Iterator[tuple[int, np.ndarray]]:
    """Lengths in blocks of ``BLOCK`` documents, each with the number of its first document."""
    for first in range(0, len(lengths), BLOCK):
        yield first, lengths[first : first + BLOCK]


def num_blocks(lengths: Any) -> int:
    """How many blocks ``blocks_of`` yields."""
    return -(-len(lengths) // BLOCK)


def _per_sequence(space: int, length: int, chunks: int, cap: int | None) -> int:
    """How many more chunks of ``length`` a sequence takes."""
    fitting = space // length
    return fitting if cap is None else min(fitting, cap - chunks)


def _remainders(block: np.ndarray, seq_length: int) -> np.ndarray:
    """Lengths of the remainder chunks of a block, 0 for none, in the smallest dtype that numpy sorts by radix."""
    if seq_length > np.iinfo(block.dtype).max:
        return block
    divisor = block.dtype.type(seq_length)
    remainders = block - block // divisor * divisor  # numpy vectorises this, and not the operator
    return remainders.astype(np.uint16 if seq_length <= 1 << 16 else np.uint32)


def _stable_order(chunks: np.ndarray) -> np.ndarray:
    """Indices that sort a block, ties in order: one radix sort of 16 bits, and one of the bits above where there are
    any."""
    order = np.argsort(chunks.astype(np.uint16, copy=False), kind="stable")
    if chunks.dtype.itemsize > 2:
        high = (chunks >> 16).astype(np.uint16)
        order = order[np.argsort(high[order], kind="stable")]
    return order
