"""Deal chunks out evenly, longest first: each to the sequence with the most remaining space.

Cost: as for best-fit decreasing, the number of steps grows with the sequence length L, not with the number of documents.
Guarantee: the remaining spaces of the sequences stay as close together as the lengths of the chunks permit.

Giving one chunk after another to the sequence with the most space is the rule "longest processing time first", known
for spreading jobs over machines. Here it is done in *rounds*: in a round, every sequence that this rule would reach
before coming back to the first one gets its chunks. Long chunks are dealt one by one. While a sequence still waits for
hundreds of short ones, it gets several of one length at a time, a *bundle*; that is even enough and takes fewer moves.

Source: Graham, "Bounds on multiprocessing timing anomalies" (SIAM Journal on Applied Mathematics, 1969).
"""

import numpy as np

from .best_fit import Move, Run

BUNDLES_LEFT = 4
"""A bundle holds one part in so many of the chunks that a sequence still waits for, on average."""


class Dealing:
    """``num_sequences`` sequences that chunks are dealt out to.

    They are kept as runs, in parallel arrays, most remaining space first.
    """

    def __init__(self, remainders: np.ndarray, seq_length: int, num_sequences: int, most_chunks: int | None) -> None:
        """Args:
        remainders: int64 [L], number of remainder chunks of each length.
        most_chunks: at most so many in a sequence; None for no limit.
        """
        self._lengths = np.flatnonzero(remainders)[::-1]
        self._ends = np.cumsum(remainders[self._lengths])  # of each length, among all chunks, longest first
        self._most_chunks = most_chunks
        self._num_sequences = num_sequences
        self._space, self._chunks = np.array([seq_length]), np.array([0])
        self._first, self._size = np.array([0]), np.array([num_sequences])
        self._last_move = np.array([0])  # numbered from 1; 0 for none
        self._rounds: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
        self._num_moves = 0
        self.next_chunk = 0

    def deal(self, end: int) -> None:
        """Deal out the chunks up to number ``end``, exclusive; fewer if one comes that fits nowhere."""
        while self.next_chunk < end and self._deal_round(end):
            pass

    def _deal_round(self, end: int) -> bool:
        order = np.argsort(-self._space, kind="stable")
        self._reorder(order)
        row = int(self._ends.searchsorted(self.next_chunk, side="right"))
        length, most_space = int(self._lengths[row]), int(self._space[0])
        if most_space < length:
            return False
        bundle = self._bundle_size(length, end)
        num_runs = int((-self._space).searchsorted(bundle * length - most_space))
        if self._most_chunks is not None:
            bundle = min(bundle, self._most_chunks - int(self._chunks[:num_runs].max()))
        num_sequences = int(self._size[:num_runs].sum())
        sizes, counts, starts, lengths = self._bundles(row, bundle, min(num_sequences * bundle, end - self.next_chunk))
        bundle_ends, run_ends = np.cumsum(counts), np.cumsum(self._size[:num_runs])
        num_dealt = min(int(bundle_ends[-1]), num_sequences)
        ends = np.union1d(bundle_ends, run_ends)
        ends = ends[: ends.searchsorted(num_dealt) + 1]
        begins = np.concatenate([[0], ends[:-1]])
        of_run, of_bundle = run_ends.searchsorted(begins, side="right"), bundle_ends.searchsorted(begins, side="right")
        per_sequence = sizes[of_bundle]
        space = self._space[of_run] - per_sequence * lengths[of_bundle]
        if space.min() < 0:
            fitting = int((space < 0).argmax())
            ends, begins, of_run, of_bundle = ends[:fitting], begins[:fitting], of_run[:fitting], of_bundle[:fitting]
            per_sequence, space, num_dealt = per_sequence[:fitting], space[:fitting], int(ends[fitting - 1])
        first = self._first[of_run] + begins - (run_ends - self._size[:num_runs])[of_run]
        start = starts[of_bundle] + (begins - (bundle_ends - counts)[of_bundle]) * per_sequence
        self._rounds.append((first, per_sequence, start, self._last_move[of_run]))
        self._replace(num_dealt, space, self._chunks[of_run] + per_sequence, first, ends - begins)
        self.next_chunk += int((per_sequence * (ends - begins)).sum())
        return True

    def _bundle_size(self, length: int, end: int) -> int:
        waiting = (int(self._ends[-1]) - self.next_chunk) // self._num_sequences
        bundle = waiting // BUNDLES_LEFT
        few = int(np.cumsum(self._size).searchsorted(self._num_sequences // 16))
        lead = int(self._space[0] - self._space[min(few, len(self._space) - 1)])  # of the emptiest sequences
        return max(1, min(max(bundle, lead // length // 2), int(self._space[0]) // length))

    def _bundles(self, row: int, bundle: int, num_chunks: int) -> tuple[np.ndarray, ...]:
        """The next chunks, bundled by length: of each length as many bundles as it fills, and one of the rest."""
        end = self.next_chunk + num_chunks
        last = int(self._ends.searchsorted(end)) + 1
        lengths, ends = self._lengths[row:last], np.minimum(self._ends[row:last], end)
        starts = np.concatenate([[self.next_chunk], ends[:-1]])
        full, rest = np.divmod(ends - starts, bundle)
        sizes = np.stack([np.full(len(full), bundle), rest], axis=1).ravel()
        counts = np.stack([full, rest > 0], axis=1).ravel()
        starts = np.stack([starts, starts + full * bundle], axis=1).ravel()
        some = counts > 0
        return sizes[some], counts[some], starts[some], np.repeat(lengths, 2)[some]

    def _reorder(self, order: np.ndarray) -> None:
        self._space, self._chunks, self._first = self._space[order], self._chunks[order], self._first[order]
        self._size, self._last_move = self._size[order], self._last_move[order]

    def _replace(
        self, num_dealt: int, space: np.ndarray, chunks: np.ndarray, first: np.ndarray, size: np.ndarray
    ) -> None:
        """Replace the first ``num_dealt`` sequences by the runs that they are now."""
        if self._most_chunks is not None:
            space = np.where(chunks < self._most_chunks, space, 0)
        ends = np.cumsum(self._size)
        rest = int(ends.searchsorted(num_dealt, side="right"))  # the first run of which some sequences are left
        moves = np.arange(self._num_moves + 1, self._num_moves + 1 + len(space))
        self._num_moves += len(space)
        left_first, left_size = self._first[rest:].copy(), self._size[rest:].copy()
        if len(left_size):
            taken = num_dealt - int(ends[rest]) + int(left_size[0])
            left_first[0] += taken
            left_size[0] -= taken
        self._space = np.concatenate([space, self._space[rest:]])
        self._chunks = np.concatenate([chunks, self._chunks[rest:]])
        self._first = np.concatenate([first, left_first])
        self._size = np.concatenate([size, left_size])
        self._last_move = np.concatenate([moves, self._last_move[rest:]])

    def runs(self) -> list[tuple[Run, int]]:
        """The runs, and the remaining space of the sequences of each."""
        moves: list[Move | None] = [None]
        for first, per_sequence, start, previous in self._rounds:
            before = [moves[number] for number in previous.tolist()]
            moves += map(Move, first.tolist(), per_sequence.tolist(), start.tolist(), before)
        last_moves = [moves[number] for number in self._last_move.tolist()]
        runs = map(Run, self._first.tolist(), self._size.tolist(), self._chunks.tolist(), last_moves)
        return list(zip(runs, self._space.tolist(), strict=True))
