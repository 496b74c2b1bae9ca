"""Best-fit decreasing on the histogram of lengths: the same decisions as one document at a time, in far fewer moves.

The paper's algorithm treats one chunk at a time. Here chunks of equal length are interchangeable, and so are sequences
with equal remaining space, so a whole *run* of such sequences is filled in one *move*: once a sequence of the run has
taken a chunk, it stays the best fit for the next one of that length until it cannot hold another. The decisions, and
hence the number of sequences, are those of the per-document algorithm, but the number of moves grows with L and not
with the number of documents.
"""

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np

from .census import Census


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


def count_sequences(census: Census, runs: list[Run]) -> int:
    """Number of sequences of a corpus: its full chunks and those of the runs."""
    return census.num_full_chunks + (runs[-1].first_sequence + runs[-1].count if runs else 0)


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


def _per_sequence(space: int, length: int, chunks: int, cap: int | None) -> int:
    """How many more chunks of ``length`` a sequence takes."""
    fitting = space // length
    return fitting if cap is None else min(fitting, cap - chunks)
