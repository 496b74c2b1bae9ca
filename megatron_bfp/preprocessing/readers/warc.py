"""WARC: records that are plain text are documents, others are counted and left out.

Text are conversions (those of a WET file), responses and resources whose own type is text/plain. Of these kinds of
records others are counted. HTML is not extracted: there are tools for that. A record that is shorter than its header
says is an error: the file is cut off.

Source: ISO 28500 (WARC 1.1), sections 5 and 6. The library does not report a record that is cut off, nor one without
``Content-Length``.
"""

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import InputError, OptionError
from .documents import MAX_DOCUMENT_BYTES, BadDocument, Location, Record
from .plain_text import text_record

MAGIC = b"WARC/"
BATCH_BYTES = 1 << 21
READ_BYTES = 1 << 20
PLAIN_TEXT = "text/plain"


@dataclass
class WarcBatch:
    """Consecutive records of a file."""

    path: str
    documents: list[tuple[int, bytes | str]] = field(default_factory=list)
    """Number of the record, counted from 1, and its text in UTF-8; or the name of an encoding that it is not in."""
    num_bytes: int = 0
    num_left_out: int = 0
    num_lines = 0

    def records(self, keys: Sequence[str]) -> Iterator[Record | BadDocument]:
        """As ``Batch.records``."""
        for number, content in self.documents:
            location = Location(self.path, row=number)
            if isinstance(content, str):
                yield BadDocument(location, f"is not text in {content}, the encoding that it names")
            else:
                yield text_record(location, content, keys)


def warc_batches(chunks: Iterable[bytes], path: str) -> Iterator[WarcBatch]:
    """Batches of about ``BATCH_BYTES`` of text, in order; the last may hold none.

    Args:
        chunks: the decompressed bytes of the file.

    Raises:
        InputError: the file is damaged or cut off.
        OptionError: fastwarc is not installed.
    """
    try:
        from fastwarc.warc import ArchiveIterator, WarcRecordType
    except ImportError:
        raise OptionError("WARC needs the fastwarc package: pip install 'megatron-bfp[warc]'") from None
    with_documents = (WarcRecordType.response, WarcRecordType.resource, WarcRecordType.conversion)
    stream, batch, number = _Stream(chunks), WarcBatch(path), 0
    records = ArchiveIterator(stream, parse_http=False, stream_detect=False)
    while True:
        try:
            record = next(records, None)
        except OSError as error:
            raise InputError(f"{Location(path).name}: damaged WARC after record {number}: {error}") from None
        if record is None:
            break
        number += 1
        content = _content(record, Location(path, row=number))
        if record.record_type not in with_documents:
            continue
        text = None if content is None else _text(record, content)
        if text is None:
            batch.num_left_out += 1
            continue
        batch.documents.append((number, text))
        batch.num_bytes += len(text)
        if batch.num_bytes >= BATCH_BYTES:
            yield batch
            batch = WarcBatch(path)
    if stream.last != b"\n":
        raise _cut_off(Location(path, row=number))
    if batch.documents or batch.num_left_out:
        yield batch


def _content(record: Any, location: Location) -> bytes | None:
    """All bytes of a record; None if they are more than a document may have.

    Raises:
        InputError: the record is shorter than its header says.
    """
    size = record.content_length
    is_kept = size <= MAX_DOCUMENT_BYTES
    content, num_read = [], 0
    while part := record.reader.read(READ_BYTES):
        num_read += len(part)
        if is_kept:
            content.append(part)
    if num_read < size or record.headers.get("Content-Length") is None:
        raise _cut_off(location)
    return b"".join(content) if is_kept else None


def _text(record: Any, content: bytes) -> bytes | str | None:
    """The text of a record in UTF-8; None if it holds none; the name of an encoding that it is not in."""
    if not record.is_http:
        return content if _is_plain(record.headers.get("Content-Type")) else None
    record.set_bytes_content(content)
    record.parse_http(auto_decode="all")
    if not _is_plain(record.http_content_type):
        return None
    content, encoding = record.reader.read(), record.http_charset or "utf-8"
    try:
        return content if encoding == "utf-8" else content.decode(encoding).encode("utf-8")
    except (UnicodeError, LookupError):
        return encoding


def _is_plain(content_type: str | None) -> bool:
    return (content_type or "").partition(";")[0].strip().lower() == PLAIN_TEXT


def _cut_off(location: Location) -> InputError:
    return InputError(f"{location}: this WARC record is cut off; get a whole copy")


class _Stream(io.RawIOBase):
    """Chunks as a file that can be read once."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks, self._chunk = iter(chunks), b""
        self._position = 0
        self.last = b"\n"
        """The last byte that was read."""

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        """Up to ``size`` bytes; none at the end."""
        self._chunk = self._chunk or next(self._chunks, b"")
        part = self._chunk if size < 0 else self._chunk[:size]
        self._chunk = self._chunk[len(part) :]
        self._position += len(part)
        self.last = part[-1:] or self.last
        return part
