"""Deal chunks out evenly, longest first: each to the sequence with the most remaining space.

Cost: as for best-fit decreasing, the number of steps grows with the sequence length, not with the number of documents.
Guarantee: the remaining spaces of the sequences stay as close together as the lengths of the chunks permit.

Giving one chunk after another to the sequence with the most space is the rule "longest processing time first", known
from spreading jobs over machines. Here it is done in *rounds*: a round gives a chunk to every sequence that comes
before the first one would be due again. Long chunks are dealt one by one. While sequences still wait for hundreds of
short ones, each gets several of one length at once, a *bundle*; that is even enough, and takes fewer moves.

Example: L = 10, three sequences, chunks of 6, 5, 4, 3, 3, 2, 1 and 1 tokens::

    6, 5 and 4    to the empty sequences 0, 1 and 2             spaces 4, 5, 6
    3, 3 and 2    most space first: to sequences 2, 1 and 0     spaces 2, 2, 3
    1             to sequence 2, then all have equal space      spaces 2, 2, 2
    1             to one of them                                spaces 2, 2, 1

Source: Graham, "Bounds on multiprocessing timing anomalies" (SIAM Journal on Applied Mathematics, 1969).
"""

from functools import partial
from typing import NamedTuple

import numpy as np

from .best_fit import Move, Run

BUNDLES_LEFT = 4
"""A bundle holds one part in so many of the chunks that a sequence still waits for, on average."""


