"""What readers give to workers: batches of raw documents with their locations, records of texts, bad documents."""

import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

STANDARD_INPUT = "-"
"""The name of standard input among input files, as ``--input`` takes it."""
MAX_DOCUMENT_BYTES = 1 << 30


class Location(NamedTuple):
    """Where a raw document is."""

    path: str
    line: int | None = None
    """Of JSON Lines or plain text, counted from 1; while only a piece of a file is read, from the piece's first."""
    byte: int | None = None
    """Where that line begins in the (decompressed) file, counted from 0."""
    row: int | None = None
    """Of a Parquet or Arrow file, or a record of a WARC file, counted from 1."""

    @property
    def name(self) -> str:
        """What messages call the file."""
        if self.path == STANDARD_INPUT:
            return "standard input"
        return os.fsencode(self.path).decode("utf-8", errors="backslashreplace")

    def __str__(self) -> str:
        if self.row is not None:
            return f"{self.name}: row {self.row}"
        return f"{self.name}:{self.line} (byte {self.byte})"


class BadDocument(NamedTuple):
    """A document that cannot be used."""

    location: Location
    reason: str

    def __str__(self) -> str:
        return f"{self.location}: {self.reason}"


class Record(NamedTuple):
    """One document's texts."""

    location: Location
    texts: Sequence[str]
    """[keys]."""


class Batch(Protocol):
    """Consecutive raw documents of one input file, a few megabytes."""

    @property
    def num_bytes(self) -> int:
        """Of the documents, decompressed: what MB/s are counted in."""

    @property
    def num_lines(self) -> int:
        """Of JSON Lines and plain text; 0 if documents have no lines."""

    @property
    def num_left_out(self) -> int:
        """Records among them that hold no text: HTML in a WARC file."""

    def records(self, keys: Sequence[str]) -> Iterator[Record | BadDocument]:
        """Each document's texts under ``keys``, in order, or what is wrong with it."""


def text_of(value: object, key: str) -> str:
    """``value``, if it is a text.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(value, str):
        raise ValueError(f"{key!r} holds {a_kind(value)}, not text")
    return value


def a_kind(value: object, prefix: str = "") -> str:
    """The kind of a parsed value, with its article: ``a list``, ``an int``; with a prefix, ``a JSON int``."""
    if value is None:
        return "null"
    kind = prefix + type(value).__name__
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def encodable_text_of(value: object, key: str) -> str:
    """``value``, if it is a text that can be encoded. For parsers that do not check that themselves.

    Raises:
        ValueError: it is something else, or holds half of a surrogate pair.
    """
    text = text_of(value, key)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"character {error.start + 1} of {key!r} is half of a surrogate pair, not text") from None
    return text
