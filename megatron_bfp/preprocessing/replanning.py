"""A job whose input files have changed since it began: which finished tasks are kept, and which are done again.

A finished task is kept if all of its files are unchanged by path, size and modification time, and its objects by URL,
size and ETag. Its documents are those that a job begun now would write, and documents are joined in the order of the
current input. So the datasets are byte for byte those of a job begun now.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import count

from ..errors import OptionError
from .plan import Task, file_pieces, grouped
from .readers.documents import Location
from .readers.inputs import Piece
from .readers.storage import exists

SizeAndVersion = tuple[int, int | str]
"""An input's size in bytes, and a file's modification time in nanoseconds or an object's version: its ETag."""
SHOWN = 3
"""Changed files that a message names."""


@dataclass(frozen=True)
class InputChanges:
    """How the input files have changed since a job began."""

    before: dict[str, SizeAndVersion]
    """By path."""
    now: dict[str, SizeAndVersion]
    """By path."""

    @classmethod
    def between(cls, before: Iterable[Sequence], now: Iterable[Sequence]) -> "InputChanges":
        """From the ``inputs`` of two jobs' identities."""
        return cls(*({path: tuple(rest) for path, *rest in inputs} for inputs in (before, now)))

    @property
    def unchanged(self) -> set[str]:
        """The paths of unchanged files."""
        return {path for path, status in self.now.items() if self.before.get(path) == status}

    def __str__(self) -> str:
        changes = list(self._described())
        more = f" and {len(changes) - SHOWN} more" if len(changes) > SHOWN else ""
        return ", ".join(changes[:SHOWN]) + more if changes else "the order of its inputs"

    def _described(self) -> Iterator[str]:
        for path in dict.fromkeys([*self.now, *self.before]):
            before, now = self.before.get(path), self.now.get(path)
            if before != now:
                yield f"{Location(path).name} ({_described(before)} before, {_described(now)} now)"


def _described(status: SizeAndVersion | None) -> str:
    if status is None:
        return "not an input"
    size, version = status
    if isinstance(version, str):
        return f"{size:,} bytes, version {version}"
    time = datetime.fromtimestamp(version / 1e9).isoformat(" ", "microseconds")
    return f"{size:,} bytes of {time}"


def kept_tasks(before: Iterable[Task], unchanged: Collection[str], finished: Collection[int]) -> list[Task]:
    """The finished tasks whose files are all unchanged."""
    return [
        task for task in before if task.number in finished and all(piece.path in unchanged for piece in task.pieces)
    ]


def refuse_to_lose(before: Iterable[Task], changes: InputChanges, finished: Collection[int], folder: str) -> None:
    """Refuse inputs that leave out an existing file with finished tasks: they may be meant for another job.

    A file that no longer exists may be left out.

    Raises:
        OptionError: such a file is left out.
    """
    for task in before:
        for piece in task.pieces:
            if task.number in finished and piece.path not in changes.now and exists(piece.path):
                raise OptionError(
                    f"{folder}: holds finished work on {Location(piece.path).name}, which is there and not given now. "
                    "Give it again to resume that job, or give --overwrite to leave it out"
                )


def plan_again(
    paths: Sequence[str],
    before: Sequence[Task],
    kept: Sequence[Task],
    unchanged: set[str],
    text_unit: str | None = None,
) -> list[Task]:
    """The tasks of the current input: the kept ones, with their numbers, and new ones for everything else.

    Args:
        paths: the current input files, in order.
        before: the tasks that were planned; they cover all unchanged files.
        kept: those of them that are kept.
        unchanged: the paths of unchanged files.
        text_unit: as for ``plan_tasks``.

    Raises:
        As ``plan_tasks``.
    """
    pieces_before: dict[str, list[Piece]] = {}
    for task in before:
        for piece in task.pieces:
            pieces_before.setdefault(piece.path, []).append(piece)
    pieces: list[Piece] = []
    for path in paths:
        pieces += pieces_before[path] if path in unchanged else file_pieces(path, text_unit)
    numbers = count(1 + max((task.number for task in before), default=-1))
    left = sum(piece.num_bytes for piece in pieces) - sum(task.num_bytes for task in kept)
    tasks: list[Task] = []
    for new_pieces, kept_task in _split_at_kept(pieces, kept):
        for group in grouped(new_pieces, left):
            tasks.append(Task(next(numbers), tuple(group)))
            left -= tasks[-1].num_bytes
        if kept_task is not None:
            tasks.append(kept_task)
    return tasks


def _split_at_kept(pieces: Sequence[Piece], kept: Iterable[Task]) -> Iterator[tuple[list[Piece], Task | None]]:
    """Split the pieces at tasks that are kept, if a task's pieces still follow one another.

    Yields:
        The pieces before a kept task, which are in none, and the task; None at the end.
    """
    by_first = {task.pieces[0]: task for task in kept}
    new_pieces: list[Piece] = []
    index = 0
    while index < len(pieces):
        task = by_first.get(pieces[index])
        if task is not None and tuple(pieces[index : index + len(task.pieces)]) == task.pieces:
            yield new_pieces, task
            new_pieces = []
            index += len(task.pieces)
        else:
            new_pieces.append(pieces[index])
            index += 1
    yield new_pieces, None
