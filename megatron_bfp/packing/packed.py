"""``pack``: any array of lengths to packed sequences, in memory.

Cost: about that of sorting the lengths. Memory: some 4 bytes per document, beside the lengths.
"""

import operator
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from ..arguments import checked_cap, checked_flag, checked_seq_length
from ..errors import OptionError
from .best_fit import count_sequences
from .census import Census, take_census
from .even import plan
from .placing import place_documents, sort_documents
from .positions import positions_of
from .table import SequenceTable, id_dtype, run_rows


@dataclass(frozen=True, eq=False, repr=False)
class Packing:
    """The result of ``pack``: every chunk in exactly one sequence. ``packing[i]`` gives the chunks of sequence i."""

    lengths: np.ndarray
    census: Census
    table: SequenceTable
    targets_only: bool = False

    @property
    def num_sequences(self) -> int:
        """Number of training sequences."""
        return self.table.num_sequences

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all documents."""
        num_last_tokens = int(np.count_nonzero(self.lengths)) if self.targets_only else 0
        return self.census.num_tokens + num_last_tokens

    @property
    def padding(self) -> int:
        """Number of positions that hold no token, over all sequences."""
        return self.num_sequences * self.table.seq_length - self.census.num_tokens

    @property
    def work(self) -> np.ndarray:
        """int64 [num_sequences]: the sum of squared chunk lengths of each sequence, tokens squared."""
        return self.table.work(np.arange(self.num_sequences))

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
            int64 [k, 3]: document, offset and length (tokens that are inputs) of each chunk, in order.

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
        chunks = entry.chunk_spans(documents, self.table.seq_length, self.targets_only)
        return np.array([(chunk.document, chunk.start, chunk.num_tokens) for chunk in chunks], dtype=np.int64)


def pack(
    lengths: Any,
    seq_length: int,
    max_documents_per_sequence: int | None = None,
    even: bool = False,
    targets_only: bool = False,
) -> Packing:
    """Pack documents into training sequences, best-fit decreasing, cutting only those longer than a sequence.

    Args:
        lengths: integers >= 0 [documents], tokens of each document with its EOD: anything numpy takes as a 1-d array.
            The result keeps it; do not change it afterwards.
        seq_length: L, tokens per sequence; 1 to ``MOST_TOKENS``.
        max_documents_per_sequence: at most so many chunks per sequence; None for no limit. A cap evens out the number
            of documents, and so the time of a training step; it costs padding if documents are tiny.
        even: spread tiny documents over all sequences, so that none holds many times as many as the mean. This makes
            at most 1 sequence and 0.02 % more than best-fit decreasing. With it, a cap costs hardly any padding.
        targets_only: pack inputs that have a target, all tokens but the last of each document. Documents of
            ``seq_length`` + 1 tokens stay whole then, and those of one token are in no sequence.

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
    cap, even = checked_cap(max_documents_per_sequence), checked_flag("even", even)
    targets_only = checked_flag("targets_only", targets_only)
    try:
        lengths = np.asarray(lengths)
    except ValueError as error:
        raise OptionError(f"lengths must be a 1-d array of integers: {error}") from None
    if lengths.size == 0:
        lengths = np.empty(0, dtype=np.int64)
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu":
        raise OptionError(f"lengths must be a 1-d array of integers, got {lengths.dtype} {list(lengths.shape)}")
    packed_lengths = positions_of(lengths, targets_only)
    census = take_census(packed_lengths, seq_length)
    runs = plan(census.remainders, seq_length, cap, even)
    sorted_ids = sort_documents(packed_lengths, census.remainders, id_dtype(len(lengths)))
    document_ids, end = np.empty_like(sorted_ids), 0
    for piece in place_documents(runs, sorted_ids):
        start, end = end, end + len(piece)
        document_ids[start:end] = piece
    rows = run_rows(runs, census.num_full_chunks)
    table = SequenceTable(seq_length, count_sequences(census, runs), rows, document_ids, census.long_documents)
    return Packing(lengths, census, table, targets_only)