class SortedChunks:
    """The remainder chunks of a corpus, longest first and numbered from 0, kept as a histogram."""

    def __init__(self, remainders: np.ndarray) -> None:
        """Args:
        remainders: int64 [L], number of remainder chunks of each length.
        """
        self.lengths = np.flatnonzero(remainders)[::-1]
        """int64 [lengths that occur], longest first."""
        self.ends = np.cumsum(remainders[self.lengths])
        """Of each length, the number of chunks that are as long or longer."""
        self.number = int(self.ends[-1]) if len(self.ends) else 0

    def row(self, chunk: int) -> int:
        """The index in ``lengths`` of a chunk's length."""
        return int(self.ends.searchsorted(chunk, side="right"))

    def since(self, first: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The lengths of all chunks from number ``first`` on, the first chunk of each length, and their counts."""
        row = self.row(first)
        starts = np.concatenate([[first], self.ends[row:-1]])
        return self.lengths[row:], starts, self.ends[row:] - starts


class Round(NamedTuple):
    """The moves of a round, as parallel arrays: the fields of ``Move``, but with the number of the previous move."""

    first_sequence: np.ndarray
    per_sequence: np.ndarray
    start: np.ndarray
    previous: np.ndarray


class Dealing:
    """Sequences that chunks are dealt out to, as runs in parallel arrays, those with the most remaining space first."""

    def __init__(self, chunks: SortedChunks, seq_length: int, num_sequences: int, cap: int | None) -> None:
        """Args:
        cap: at most so many chunks in a sequence; None for no limit.
        """
        self._chunks, self._cap, self.num_sequences = chunks, cap, num_sequences
        self.next_chunk = 0
        self._space = np.array([seq_length])
        self._held = np.array([0])  # chunks per sequence
        self._first, self._size = np.array([0]), np.array([num_sequences])
        self._last_move = np.array([0])  # numbered from 1; 0 for none
        self._rounds: list[Round] = []
        self.num_moves = 0

    def deal(self, end: int) -> None:
        """Deal the chunks up to number ``end``, exclusive; only those before it that fit, if one does not."""
        while self.next_chunk < end:
            self._sort()
            length = int(self._chunks.lengths[self._chunks.row(self.next_chunk)])
            if self._space[0] < length:
                return
            self._deal_round(length, end)

    def _sort(self) -> None:
        order = np.argsort(-self._space, kind="stable")
        self._space, self._held, self._last_move = self._space[order], self._held[order], self._last_move[order]
        self._first, self._size = self._first[order], self._size[order]

    def _deal_round(self, length: int, end: int) -> None:
        """Deal a bundle to every sequence with more space than the first one will have left."""
        bundle = self._bundle_size(length)
        num_runs = int((-self._space).searchsorted(bundle * length - self._space[0]))
        if self._cap is not None:
            bundle = min(bundle, self._cap - int(self._held[:num_runs].max()))
        run_ends = np.cumsum(self._size[:num_runs])
        sizes, counts, starts, lengths = self._bundles(bundle, min(end, self.next_chunk + bundle * int(run_ends[-1])))
        bundle_ends = np.cumsum(counts)
        # Runs and bundles both divide the sequences into intervals. Split both, so that their intervals are the same.
        ends = np.union1d(run_ends, bundle_ends)
        ends = ends[: ends.searchsorted(min(run_ends[-1], bundle_ends[-1])) + 1]
        begins = np.concatenate([[0], ends[:-1]])
        run, dealt = run_ends.searchsorted(begins, side="right"), bundle_ends.searchsorted(begins, side="right")
        space = self._space[run] - sizes[dealt] * lengths[dealt]
        if space.min() < 0:  # stop before the first that does not fit
            fitting = slice(int((space < 0).argmax()))
            ends, begins, run, dealt, space = (
                ends[fitting],
                begins[fitting],
                run[fitting],
                dealt[fitting],
                space[fitting],
            )
        first = self._first[run] + begins - (run_ends - self._size[:num_runs])[run]
        start = starts[dealt] + (begins - (bundle_ends - counts)[dealt]) * sizes[dealt]
        self._rounds.append(Round(first, sizes[dealt], start, self._last_move[run]))
        self._replace(int(ends[-1]), space, self._held[run] + sizes[dealt], first, ends - begins)
        self.next_chunk += int((sizes[dealt] * (ends - begins)).sum())

    def _bundle_size(self, length: int) -> int:
        """How many chunks of ``length`` each sequence gets in this round.

        If only a few sequences are far emptier than the others, they get half of what they are behind at once.
        """
        waiting = (self._chunks.number - self.next_chunk) // self.num_sequences // BUNDLES_LEFT
        few = int(np.cumsum(self._size).searchsorted(self.num_sequences // 16))
        behind = int(self._space[0] - self._space[few]) // length // 2
        return max(1, min(max(waiting, behind), int(self._space[0]) // length))

    def _bundles(self, bundle: int, end: int) -> tuple[np.ndarray, ...]:
        """The chunks up to ``end`` in bundles of one length: full ones and, if a length leaves a rest, one of that.

        Returns:
            Chunks per bundle, number of bundles, the first chunk of the first of them, and their length.
        """
        row, last = self._chunks.row(self.next_chunk), self._chunks.row(end - 1)
        starts = np.concatenate([[self.next_chunk], self._chunks.ends[row:last]])
        full, rest = np.divmod(np.append(self._chunks.ends[row:last], end) - starts, bundle)
        sizes = np.stack([np.full(len(full), bundle), rest], axis=1).ravel()
        counts = np.stack([full, rest > 0], axis=1).ravel()
        starts = np.stack([starts, starts + full * bundle], axis=1).ravel()
        lengths = self._chunks.lengths[row : last + 1].repeat(2)
        some = counts > 0
        return sizes[some], counts[some], starts[some], lengths[some]

    def _replace(
        self, num_dealt: int, space: np.ndarray, held: np.ndarray, first: np.ndarray, size: np.ndarray
    ) -> None:
        """Replace the first ``num_dealt`` sequences by the runs that they have become; they made a move each."""
        if self._cap is not None:
            space = np.where(held < self._cap, space, 0)
        ends = np.cumsum(self._size)
        rest = int(ends.searchsorted(num_dealt, side="right"))  # the first run that keeps some sequences
        first, size = np.append(first, self._first[rest:]), np.append(size, self._size[rest:])
        if rest < len(ends):
            left = int(ends[rest]) - num_dealt
            first[len(space)] += size[len(space)] - left
            size[len(space)] = left
        moves = np.arange(len(space)) + self.num_moves + 1
        self.num_moves += len(space)
        self._first, self._size, self._space = first, size, np.append(space, self._space[rest:])
        self._held = np.append(held, self._held[rest:])
        self._last_move = np.append(moves, self._last_move[rest:])

    def runs(self) -> list[tuple[Run, int]]:
        """The runs, without their moves, and the remaining space of the sequences of each."""
        columns = (self._first.tolist(), self._size.tolist(), self._held.tolist(), self._space.tolist())
        return [(Run(first, size, held, None), space) for first, size, held, space in zip(*columns, strict=True)]

    def last_moves(self) -> list[tuple[int, Move | None]]:
        """The first sequence of each run, ascending, and its last move."""
        new_move = partial(tuple.__new__, Move)  # half the time of calling Move, and there are many
        moves: list[Move | None] = [None]
        for first, per_sequence, start, previous in self._rounds:
            before = [moves[number] for number in previous.tolist()]
            columns = (first.tolist(), per_sequence.tolist(), start.tolist(), before)
            moves += map(new_move, zip(*columns, strict=True))
        order = np.argsort(self._first)
        return [
            (first, moves[n])
            for first, n in zip(self._first[order].tolist(), self._last_move[order].tolist(), strict=True)
        ]
