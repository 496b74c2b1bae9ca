"""From a plan to documents: sort them by the length of their remainder chunks, then deal them out to the sequences.

Cost: one pass over the lengths and one over the result, both mostly sequential in memory.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..progress import Progress, without_progress
from .best_fit import Run
from .census import blocks_of, num_blocks, remainder_lengths

PIECE = 1 << 22
"""Document ids assembled at once."""


def sort_documents(
    lengths: Any,
    remainders: np.ndarray,
    dtype: np.dtype | type,
    first_document: int = 0,
    progress: Progress = without_progress,
) -> np.ndarray:
    """Document ids of all remainder chunks: longest first, equal lengths in document order.

    A counting sort in blocks: the histogram says where each length begins, each block is sorted inside the cache and
    scattered to its slots. Unlike one large argsort, its memory traffic stays linear, and the result does not depend
    on the machine or the numpy version.

    Returns:
        ``dtype`` [remainder chunks].
    """
    seq_length = len(remainders)
    next_slot = remainders.sum() - np.cumsum(remainders)  # after all longer ones
    sorted_ids = np.empty(int(remainders.sum()), dtype=dtype)
    for first, block in progress(blocks_of(lengths), num_blocks(lengths), "sorting documents"):
        chunks = remainder_lengths(block, seq_length)
        order = _stable_order(chunks)[np.count_nonzero(chunks == 0) :]
        chunks = chunks[order]
        is_first = np.ones(len(chunks), dtype=bool)  # of its length in the block
        np.not_equal(chunks[1:], chunks[:-1], out=is_first[1:])
        starts = np.flatnonzero(is_first)
        present, counts = chunks[starts], np.diff(starts, append=len(chunks))
        slots = np.repeat(next_slot[present] - starts, counts)
        slots += np.arange(len(chunks))
        ids = order.astype(dtype)  # before they are scattered: numpy does not cast and scatter at once
        ids += np.dtype(dtype).type(first + first_document)
        sorted_ids[slots] = ids
        next_slot[present] += counts
    return sorted_ids


def place_documents(
    runs: list[Run], sorted_ids: np.ndarray, progress: Progress = without_progress
) -> Iterator[np.ndarray]:
    """The documents of all sequences, one sequence after another, as consecutive pieces of ``document_ids``.

    Each run is assembled by one strided copy per move. If a run was split after a move, each part takes its own share
    of the move's documents.

    Yields:
        Document ids, about ``PIECE`` at most.
    """
    for run in progress(runs, len(runs), "placing documents"):
        step = max(1, PIECE // run.chunks)
        for first in range(run.first_sequence, run.first_sequence + run.num_sequences, step):
            count = min(step, run.first_sequence + run.num_sequences - first)
            sequences = np.empty((count, run.chunks), dtype=sorted_ids.dtype)
            column, move = run.chunks, run.last_move
            while move is not None:
                start = move.start + (first - move.first_sequence) * move.per_sequence
                share = sorted_ids[start : start + count * move.per_sequence]
                sequences[:, column - move.per_sequence : column] = share.reshape(count, move.per_sequence)
                column, move = column - move.per_sequence, move.previous
            yield sequences.reshape(-1)


def _stable_order(chunks: np.ndarray) -> np.ndarray:
    """Indices that sort a block, ties in order: one radix sort of 16 bits, and one of the bits above, if there are
    any."""
    order = np.argsort(chunks.astype(np.uint16, copy=False), kind="stable")
    if chunks.dtype.itemsize > 2:
        high = (chunks >> 16).astype(np.uint16)
        order = order[np.argsort(high[order], kind="stable")]
    return order
