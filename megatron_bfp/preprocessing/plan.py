"""Input files to tasks, the units of work: 8 to 256 MB of input, done at once by one process and recorded when done.

A task is one or more consecutive pieces of input files. A plain JSON Lines file is cut into ranges of bytes (a line
belongs to the range in which it begins), and so is plain text with a document on each line; a Parquet file into row
groups, an Arrow file between record batches. A compressed file is one piece, because decompression cannot start in its
middle; so are WARC and other plain text. Small files share a task. Data from a pipe is first written to segments on
disk, which are pieces like others; it cannot be read again, so a job that reads a pipe cannot be resumed.

The plan depends only on the inputs' sizes, not on the number of workers. A job keeps it: see ``job_folder``.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from pathlib import Path

from ..errors import InputError
from .readers import arrow, parquet, warc
from .readers.arrow import RowRange
from .readers.compression import compression_of
from .readers.documents import Location
from .readers.file_kinds import CHECKED_BYTES, check_text
from .readers.inputs import START_BYTES, Piece, start_of, stream_batches, text_unit_of
from .readers.jsonl import check_lines
from .readers.plain_text import LINE
from .readers.storage import is_stream, of_objects, opened, size_of

SMALL_TASK, LARGEST_TASK = 32 << 20, 256 << 20
"""Bytes of input: enough that starting a task costs nothing, few enough that little is lost with one."""
SHARE_OF_REST = 64
"""A task is this fraction of the remaining bytes: large at first and smaller towards the end, so that all workers end
at about the same time."""
LAST_SHARES, SMALLEST_TASK = 4, SMALL_TASK // 4
"""The last tasks are this fraction of the remaining bytes, even if they are small."""
SEGMENT_BYTES = 32 << 20
"""Of data from a pipe, decompressed."""


@dataclass(frozen=True)
class Task:
    """A unit of work. Tasks in the order of their numbers hold all documents in the order of the input."""

    number: int
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the input files that it covers."""
        return sum(piece.num_bytes for piece in self.pieces)

    def __str__(self) -> str:
        first, *others = dict.fromkeys(Location(piece.path).name for piece in self.pieces)
        more = f" and {len(others)} more file{'s' if len(others) > 1 else ''}" if others else ""
        return f"task {self.number} ({first}{more})"


def input_bytes(paths: Sequence[str]) -> int:
    """The size of all input files, as they are on disk; streams count as 0."""
    return sum(map(size_of, paths))


