"""Best-fit decreasing on a histogram of lengths: the decisions of the paper's algorithm, in far fewer steps.

Cost: the number of steps grows with the sequence length L, not with the number of documents. A million documents are
planned in 0.02 s at L = 2,048. Guarantee: as many sequences, holding the same lengths, as packing one chunk at a time.

The paper's algorithm packs one chunk at a time, longest first, each into the sequence with the least remaining space
that still holds it. Chunks of equal length are interchangeable, and so are sequences with equal remaining space. Once a
sequence has taken a chunk, it stays the best fit for the next one of that length until it cannot hold another. So a
whole *run* of such sequences is filled in one *move*.

Example: L = 8, four chunks of 5 tokens, three of 3, three of 2::

    4 chunks of 5   nothing is open: open sequences 0-3, one chunk each   0-3: space 3
    3 chunks of 3   space 3 is the best fit: fill 0-2 and close them      3: space 3
    3 chunks of 2   best fit is space 3, which holds one of them          3: space 1
    2 chunks of 2   no open sequence holds them: open 4, both chunks      3: space 1, 4: space 4

    >>> remainders = np.bincount([5, 5, 5, 5, 3, 3, 3, 2, 2, 2], minlength=8)
    >>> [(run.first_sequence, run.num_sequences, run.chunks) for run in plan_runs(remainders, seq_length=8)]
    [(0, 3, 2), (3, 1, 2), (4, 1, 2)]

Source: Ding et al., "Fewer Truncations Improve Language Modeling" (ICML 2024), section 3.1 and algorithm 1.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from .census import Census


class Move(NamedTuple):
    """``per_sequence`` chunks of one length go to each sequence from ``first_sequence`` on."""

    first_sequence: int
    per_sequence: int
    start: int
    """Number of the move's first chunk among all remainder chunks, longest first."""
    previous: "Move | None"
    """The move before it in the same sequences."""


class Run(NamedTuple):
    """Consecutive sequences that hold the same lengths."""

    first_sequence: int
    num_sequences: int
    chunks: int
    """Chunks per sequence, put there by the moves."""
    last_move: Move | None
    work: int
    """Sum of the squared chunk lengths of one sequence, tokens squared: what attention inside documents costs."""


