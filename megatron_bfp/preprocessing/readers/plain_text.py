"""Plain text: a document is a file, a paragraph or a line. Nothing in a file says which, so an option does.

Paragraphs are separated by blank lines: lines that hold white space alone. Line ends inside a document stay as they
are. A document that is not UTF-8 is a bad document.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ...errors import InputError
from .documents import MAX_DOCUMENT_BYTES, BadDocument, Location, Record
from .file_kinds import BOM
from .jsonl import LineBatch, line_batches, missing_key

FILE, PARAGRAPH, LINE = "file", "paragraph", "line"
UNITS = (FILE, PARAGRAPH, LINE)
"""What a document is: values of ``--text-documents``."""
KEY = "text"
"""Of texts that have no key of their own."""
BLANK_LINE = re.compile(rb"^[^\S\n]*\n", re.MULTILINE)


@dataclass(frozen=True)
class LinesOfText(LineBatch):
    """Lines of text, each a document."""

    def records(self, keys: Sequence[str]) -> Iterator[Record | BadDocument]:
        """As ``Batch.records``. Blank lines are skipped."""
        for number, (begin, end) in enumerate(self._lines, self.first_line):
            if content := self.content[begin:end].rstrip(b"\r"):
                yield text_record(Location(self.path, number, self.first_byte + begin), content, keys)


@dataclass(frozen=True)
class Paragraphs(LineBatch):
    """Whole paragraphs of text, each a document."""

    def records(self, keys: Sequence[str]) -> Iterator[Record | BadDocument]:
        """As ``Batch.records``."""
        first: tuple[int, int] | None = None
        for number, (begin, end) in enumerate([*self._lines, (len(self.content), len(self.content))], self.first_line):
            if self.content[begin:end].strip():
                first, last = first or (number, begin), end
            elif first:
                location = Location(self.path, first[0], self.first_byte + first[1])
                yield text_record(location, self.content[first[1] : last].rstrip(b"\r"), keys)
                first = None


@dataclass(frozen=True)
class WholeText(LineBatch):
    """All lines of a file, which are one document."""

    def records(self, keys: Sequence[str]) -> Iterator[Record | BadDocument]:
        """As ``Batch.records``."""
        yield text_record(Location(self.path, self.first_line, self.first_byte), self.content, keys)


def text_batches(chunks: Iterable[bytes], path: str, unit: str, first_byte: int = 0) -> Iterator[LineBatch]:
    """Batches of whole documents, in order.

    Args:
        chunks: the bytes of the file; of one that is read by line, also of a piece that begins where a line does.
        unit: what a document is, one of ``UNITS``.
        first_byte: where the piece begins in the file.

    Raises:
        InputError: a document is longer than ``MAX_DOCUMENT_BYTES``.
    """
    batches = line_batches(chunks, path, first_byte, is_checked=True, make=LinesOfText)
    return batches if unit == LINE else _joined(batches, unit, first_byte)


def text_record(location: Location, content: bytes, keys: Sequence[str]) -> Record | BadDocument:
    """A document that is text alone, which is under the key ``KEY``."""
    for key in keys:
        if key != KEY:
            return BadDocument(location, missing_key(key, [KEY]))
    try:
        return Record(location, [content.removeprefix(BOM).decode("utf-8")] * len(keys))
    except UnicodeDecodeError as error:
        return BadDocument(location, f"byte {error.start + 1} of the document is not UTF-8")


def _joined(batches: Iterable[LineBatch], unit: str, byte: int) -> Iterator[LineBatch]:
    """Batches of lines, joined until a document ends: at a blank line, or at the end of the file."""
    make = Paragraphs if unit == PARAGRAPH else WholeText
    held: list[bytes] = []
    size, line = 0, 1
    for batch in batches:
        content = batch.content
        cut = max((match.end() for match in BLANK_LINE.finditer(content)), default=0) if unit == PARAGRAPH else 0
        if cut:
            whole = make(batch.path, line, byte, b"".join([*held, content[:cut]]))
            yield whole
            line, byte, held, size = line + whole.num_lines, byte + whole.num_bytes, [], 0
        held.append(content[cut:])
        size += len(content) - cut
        if size > MAX_DOCUMENT_BYTES:
            raise InputError(
                f"{Location(batch.path, line, byte)}: this {unit} is longer than {MAX_DOCUMENT_BYTES >> 30} GiB"
            )
    if size:
        yield make(batch.path, line, byte, b"".join(held))
