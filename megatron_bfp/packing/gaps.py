"""Fill the gaps that dealing left: best fit, with an eye on the next chunk."""

import numpy as np

from .best_fit import Move, OpenRuns, Run, put_chunks
from .dealing import Dealing, SortedChunks


class TooManySequences(Exception):
    """A plan opens more sequences than it may."""


class Gaps(OpenRuns):
    """Open runs that give a chunk the least space that it fills exactly or that leaves room for another chunk.

    Plain best fit often leaves a space too small for any chunk that is still to come.
    """

    def __init__(self, seq_length: int, cap: int | None, num_sequences: int, most_sequences: int) -> None:
        super().__init__(seq_length, cap)
        self.num_sequences, self._most_sequences = num_sequences, most_sequences
        self.room: dict[int, int] = {}
        """By length of a chunk, the tokens to leave; 0 for plain best fit."""

    def take(self, length: int, num_chunks: int) -> tuple[Run, int, int]:
        """Take out the run that fits best, as ``OpenRuns.take`` does.

        Raises:
            TooManySequences: too many are open.
        """
        best, room = self._best_fit(length), self.room[length]
        if best == len(self._keys):
            opened = self._open_sequences(length, num_chunks)
            if self.num_sequences > self._most_sequences:
                raise TooManySequences
            return opened
        if room and self._space_of(self._keys[best]) > length:
            with_room = self._best_fit(length + room)
            best = with_room if with_room < len(self._keys) else best
        run, space = self._take_out(best)
        per_sequence = space // length if space % length == 0 else max(1, (space - room) // length)
        return run, space, per_sequence if self._cap is None else min(per_sequence, self._cap - run.chunks)


def room_to_leave(chunks: SortedChunks, first: int, tenths: int) -> dict[int, int]:
    """By length, for the chunks from number ``first`` on: the length of a chunk that ``tenths`` of them come after.

    It stays the same until the lengths have come down to it, and is 0 if it is not shorter.
    """
    lengths, starts, _ = chunks.since(first)
    ranks = chunks.number - tenths * (chunks.number - starts) // 10
    shorter = chunks.lengths[np.minimum(chunks.ends.searchsorted(ranks), len(chunks.lengths) - 1)]
    room, rooms = 0, {}
    for length, next_room in zip(lengths.tolist(), shorter.tolist(), strict=True):
        if not room or length <= room:
            room = next_room if next_room < length else 0
        rooms[length] = room
    return rooms


def fill_gaps(dealing: Dealing, chunks: SortedChunks, gaps: Gaps, room_tenths: int) -> list[Run]:
    """Put the chunks that were not dealt into the sequences.

    Returns:
        Runs in order of their first sequence, without the moves of dealing.
    """
    first = dealing.next_chunk
    lengths, _, counts = chunks.since(first)
    gaps.room = room_to_leave(chunks, first, room_tenths) if room_tenths else dict.fromkeys(lengths.tolist(), 0)
    for run, space in dealing.runs():
        gaps.put(run, space)
    put_chunks(gaps, zip(lengths.tolist(), counts.tolist(), strict=True), first)
    return gaps.runs()


def with_moves_of(dealing: Dealing, runs: list[Run]) -> list[Run]:
    """The runs of ``fill_gaps`` with all moves, those of dealing first."""
    dealt = dealing.last_moves()
    dealt.append((dealing.num_sequences, None))  # sequences opened later
    complete, row = [], 0
    for run in runs:
        while row + 1 < len(dealt) and dealt[row + 1][0] <= run.first_sequence:
            row += 1
        complete.append(run._replace(last_move=_append(dealt[row][1], run.last_move)))
    return complete


def _append(before: Move | None, last_move: Move | None) -> Move | None:
    """The moves up to ``last_move``, after those up to ``before``."""
    moves = []
    while last_move is not None:
        moves.append(last_move)
        last_move = last_move.previous
    for first_sequence, per_sequence, start, _ in reversed(moves):
        before = Move(first_sequence, per_sequence, start, before)
    return before
