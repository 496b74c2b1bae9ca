"""What packing needs to know of a corpus, counted in one pass over its lengths.

Memory: 8 bytes per possible length below L, and 16 bytes per document of L tokens or more.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import OptionError
from ..progress import Progress, without_progress

BLOCK = 1 << 17
"""Documents handled at once: large enough for vectorised work, small enough to sort inside the processor's cache."""

LONGEST_DOCUMENT = 1 << 40
"""Tokens; far above any document, and low enough that sums over a block stay in int64."""


@dataclass(frozen=True, eq=False)
class Census:
    """What packing needs to know of a corpus. Only tokens that are packed count: with targets only, all but the last of
    each document."""

    num_documents: int
    num_empty: int
    """Documents without a token to be packed. They are in no sequence."""
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


class LongDocuments:
    """Collects the long documents of a census, block by block."""

    def __init__(self) -> None:
        self._blocks = [np.empty((0, 2), dtype=np.int64)]

    def add(self, rows: np.ndarray) -> None:
        """The next ones: int64 [k, 2], documents and the number of full chunks of each."""
        self._blocks.append(rows)

    def table(self) -> np.ndarray:
        """``Census.long_documents``."""
        table = np.concatenate(self._blocks)
        np.cumsum(table[:, 1], out=table[:, 1])
        return table


def take_census(
    lengths: Any,
    seq_length: int,
    progress: Progress = without_progress,
    long_documents: LongDocuments | None = None,
) -> Census:
    """Count a corpus in one pass over its lengths.

    Args:
        lengths: integers [documents], tokens; anything with a length whose slices are numpy arrays.
        long_documents: collects them; by default in memory.

    Raises:
        OptionError: a length is negative or beyond ``LONGEST_DOCUMENT``.
    """
    remainders = np.zeros(seq_length, dtype=np.int64)
    num_empty = num_tokens = 0
    long_documents = long_documents or LongDocuments()
    for first, block in progress(blocks_of(lengths), num_blocks(lengths), "counting lengths"):
        for document in (int(block.argmin()), int(block.argmax())):
            if not 0 <= block[document] <= LONGEST_DOCUMENT:
                raise OptionError(f"document {first + document} has the length {block[document]}, which cannot be")
        num_tokens += int(block.sum(dtype=np.int64))
        num_empty += len(block) - int(np.count_nonzero(block))
        remainders += np.bincount(remainder_lengths(block, seq_length), minlength=seq_length)
        long = np.flatnonzero(block >= seq_length)
        long_documents.add(np.stack([long + first, block[long].astype(np.int64) // seq_length], axis=1))
    remainders[0] = 0
    return Census(len(lengths), num_empty, num_tokens, remainders, long_documents.table())


def blocks_of(lengths: Any) -> Iterator[tuple[int, np.ndarray]]:
    """Lengths in blocks of ``BLOCK`` documents, each with the number of its first document."""
    for first in range(0, len(lengths), BLOCK):
        yield first, lengths[first : first + BLOCK]


def num_blocks(lengths: Any) -> int:
    """How many blocks ``blocks_of`` yields."""
    return -(-len(lengths) // BLOCK)


def remainder_lengths(block: np.ndarray, seq_length: int) -> np.ndarray:
    """Lengths of the remainder chunks of a block, 0 for none, in the smallest dtype that numpy sorts by radix."""
    if seq_length > np.iinfo(block.dtype).max:
        return block
    divisor = block.dtype.type(seq_length)
    remainders = block - block // divisor * divisor  # numpy vectorises this, and not the operator
    return remainders.astype(np.uint16 if seq_length <= 1 << 16 else np.uint32)
