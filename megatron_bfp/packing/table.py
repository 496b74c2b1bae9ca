"""Which chunks make up which sequence, as three arrays of about four bytes per document."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .best_fit import Run
from .chunks import ChunkSpan

SEARCHED_AT_ONCE = 1 << 9
"""Items few enough to be bisected at once: two or three pages of a file."""


@dataclass(frozen=True, eq=False)
class SequenceTable:
    """Which chunks make up which sequence, about four bytes per document.

    The first sequences are the full chunks of ``long_documents``, one each; after them come the runs.
    """

    seq_length: int
    num_sequences: int
    runs: np.ndarray
    """int64 [runs, 4]: first sequence, its first entry in ``document_ids``, chunks per sequence, and the work of one of
    its sequences. All sequences of a run hold equal lengths."""
    document_ids: np.ndarray
    """uint32 or uint64 [remainder chunks]: their documents, sequence by sequence, longest first in each."""
    long_documents: np.ndarray
    """int64 [k, 2], as in ``Census``."""

    @property
    def num_full_chunks(self) -> int:
        """Number of sequences that are one full chunk each. They come first."""
        return int(self.long_documents[-1, 1]) if len(self.long_documents) else 0

    def work(self, sequences: Any) -> np.ndarray:
        """The work of sequences: the sum of their squared chunk lengths, to which attention inside documents is
        proportional. One bisection of the runs, whatever the number of documents.

        Args:
            sequences: integers in [0, num_sequences), of any shape.

        Returns:
            int64 of that shape, tokens squared.

        Raises:
            IndexError: one of them is not in [0, num_sequences).
        """
        sequences = np.asarray(sequences, dtype=np.int64)
        if sequences.size and not 0 <= sequences.min() <= sequences.max() < self.num_sequences:
            raise IndexError(f"not all sequences are in [0, {self.num_sequences})")
        of_a_full_chunk = self.seq_length**2
        works = np.append(self.runs[:, 3], of_a_full_chunk)  # row -1, before all runs, is the full chunks
        return works[self.runs[:, 0].searchsorted(sequences, side="right") - 1]

    def entry(self, sequence: int) -> "Entry":
        """What the table says of one sequence.

        Raises:
            IndexError: ``sequence`` is not in [0, num_sequences).
        """
        if not 0 <= sequence < self.num_sequences:
            raise IndexError(f"sequence {sequence} is not in [0, {self.num_sequences})")
        if sequence < self.num_full_chunks:
            row = first_above(self.long_documents[:, 1], sequence)
            before = int(self.long_documents[row - 1, 1]) if row else 0
            document = self.long_documents[row, :1].astype(np.int64)
            return Entry(document, sequence - before, int(self.long_documents[row, 1]) - before)
        row = int(self.runs[:, 0].searchsorted(sequence, side="right")) - 1
        first_sequence, first_entry, chunks, _ = self.runs[row].tolist()
        entry = first_entry + (sequence - first_sequence) * chunks
        return Entry(self.document_ids[entry : entry + chunks].astype(np.int64), None, 0)


def first_above(ascending: np.ndarray, value: int) -> int:
    """The index of the first item above ``value``, which is at least 0 and below the last item.

    Bisection of an array in a file waits for a page at each of its steps. Full chunks lie about evenly in a corpus, so
    the index can be guessed from the proportion: two probes around the guess leave about the square root of the items.
    If the guess is bad, they are halved.
    """
    low, high, before, after = 0, len(ascending) - 1, 0, int(ascending[-1])  # the index is in [low, high]
    while high - low > SEARCHED_AT_ONCE:
        size = high - low
        guess, margin = low + size * (value - before) // max(1, after - before), 2 * math.isqrt(size)
        for probe in (guess - margin, guess + margin, (low + high) // 2):
            if not low <= probe < high:
                continue
            item = int(ascending[probe])
            if item > value:
                high, after = probe, item
            else:
                low, before = probe + 1, item
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

    def chunk_spans(
        self, document_spans: list[tuple[int, int]], seq_length: int, targets_only: bool = False
    ) -> list[ChunkSpan]:
        """The chunks, given where their documents are.

        Args:
            document_spans: start and end of each of the k documents, in tokens. The chunks count from the same origin,
                such as the start of a .bin.
            targets_only: the last token of a document is no input.
        """
        documents = self.documents.tolist()
        if self.full_chunk is not None:
            ((start, end),) = document_spans
            start += self.full_chunk * seq_length
            return [ChunkSpan(documents[0], start, start + seq_length, end)]
        new = tuple.__new__  # half the time of calling ChunkSpan, and this is done for each sample
        if targets_only:
            return [
                new(ChunkSpan, (document, end - 1 - (end - 1 - start) % seq_length, end - 1, end))
                for document, (start, end) in zip(documents, document_spans, strict=True)
            ]
        return [
            new(ChunkSpan, (document, end - (end - start) % seq_length, end, end))
            for document, (start, end) in zip(documents, document_spans, strict=True)
        ]


def id_dtype(end: int) -> type:
    """The dtype that holds document ids below ``end``."""
    return np.uint32 if end <= 1 << 32 else np.uint64


def run_rows(runs: list[Run], first_sequence: int) -> np.ndarray:
    """The runs as rows of a ``SequenceTable``. Neighbours with equal work and equally many chunks are joined.

    Args:
        first_sequence: number of sequences before the runs.

    Returns:
        int64 [runs, 4].
    """
    numbers = [(run.first_sequence, run.num_sequences, run.chunks, run.work) for run in runs]
    firsts, counts, chunks, work = np.array(numbers, dtype=np.int64).reshape(-1, 4).T
    entries = np.cumsum(counts * chunks) - counts * chunks
    rows = np.stack([firsts + first_sequence, entries, chunks, work], axis=1)
    return rows[np.any(np.diff(rows[:, 2:], axis=0, prepend=0) != 0, axis=1)]
