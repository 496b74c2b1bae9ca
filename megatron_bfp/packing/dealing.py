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
from itertools import repeat
from typing import NamedTuple

import numpy as np

from .best_fit import Move, Run

BUNDLES_LEFT = 4
"""A bundle holds one part in so many of the chunks that a sequence still waits for, on average."""


class SortedChunks:
    """The remainder chunks of a corpus, longest first and numbered from 0, kept as a histogram.

    Args:
        remainders: int64 [L], number of remainder chunks of each length.
    """

    def __init__(self, remainders: np.ndarray) -> None:
        self.lengths = np.flatnonzero(remainders)[::-1]
        """int64 [lengths that occur], longest first."""
        self.ends = np.cumsum(remainders[self.lengths])
        """For each of these lengths, the number of chunks that are as long or longer."""
        self.number = int(self.ends[-1]) if len(self.ends) else 0

    def row(self, chunk: int) -> int:
        """The index in ``lengths`` of a chunk's length."""
        return int(self.ends.searchsorted(chunk, side="right"))

    def since(self, first: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The lengths of all chunks from number ``first`` on, the first chunk of each length, and their counts."""
        row = self.row(first)
        starts = np.concatenate([[first], self.ends[row:-1]])
        return self.lengths[row:], starts, self.ends[row:] - starts


class Runs(NamedTuple):
    """Runs as parallel arrays, int64 [runs]."""

    space: np.ndarray
    """Remaining space of each sequence."""
    held: np.ndarray
    """Chunks in each sequence."""
    first: np.ndarray
    """First sequence."""
    size: np.ndarray
    """Number of sequences."""
    last_move: np.ndarray
    """Number of the last move, counted from 1; 0 for none."""
    work: np.ndarray
    """Sum of the squared chunk lengths of each sequence."""

    def at(self, index: np.ndarray) -> "Runs":
        """The runs with these numbers, in this order."""
        return Runs(*(column[index] for column in self))

    def split(self, ends: np.ndarray) -> "Runs":
        """The same sequences, with a run ending after each number of sequences in ``ends``."""
        own_ends = np.cumsum(self.size)
        all_ends = np.union1d(own_ends, ends)
        begins = np.concatenate([[0], all_ends[:-1]])
        run = own_ends.searchsorted(begins, side="right")
        pieces = self.at(run)
        before = begins - (own_ends - self.size)[run]  # sequences of the run that are in earlier pieces
        return pieces._replace(first=pieces.first + before, size=all_ends - begins)


class Bundles(NamedTuple):
    """Chunks in bundles, as parallel arrays: ``number`` bundles of ``chunks`` chunks of one length."""

    chunks: np.ndarray
    number: np.ndarray
    length: np.ndarray
    start: np.ndarray
    """Number of the first chunk of the first bundle, among all chunks."""


class Moves(NamedTuple):
    """The moves of a round, as parallel arrays: the fields of ``Move``, with the number of the previous one."""

    first_sequence: np.ndarray
    per_sequence: np.ndarray
    start: np.ndarray
    previous: np.ndarray


class Dealing:
    """Sequences that chunks are dealt out to.

    Args:
        chunks: to be dealt out.
        seq_length: L, tokens per sequence.
        num_sequences: sequences, empty at first.
        cap: at most so many chunks in a sequence; None for no limit.
    """

    def __init__(self, chunks: SortedChunks, seq_length: int, num_sequences: int, cap: int | None) -> None:
        self._chunks, self._cap, self.num_sequences = chunks, cap, num_sequences
        self._runs = Runs(*(np.array([value]) for value in (seq_length, 0, 0, num_sequences, 0, 0)))
        self._rounds: list[Moves] = []
        self.num_moves = self.next_chunk = 0

    def deal(self, end: int) -> None:
        """Deal the chunks up to number ``end``, exclusive. Stop before a chunk that fits nowhere."""
        while self.next_chunk < end:
            self._runs = self._runs.at(np.argsort(-self._runs.space, kind="stable"))
            length = int(self._chunks.lengths[self._chunks.row(self.next_chunk)])
            if self._runs.space[0] < length:
                return
            self._deal_round(length, end)

    def _deal_round(self, length: int, end: int) -> None:
        """Deal a bundle to every sequence with more space than the first one will have left."""
        bundle = self._bundle_size(length)
        num_runs = int((-self._runs.space).searchsorted(bundle * length - self._runs.space[0]))
        if self._cap is not None:
            bundle = min(bundle, self._cap - int(self._runs.held[:num_runs].max()))
        num_receivers = int(self._runs.size[:num_runs].sum())
        bundles = self._bundles(bundle, min(end, self.next_chunk + bundle * num_receivers))
        ends = np.cumsum(bundles.number)
        self._runs = self._runs.split(ends[ends <= num_receivers])  # now each run gets bundles of one kind
        begins = np.cumsum(self._runs.size) - self._runs.size
        begins = begins[: begins.searchsorted(min(num_receivers, ends[-1]))]
        kind = ends.searchsorted(begins, side="right")
        fits = self._runs.space[: len(kind)] >= bundles.chunks[kind] * bundles.length[kind]
        if not fits.all():
            begins, kind = begins[: fits.argmin()], kind[: fits.argmin()]
        start = bundles.start[kind] + (begins - (ends - bundles.number)[kind]) * bundles.chunks[kind]
        self._move(bundles.chunks[kind], bundles.length[kind], start)

    def _bundle_size(self, length: int) -> int:
        """How many chunks of ``length`` each sequence gets in this round.

        If only a few sequences are far emptier than the others, they get half of what they are behind at once.
        """
        runs = self._runs
        waiting = (self._chunks.number - self.next_chunk) // self.num_sequences // BUNDLES_LEFT
        few = int(np.cumsum(runs.size).searchsorted(self.num_sequences // 16))
        behind = int(runs.space[0] - runs.space[few]) // length // 2
        return max(1, min(max(waiting, behind), int(runs.space[0]) // length))

    def _bundles(self, bundle: int, end: int) -> Bundles:
        """The chunks up to ``end`` in bundles: full ones and, if a length leaves a rest, one of that."""
        row, last = self._chunks.row(self.next_chunk), self._chunks.row(end - 1)
        starts = np.concatenate([[self.next_chunk], self._chunks.ends[row:last]])
        full, rest = np.divmod(np.append(self._chunks.ends[row:last], end) - starts, bundle)
        chunks = np.stack([np.full(len(full), bundle), rest], axis=1).ravel()
        number = np.stack([full, rest > 0], axis=1).ravel()
        start = np.stack([starts, starts + full * bundle], axis=1).ravel()
        length = self._chunks.lengths[row : last + 1].repeat(2)
        some = number > 0
        return Bundles(chunks[some], number[some], length[some], start[some])

    def _move(self, per_sequence: np.ndarray, length: np.ndarray, start: np.ndarray) -> None:
        """Give each of the first runs ``per_sequence`` chunks for each of its sequences, from chunk ``start`` on."""
        space, held, first, size, last_move, work = self._runs
        moved = slice(len(per_sequence))
        self._rounds.append(Moves(first[moved], per_sequence, start, last_move[moved].copy()))
        space[moved] -= per_sequence * length
        held[moved] += per_sequence
        work[moved] += per_sequence * length**2
        last_move[moved] = self.num_moves + 1 + np.arange(len(per_sequence))
        if self._cap is not None:
            space[held == self._cap] = 0  # closed
        self.num_moves += len(per_sequence)
        self.next_chunk += int((per_sequence * size[moved]).sum())

    def runs(self) -> list[tuple[Run, int]]:
        """The runs, without their moves, and the remaining space of the sequences of each."""
        space, held, first, size, _, work = (column.tolist() for column in self._runs)
        runs = map(Run, first, size, held, repeat(None), work)
        return list(zip(runs, space, strict=True))

    def last_moves(self) -> list[tuple[int, Move | None]]:
        """The first sequence of each run, ascending, and its last move."""
        new_move = partial(tuple.__new__, Move)  # half the time of calling Move, and there are many
        moves: list[Move | None] = [None]
        for first, per_sequence, start, previous in self._rounds:
            before = [moves[number] for number in previous.tolist()]
            columns = (first.tolist(), per_sequence.tolist(), start.tolist(), before)
            moves += map(new_move, zip(*columns, strict=True))
        runs = self._runs.at(np.argsort(self._runs.first))
        return list(zip(runs.first.tolist(), [moves[number] for number in runs.last_move.tolist()], strict=True))
