"""A run whose input files have changed since it began: what is kept of it, and what is done again.

A finished shard is kept if all of its files are as they were, by path, size and time of modification. Its documents are
then those that a run begun today would write, and documents are joined in the order of today's input, so the datasets
are byte for byte those of a run begun today.
"""

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import count, groupby

from ..errors import OptionError
from .plan import Shard, file_pieces, grouped
from .readers.documents import Place
from .readers.inputs import Piece

SizeAndTime = tuple[int, int]
"""Of an input file: bytes, and nanoseconds of its last modification."""
SHOWN = 3


@dataclass(frozen=True)
class InputChanges:
    """What is other in today's input files than when a run began."""

    before: dict[str, SizeAndTime]
    now: dict[str, SizeAndTime]
    """By path."""

    @classmethod
    def between(cls, before: Iterable[Sequence], now: Iterable[Sequence]) -> "InputChanges":
        """Of the ``inputs`` of two runs' identities."""
        return cls(*({path: tuple(rest) for path, *rest in inputs} for inputs in (before, now)))

    @property
    def unchanged(self) -> set[str]:
        """Files that are what they were."""
        return {path for path, status in self.now.items() if self.before.get(path) == status}

    def __str__(self) -> str:
        changes = list(self._described())
        more = f" and {len(changes) - SHOWN} more" if len(changes) > SHOWN else ""
        return ", ".join(changes[:SHOWN]) + more if changes else "the order of its inputs"

    def _described(self) -> Iterator[str]:
        for path in dict.fromkeys([*self.now, *self.before]):
            before, now = self.before.get(path), self.now.get(path)
            if before != now:
                yield f"{Place(path).name} ({_described(before)} before, {_described(now)} now)"


def _described(status: SizeAndTime | None) -> str:
    if status is None:
        return "not an input"
    time = datetime.fromtimestamp(status[1] / 1e9).isoformat(" ", "microseconds")
    return f"{status[0]:,} bytes of {time}"


def kept_shards(before: Iterable[Shard], unchanged: Collection[str], finished: Collection[int]) -> list[Shard]:
    """The finished shards whose files are all unchanged."""
    return [
        shard for shard in before if shard.number in finished and all(piece.path in unchanged for piece in shard.pieces)
    ]


def refuse_to_lose(before: Iterable[Shard], changes: InputChanges, finished: Collection[int], folder: str) -> None:
    """Refuse an input that leaves out files whose shards are finished: it may be meant for another run.

    A file that is no longer there cannot be meant, and is the caller's to leave out.

    Raises:
        OptionError: it does.
    """
    for shard in before:
        for piece in shard.pieces:
            if shard.number in finished and piece.path not in changes.now and os.path.exists(piece.path):
                raise OptionError(
                    f"{folder}: holds what a run with other inputs has done of {Place(piece.path).name}, which is "
                    "there and not given now. Give it again to go on with that run, or --overwrite to leave it out"
                )


def plan_again(
    paths: Sequence[str], before: Sequence[Shard], kept: Sequence[Shard], unchanged: set[str]
) -> list[Shard]:
    """The shards of today's input: those that are kept, with their numbers, and new ones for the rest of it.

    Args:
        paths: today's input files, in order.
        before: the shards that were planned, which cover all files that are unchanged.

    Raises:
        As ``plan_shards``.
    """
    pieces_before: dict[str, list[Piece]] = {}
    for shard in before:
        for piece in shard.pieces:
            pieces_before.setdefault(piece.path, []).append(piece)
    pieces: list[Piece] = []
    for path in paths:
        pieces += pieces_before[path] if path in unchanged else file_pieces(path)
    numbers = count(1 + max((shard.number for shard in before), default=-1))
    left = sum(piece.num_bytes for piece in pieces) - sum(shard.num_bytes for shard in kept)
    shards = []
    for is_kept, run in groupby(_with_kept(pieces, kept), key=lambda part: isinstance(part, Shard)):
        if is_kept:
            shards += run
            continue
        for group in grouped(run, left):
            shards.append(Shard(next(numbers), tuple(group)))
            left -= shards[-1].num_bytes
    return shards


def _with_kept(pieces: Sequence[Piece], kept: Iterable[Shard]) -> Iterator[Piece | Shard]:
    """Pieces in order, and in place of those of a shard that is kept the shard, if they still follow one another."""
    by_first = {shard.pieces[0]: shard for shard in kept}
    place = 0
    while place < len(pieces):
        shard = by_first.get(pieces[place])
        if shard is not None and tuple(pieces[place : place + len(shard.pieces)]) == shard.pieces:
            yield shard
            place += len(shard.pieces)
        else:
            yield pieces[place]
            place += 1
