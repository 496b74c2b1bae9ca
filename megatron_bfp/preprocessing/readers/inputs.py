"""Input files to raw documents. The format is detected from the content, not from the name."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import BinaryIO

from ...errors import InputError
from . import arrow, parquet, warc
from .compression import chunks_of
from .documents import Batch, Location
from .file_kinds import check_text
from .file_names import has_json_name
from .jsonl import LineBatch, count_line_starts, line_batches, line_chunks
from .plain_text import text_batches
from .storage import opened

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
    """Bytes of a file of plain lines or of Arrow, row groups of a Parquet file; None for all."""
    segment: str | None = None
    """Where these bytes are, if they came through a pipe and were written to disk."""
    first_row: int = 1
    """Of an Arrow file, where the piece begins."""


def read_batches(piece: Piece, keys: Sequence[str], text_unit: str | None = None) -> Iterator[tuple[Batch, float]]:
    """The raw documents of a piece of a file of any known format, in order, in constant memory.

    Args:
        keys: those that will be asked for; of Parquet and Arrow, only their columns are read.
        text_unit: what a document of plain text is, one of ``plain_text.UNITS``; None if no file is plain text.

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
                for batch in _lines(chunks_of(file, name), piece.path, piece.begin, text_unit):
                    yield batch, file.tell() / size
                return
            start = start_of(file, START_BYTES)
            if start.startswith(parquet.MAGIC):
                yield from parquet.row_batches(file, piece.path, keys, piece.begin, piece.end)
            elif start.startswith(arrow.MAGICS):
                yield from arrow.row_batches(file, piece.path, keys, piece.begin, piece.end, piece.first_row)
            elif piece.end is None:
                for documents in _documents(chunks_of(file, name, start), piece.path, text_unit):
                    yield documents, file.tell() / size
            else:
                first_byte, chunks = line_chunks(file, piece.begin, piece.end)
                for batch in _lines(chunks, piece.path, first_byte, text_unit):
                    yield batch, (file.tell() - piece.begin) / size
    except OSError as error:
        raise InputError(f"{name}: cannot be read: {error.strerror or error}") from None


def text_unit_of(path: str, text_unit: str | None) -> str | None:
    """What a document of this file is, if it is of no other format; None if it is JSON Lines, as its name may say."""
    return None if has_json_name(path) else text_unit


def _documents(chunks: Iterator[bytes], path: str, text_unit: str | None) -> Iterator[Batch]:
    """The documents of a file whose (decompressed) bytes these are."""
    first = next(chunks, b"")
    chunks = chain([first], chunks)
    if first.startswith(warc.MAGIC):
        return warc.warc_batches(chunks, path)
    if unit := text_unit_of(path, text_unit):
        check_text(first, path)
        return text_batches(chunks, path, unit)
    return line_batches(chunks, path)


def _lines(chunks: Iterator[bytes], path: str, first_byte: int, text_unit: str | None) -> Iterator[LineBatch]:
    """The documents of a piece that begins where a line does."""
    if unit := text_unit_of(path, text_unit):
        return text_batches(chunks, path, unit, first_byte)
    return line_batches(chunks, path, first_byte, is_checked=True)


def stream_batches(path: str, text_unit: str | None = None) -> Iterator[LineBatch]:
    """The raw documents of a stream that can be read only once: standard input, a pipe.

    Args:
        text_unit: as for ``read_batches``.

    Raises:
        InputError: it cannot be read, or is neither JSON Lines nor plain text, compressed or not.
        OptionError: the library for its compression is not installed.
    """
    name = Location(path).name
    try:
        with opened(path) as file:
            start = start_of(file, START_BYTES)
            if start.startswith(parquet.MAGIC):
                raise InputError(f"{name}: is Parquet, which cannot be read from a pipe; give the file's path")
            chunks = chunks_of(file, name, start)
            unit = text_unit_of(path, text_unit)
            yield from text_batches(chunks, path, unit) if unit else line_batches(chunks, path)
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


def start_of(file: BinaryIO, size: int) -> bytes:
    """The first ``size`` bytes, or all if there are fewer, also of a pipe that gives them in small chunks."""
    start = b""
    while len(start) < size and (more := file.read(size - len(start))):
        start += more
    return start