class OpenRuns:
    """Runs whose sequences can take more chunks, sorted by remaining space.

    With a cap on the documents per sequence, ties in remaining space go to the sequence with the most chunks, and a
    sequence that reaches the cap is closed.
    """

    def __init__(self, seq_length: int, max_documents_per_sequence: int | None = None) -> None:
        self._seq_length, self._cap = seq_length, max_documents_per_sequence
        self.num_sequences = 0  # opened so far
        self._closed: list[Run] = []
        self._open: dict[int, list[Run]] = {}  # by key: the remaining space; with a cap, space * cap - chunks
        self._keys: list[int] = []  # of _open, ascending

    def take(self, length: int, num_chunks: int) -> tuple[Run, int, int]:
        """Take out the run that fits best; if no open sequence holds ``length``, open as many as ``num_chunks`` need.

        Returns:
            The run, the remaining space of its sequences, and how many chunks of ``length`` each of them can take.
        """
        best = self._best_fit(length)
        if best == len(self._keys):
            return self._open_sequences(length, num_chunks)
        run, space = self._take_out(best)
        if self._cap is None:
            return run, space, space // length
        return run, space, min(space // length, self._cap - run.chunks)

    def _best_fit(self, space: int) -> int:
        """The index in ``_keys`` of the least remaining space that is at least ``space``; their number if none is."""
        return bisect_left(self._keys, space if self._cap is None else (space - 1) * self._cap + 1)

    def _take_out(self, index: int) -> tuple[Run, int]:
        """Take out the newest run of ``_keys[index]``; returns it and the remaining space of its sequences."""
        key = self._keys[index]
        same_key = self._open[key]
        run = same_key.pop()
        if not same_key:
            del self._open[key], self._keys[index]
        return run, self._space_of(key)

    def _space_of(self, key: int) -> int:
        return key if self._cap is None else -(-key // self._cap)

    def _open_sequences(self, length: int, num_chunks: int) -> tuple[Run, int, int]:
        space = self._seq_length
        per_sequence = space // length if self._cap is None else min(space // length, self._cap)
        run = Run(self.num_sequences, -(-num_chunks // per_sequence), 0, None, 0)
        self.num_sequences += run.num_sequences
        return run, space, per_sequence

    def put(self, run: Run, space: int) -> None:
        """Put a run back, each of its sequences with ``space`` tokens left."""
        cap = self._cap
        if space == 0 or run.chunks == cap:
            self._closed.append(run)
            return
        key = space if cap is None else space * cap - run.chunks
        same_key = self._open.get(key)
        if same_key is None:
            insort(self._keys, key)
            self._open[key] = [run]
        else:
            same_key.append(run)

    def runs(self) -> list[Run]:
        """Open and closed runs, in order of their first sequence."""
        runs = self._closed + [run for same_key in self._open.values() for run in same_key]
        return sorted(runs, key=attrgetter("first_sequence"))


def plan_runs(remainders: np.ndarray, seq_length: int, max_documents_per_sequence: int | None = None) -> list[Run]:
    """Pack remainder chunks best-fit decreasing.

    Args:
        remainders: int64 [L], number of chunks of each length below L.
        seq_length: L, tokens per sequence.
        max_documents_per_sequence: at most so many chunks per sequence; None for no limit.

    Returns:
        Runs in order of their first sequence, counted from 0 and covering all sequences of remainder chunks.
    """
    open_runs = OpenRuns(seq_length, max_documents_per_sequence)
    lengths = np.flatnonzero(remainders)[::-1]
    put_chunks(open_runs, zip(lengths.tolist(), remainders[lengths].tolist(), strict=True))
    return open_runs.runs()


def put_chunks(open_runs: OpenRuns, counts: Iterable[tuple[int, int]], next_chunk: int = 0) -> None:
    """Put chunks into the runs that ``open_runs`` gives for them.

    Args:
        open_runs: is changed.
        counts: lengths, longest first, and how many chunks there are of each.
        next_chunk: number of the first of them among all remainder chunks, longest first.
    """
    for length, chunks_left in counts:
        while chunks_left:
            run, space, per_sequence = open_runs.take(length, chunks_left)
            if per_sequence > chunks_left:  # too few to fill a sequence: one takes them all
                per_sequence = chunks_left
            num_filled = min(run.num_sequences, chunks_left // per_sequence)
            filled, rest = _fill(run, num_filled, per_sequence, length, next_chunk)
            open_runs.put(filled, space - per_sequence * length)
            if rest.num_sequences:
                open_runs.put(rest, space)
            next_chunk += num_filled * per_sequence
            chunks_left -= num_filled * per_sequence


def _fill(run: Run, num_filled: int, per_sequence: int, length: int, start: int) -> tuple[Run, Run]:
    """Add chunks to the first sequences of a run; returns these as a run of their own, and the rest of the run."""
    first_sequence, num_sequences, chunks, last_move, work = run
    move = Move(first_sequence, per_sequence, start, last_move)
    filled = Run(first_sequence, num_filled, chunks + per_sequence, move, work + per_sequence * length * length)
    return filled, Run(first_sequence + num_filled, num_sequences - num_filled, chunks, last_move, work)


def count_sequences(census: Census, runs: list[Run]) -> int:
    """Number of sequences of a corpus: its full chunks and those of the runs."""
    return census.num_full_chunks + count_remainder_sequences(runs)


def count_remainder_sequences(runs: list[Run]) -> int:
    """Number of sequences of a plan."""
    return runs[-1].first_sequence + runs[-1].num_sequences if runs else 0
