"""Input files to raw documents. The format is detected from the content, not from the name."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from ...errors import InputError
from . import parquet
from .compression import chunks_of
from .documents import STANDARD_INPUT, Batch, Location
from .jsonl import LineBatch, count_line_starts, line_batches, line_chunks

START_BYTES = 512
"""Enough to detect a file's format."""


@dataclass(frozen=True)
class Piece:
    """A part of an input file, or all of it."""

    path: str
    """As ``--input`` names the file."""
    num_bytes: int
    """Bytes of the file on disk that it covers; of Parquet, an estimate."""
    begin: int = 0
    end: int | None = None
    """Bytes of a plain JSON Lines file, row groups of a Parquet file; None for all."""
    segment: str | None = None
    """Where these bytes are, if they came through a pipe and were written to disk."""


def read_batches(piece: Piece, keys: Sequence[str]) -> Iterator[tuple[Batch, float]]:
    """The raw documents of a piece of a file of any known format, in order, in constant memory.

    Args:
        keys: those that will be asked for; of Parquet, only their columns are read.

    Yields:
        Each batch, and the share of the piece that has been read with it.

    Raises:
        InputError: the file cannot be read, or its format is unknown.
        OptionError: the library for its format is not installed.
    """
    name, size = Location(piece.path).name, max(1, piece.num_bytes)
    try:
        with opened(piece.segment or piece.path) as file:
            if piece.segment:
                for batch in line_batches(chunks_of(file, name), piece.path, piece.begin, is_checked=True):
                    yield batch, file.tell() / size
                return
            start = start_of(file, START_BYTES)
            if start.startswith(parquet.MAGIC):
                yield from parquet.row_batches(file, piece.path, keys, piece.begin, piece.end)
            elif piece.end is None:
                for batch in line_batches(chunks_of(file, name, start), piece.path):
                    yield batch, file.tell() / size
            else:
                first_byte, chunks = line_chunks(file, piece.begin, piece.end)
                for batch in line_batches(chunks, piece.path, first_byte, is_checked=True):
                    yield batch, (file.tell() - piece.begin) / size
    except OSError as error:
        raise InputError(f"{name}: cannot be read: {error.strerror or error}") from None


def stream_batches(path: str) -> Iterator[LineBatch]:
    """The raw documents of a stream that can be read only once: standard input, a pipe.

    Raises:
        InputError: it cannot be read, or is not JSON Lines, compressed or not.
        OptionError: the library for its compression is not installed.
    """
    name = Location(path).name
    try:
        with opened(path) as file:
            start = start_of(file, START_BYTES)
            if start.startswith(parquet.MAGIC):
                raise InputError(f"{name}: is Parquet, which cannot be read from a pipe; give the file's path")
            yield from line_batches(chunks_of(file, name, start), path)
    except OSError as error:
        raise InputError(f"{name}: cannot be read: {error.strerror or error}") from None


def count_lines(piece: Piece) -> int:
    """How many lines a piece of a JSON Lines file has.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        with opened(piece.segment or piece.path) as file:
            begin, end = (0, piece.num_bytes) if piece.segment else (piece.begin, piece.end or piece.num_bytes)
            return count_line_starts(file, begin, end)
    except OSError as error:
        raise InputError(f"{Location(piece.path).name}: cannot be read: {error.strerror or error}") from None


def opened(path: str) -> BinaryIO:
    """An input, open for reading.

    Raises:
        InputError: it is standard input, which is closed.
        OSError: it cannot be opened.
    """
    if path != STANDARD_INPUT:
        return open(path, "rb")
    if sys.stdin is None:
        raise InputError("standard input: is closed")
    return open(sys.stdin.fileno(), "rb", closefd=False)


def start_of(file: BinaryIO, size: int) -> bytes:
    """The first ``size`` bytes, or all if there are fewer, also of a pipe that gives them in small chunks."""
    start = b""
    while len(start) < size and (more := file.read(size - len(start))):
        start += more
    return start
