"""Input files to shards, the units of work: each is done by one process, recorded when done, and done once.

A shard is some consecutive pieces of input files. A plain JSON Lines file is cut into ranges of bytes (a line belongs
to the range in which it begins), a Parquet file into row groups; a compressed file is one piece, since its middle
cannot be found. Small files share a shard. What comes through a pipe is first written to segments on disk, which are
pieces like others; it cannot be read again, and so a run that reads a pipe cannot be resumed.

The plan depends on the inputs' sizes alone, not on the number of workers. A run keeps it: see ``run_folder``.
"""

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import InputError
from .readers import parquet
from .readers.compression import compression_of
from .readers.documents import STANDARD_INPUT, Place
from .readers.file_kinds import CHECKED_BYTES
from .readers.inputs import START_BYTES, Piece, opened, start_of, stream_batches
from .readers.jsonl import check_lines

SMALL_SHARD, LARGEST_SHARD = 32 << 20, 256 << 20
"""Bytes of input: long enough that starting a shard costs nothing, short enough that little is lost with one."""
SHARE_OF_REST = 64
"""A shard is one of so many parts of what is left: large where there is much, and smaller towards the end, so that all
workers end at about the same time."""
LAST_SHARES, SMALLEST_SHARD = 4, SMALL_SHARD // 4
"""The last shards are a share of what is left even if they are small."""
SEGMENT_BYTES = 32 << 20
"""Of what comes through a pipe, decompressed."""


@dataclass(frozen=True)
class Shard:
    """A unit of work. Shards in the order of their numbers hold all documents in the order of the input."""

    number: int
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the input files that it covers."""
        return sum(piece.num_bytes for piece in self.pieces)

    def __str__(self) -> str:
        first, *others = dict.fromkeys(Place(piece.path).name for piece in self.pieces)
        more = f" and {len(others)} more file{'s' if len(others) > 1 else ''}" if others else ""
        return f"shard {self.number} ({first}{more})"


def is_stream(path: str) -> bool:
    """Whether an input can be read once only: standard input, a pipe."""
    return path == STANDARD_INPUT or not stat.S_ISREG(os.stat(path).st_mode)


def input_bytes(paths: Sequence[str]) -> int:
    """The size of all input files, as they are on disk; streams count as 0."""
    return sum(0 if is_stream(path) else os.path.getsize(path) for path in paths)


def shard_bytes(left: int) -> int:
    """How many bytes of input the next shard has, at most and where files can be cut, of those that are left."""
    last = max(left // LAST_SHARES, SMALLEST_SHARD)
    return min(max(left // SHARE_OF_REST, min(last, SMALL_SHARD)), LARGEST_SHARD)


def plan_shards(paths: Sequence[str], segment_folder: str) -> Iterator[Shard]:
    """The shards of the inputs, in order. Streams are read as their shards are asked for.

    Args:
        segment_folder: where segments of streams are written. Whoever has used one removes it.

    Raises:
        InputError: a file cannot be read, or is none that we know.
        OptionError: a library for a file is not installed.
    """
    left = input_bytes(paths)
    for number, pieces in enumerate(grouped(_pieces(paths, segment_folder, left), left)):
        yield Shard(number, tuple(pieces))


def part_of(shards: Sequence[Shard], index: int, count: int) -> list[Shard]:
    """Consecutive shards of about one ``count``-th of all bytes: part ``index``, counted from 0."""
    total = max(1, sum(shard.num_bytes for shard in shards))
    chosen, before = [], 0
    for shard in shards:
        middle = before + shard.num_bytes / 2
        if min(int(middle * count / total), count - 1) == index:
            chosen.append(shard)
        before += shard.num_bytes
    return chosen


def grouped(pieces: Iterable[Piece], left: int) -> Iterator[list[Piece]]:
    """Consecutive pieces that fit in a shard; a segment of a stream is alone."""
    group: list[Piece] = []
    num_bytes = 0
    for piece in pieces:
        if group and (num_bytes + piece.num_bytes > shard_bytes(left) or piece.segment or group[-1].segment):
            yield group
            group, num_bytes, left = [], 0, left - num_bytes
        group.append(piece)
        num_bytes += piece.num_bytes
    if group:
        yield group


def _pieces(paths: Sequence[str], segment_folder: str, left: int) -> Iterator[Piece]:
    for number, path in enumerate(paths):
        try:
            if is_stream(path):
                yield from _segments(path, os.path.join(segment_folder, f"segment-{number}"))
            else:
                yield from _file_pieces(path, left)
                left -= os.path.getsize(path)
        except OSError as error:
            raise InputError(f"{Place(path).name}: cannot be read: {error.strerror or error}") from None


def file_pieces(path: str) -> list[Piece]:
    """The pieces of one file, cut as if it were the only input.

    Raises:
        As ``plan_shards``.
    """
    return list(_pieces([path], "", input_bytes([path])))


def _file_pieces(path: str, left: int) -> Iterator[Piece]:
    num_bytes = os.path.getsize(path)
    if num_bytes <= shard_bytes(left):
        yield Piece(path, num_bytes)
        return
    with opened(path) as file:
        start = start_of(file, START_BYTES)
        if start.startswith(parquet.MAGIC):
            sizes = parquet.row_group_sizes(file, path)
            yield from _row_group_pieces(path, num_bytes, sizes, left)
        elif compression_of(start):
            yield Piece(path, num_bytes)
        else:
            start += file.read(CHECKED_BYTES)
            check_lines(start, len(start) == num_bytes, path)
            begin = 0
            while begin < num_bytes:
                rest = num_bytes - begin
                count = -(-rest // shard_bytes(left - begin))  # equal pieces, rather than a small one at the end
                end = begin - (-rest // count)
                yield Piece(path, end - begin, begin, end)
                begin = end


def _row_group_pieces(path: str, num_bytes: int, sizes: list[int], left: int) -> Iterator[Piece]:
    """Row groups that fit in a shard together."""
    total = max(1, sum(sizes))
    first = held = before = 0
    for group, group_size in enumerate(sizes):
        begin = before * num_bytes // total
        if held and (held + group_size) * num_bytes // total > shard_bytes(left - begin):
            yield Piece(path, held * num_bytes // total, first, group)
            first, held, before = group, 0, before + held
        held += group_size
    yield Piece(path, held * num_bytes // total, first, len(sizes))


def _segments(path: str, prefix: str) -> Iterator[Piece]:
    """A stream's lines, written to files of about ``SEGMENT_BYTES``."""
    number, begin, held = 0, 0, []
    for batch in stream_batches(path):
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