def task_bytes(left: int) -> int:
    """The largest number of input bytes of the next task, if files can be cut there.

    Args:
        left: bytes of input that are not in a task yet.
    """
    last = max(left // LAST_SHARES, SMALLEST_TASK)
    return min(max(left // SHARE_OF_REST, min(last, SMALL_TASK)), LARGEST_TASK)


def plan_tasks(paths: Sequence[str], segment_folder: str, text_unit: str | None = None) -> Iterator[Task]:
    """The tasks of the inputs, in order. Streams are read as their tasks are taken from the iterator.

    Args:
        segment_folder: where segments of streams are written. The caller removes a segment when its task is done.
        text_unit: what a document of plain text is; None if no file is plain text.

    Raises:
        InputError: a file cannot be read, or its format is unknown.
        OptionError: the library for a file's format is not installed.
    """
    left = input_bytes(paths)
    for number, pieces in enumerate(grouped(_pieces(paths, segment_folder, left, text_unit), left)):
        yield Task(number, tuple(pieces))


def part_of(tasks: Sequence[Task], index: int, count: int) -> list[Task]:
    """Consecutive tasks of about one ``count``-th of all bytes: part ``index``, counted from 0."""
    total = max(1, sum(task.num_bytes for task in tasks))
    chosen, before = [], 0
    for task in tasks:
        middle = before + task.num_bytes / 2
        if min(int(middle * count / total), count - 1) == index:
            chosen.append(task)
        before += task.num_bytes
    return chosen


def grouped(pieces: Iterable[Piece], left: int) -> Iterator[list[Piece]]:
    """Groups of consecutive pieces, one for each task; a segment of a stream is alone in its task.

    Args:
        left: bytes of input in all pieces.
    """
    group: list[Piece] = []
    num_bytes = 0
    for piece in pieces:
        if group and (num_bytes + piece.num_bytes > task_bytes(left) or piece.segment or group[-1].segment):
            yield group
            group, num_bytes, left = [], 0, left - num_bytes
        group.append(piece)
        num_bytes += piece.num_bytes
    if group:
        yield group


def _pieces(paths: Sequence[str], segment_folder: str, left: int, text_unit: str | None) -> Iterator[Piece]:
    before = dict(zip(paths, accumulate(map(size_of, paths), initial=0)))  # bytes of the inputs before each
    planned = of_objects(lambda url: list(_file_pieces(url, left - before[url], text_unit)), paths)
    for number, path in enumerate(paths):
        try:
            if path in planned:
                yield from planned[path]
            elif is_stream(path):
                yield from _segments(path, os.path.join(segment_folder, f"segment-{number}"), text_unit)
            else:
                yield from _file_pieces(path, left - before[path], text_unit)
        except OSError as error:
            raise InputError(f"{Location(path).name}: cannot be read: {error.strerror or error}") from None


def file_pieces(path: str, text_unit: str | None = None) -> list[Piece]:
    """The pieces of one file, cut as if it were the only input.

    Args:
        text_unit: as for ``plan_tasks``.

    Raises:
        As ``plan_tasks``.
    """
    return list(_pieces([path], "", input_bytes([path]), text_unit))


def _file_pieces(path: str, left: int, text_unit: str | None) -> Iterator[Piece]:
    num_bytes = size_of(path)
    if num_bytes <= task_bytes(left):
        yield Piece(path, num_bytes)
        return
    with opened(path, is_read_ahead=False) as file:
        start = start_of(file, START_BYTES)
        if start.startswith(parquet.MAGIC):
            sizes = parquet.row_group_sizes(file, path)
            yield from _row_group_pieces(path, num_bytes, sizes, left)
        elif start.startswith(arrow.MAGICS):
            yield from _arrow_pieces(path, num_bytes, arrow.record_batches(file, path), left)
        elif compression_of(start) or start.startswith(warc.MAGIC):
            yield Piece(path, num_bytes)
        elif unit := text_unit_of(path, text_unit):
            check_text(start, path)
            yield from _range_pieces(path, num_bytes, left) if unit == LINE else [Piece(path, num_bytes)]
        else:
            start += file.read(CHECKED_BYTES)
            check_lines(start, len(start) == num_bytes, path)
            yield from _range_pieces(path, num_bytes, left)


def _range_pieces(path: str, num_bytes: int, left: int) -> Iterator[Piece]:
    """Ranges of bytes of a file of plain lines."""
    begin = 0
    while begin < num_bytes:
        rest = num_bytes - begin
        count = -(-rest // task_bytes(left - begin))  # equal pieces, rather than a small one at the end
        end = begin - (-rest // count)
        yield Piece(path, end - begin, begin, end)
        begin = end


def _row_group_pieces(path: str, num_bytes: int, sizes: list[int], left: int) -> Iterator[Piece]:
    """Consecutive row groups that fit in one task."""
    total = max(1, sum(sizes))
    first = held = before = 0
    for group, group_size in enumerate(sizes):
        begin = before * num_bytes // total
        if held and (held + group_size) * num_bytes // total > task_bytes(left - begin):
            yield Piece(path, held * num_bytes // total, first, group)
            first, held, before = group, 0, before + held
        held += group_size
    yield Piece(path, held * num_bytes // total, first, len(sizes))


def _arrow_pieces(path: str, num_bytes: int, batches: list[RowRange] | None, left: int) -> Iterator[Piece]:
    """Consecutive record batches that fit in one task. The first piece has the bytes before them, too."""
    if not batches:
        yield Piece(path, num_bytes)
        return
    first, before = batches[0], 0
    for batch, following in zip_longest(batches, batches[1:]):
        if following is None:
            yield Piece(path, num_bytes - before, first.begin, batch.end, first_row=first.first_row)
        elif following.end - before > task_bytes(left - before):
            yield Piece(path, batch.end - before, first.begin, batch.end, first_row=first.first_row)
            first, before = following, batch.end


def _segments(path: str, prefix: str, text_unit: str | None) -> Iterator[Piece]:
    """A stream's lines, written to files of about ``SEGMENT_BYTES``."""
    number, begin, held = 0, 0, []
    for batch in stream_batches(path, text_unit):
        held.append(batch.content)
        if sum(map(len, held)) >= SEGMENT_BYTES:
            yield _segment(path, f"{prefix}-{number}", begin, held)
            number, begin, held = number + 1, batch.first_byte + batch.num_bytes, []
    if held:
        yield _segment(path, f"{prefix}-{number}", begin, held)


def _segment(path: str, segment: str, begin: int, contents: list[bytes]) -> Piece:
    num_bytes = sum(map(len, contents))
    try:
        with open(segment, "wb") as file:
            file.writelines(contents)
    except OSError as error:
        Path(segment).unlink(missing_ok=True)
        raise InputError(f"{segment}: cannot be written: {error.strerror}; is the disk full?") from None
    return Piece(path, num_bytes, begin, begin + num_bytes, segment)
