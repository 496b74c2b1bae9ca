"""Arrow: the messages of a stream or file are read in order, and each row is one document; see ``columns``.

Both forms hold the same messages: a schema, then record batches, then a mark of the end. A file has a magic before them
and an index behind. Hugging Face's ``Dataset.save_to_disk`` writes streams. A large file is cut between record batches;
their sizes are in headers of some hundred bytes, which are read alone. If the mark of the end is missing, documents
may be missing, and that is an error.

Source: Apache Arrow, "Columnar Format", sections "Encapsulated message format" and "IPC Streaming Format".
"""

import io
import struct
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

from ...errors import InputError, OptionError
from .columns import BATCH_BYTES, MAX_ROWS, RowBatch, column_of, values_of
from .documents import Location

FILE_MAGIC, CONTINUATION = b"ARROW1\x00\x00", b"\xff\xff\xff\xff"
MAGICS = (FILE_MAGIC, CONTINUATION)
END = CONTINUATION + bytes(4)
SCHEMA, DICTIONARY, RECORD_BATCH = 1, 2, 3
"""Kinds of messages."""
LARGEST_HEADER = 1 << 28


class RowRange(NamedTuple):
    """Consecutive record batches of a file."""

    begin: int
    """First byte."""
    end: int
    """The byte after the last."""
    first_row: int
    """Counted from 1."""


class _Message(NamedTuple):
    kind: int
    begin: int
    end: int
    """Bytes of the file, body included."""
    num_rows: int


def record_batches(file: BinaryIO, path: str) -> list[RowRange] | None:
    """Where each record batch of a file is; None if the file cannot be cut, because dictionaries belong to all of it.

    Raises:
        InputError: the file is damaged or cut off.
    """
    ranges, row = [], 1
    for message in _messages(file, path):
        if message.kind == DICTIONARY:
            return None
        if message.kind == RECORD_BATCH:
            ranges.append(RowRange(message.begin, message.end, row))
            row += message.num_rows
    return ranges


def row_batches(
    file: BinaryIO, path: str, keys: Sequence[str], begin: int = 0, end: int | None = None, first_row: int = 1
) -> Iterator[tuple[RowBatch, float]]:
    """Batches of about ``columns.BATCH_BYTES`` of the values under ``keys``, in order.

    Args:
        keys: names of columns, or of fields in columns of structs.
        begin, end: the bytes of the record batches to read, as ``record_batches`` says; an end of None for the file.
        first_row: of these, counted from 1.

    Yields:
        Each batch, and the share of the bytes that has been read with it.

    Raises:
        InputError: the file is damaged or cut off, or a column is missing or holds no text.
        OptionError: pyarrow is not installed.
    """
    try:
        import pyarrow
        from pyarrow import ipc
    except ImportError:
        raise OptionError("Arrow needs the pyarrow package: pip install 'megatron-bfp[preprocess]'") from None
    name, row = Location(path).name, first_row
    size = max(1, (file.seek(0, io.SEEK_END) if end is None else end) - begin)
    first = next(_messages(file, path))
    try:
        file.seek(first.begin)
        schema = ipc.read_schema(pyarrow.py_buffer(file.read(first.end - first.begin)))
        columns = [column_of(schema, key, name) for key in keys]
        options = ipc.IpcReadOptions(included_fields=sorted({_index(schema, column) for column in columns}))
        parts = [(first.begin, None)] if end is None else [(first.begin, first.end), (begin, end)]
        for rows in ipc.open_stream(_Stream(file, parts, path), options=options):
            rows.validate()  # before its size is asked for, which ends the process if lengths are wrong
            share = (file.tell() - begin) / size
            step = max(1, min(MAX_ROWS, BATCH_BYTES * rows.num_rows // max(1, rows.nbytes)))
            for start in range(0, rows.num_rows, step):
                part = rows.slice(start, step)
                values = tuple(values_of(part, key, is_checked=False) for key in keys)
                num_bytes = sum(len(value) for column in values for value in column if value is not None)
                yield RowBatch(path, row, values, num_bytes), share
                row += part.num_rows
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, LookupError) as error:
        reason = (str(error).strip() or type(error).__name__).split("\n")[0]
        raise InputError(f"{name}: damaged or unusual Arrow, from row {row} on: {reason}") from None


def _index(schema: Any, column: str) -> int:
    """The number of the column at the top that holds a column."""
    return schema.get_field_index(column if column in schema.names else column.split(".")[0])


class _Stream(io.RawIOBase):
    """What pyarrow reads: parts of a file, each of whole messages, and then the mark of the end.

    Args:
        parts: first byte and the byte after the last; None for a part that has the mark itself.
    """

    def __init__(self, file: BinaryIO, parts: Sequence[tuple[int, int | None]], path: str) -> None:
        self._file, self._path, self._mark = file, path, END
        (self._position, self._end), *self._parts = parts
        self._file_bytes = file.seek(0, io.SEEK_END)
        file.seek(self._position)

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """The next bytes, all of them. No message begins in one part and ends in another, and neither does a read."""
        if self._position == self._end:
            if not self._parts:
                content, self._mark = self._mark[:size], self._mark[size:]
                return content
            self._position, self._end = self._parts.pop(0)
            self._file.seek(self._position)
        if self._position + size > self._file_bytes:  # damaged data may ask for more than there is memory
            raise _cut_off(self._path, self._file_bytes)
        content = self._file.read(size)
        self._position += len(content)
        return content


def _messages(file: BinaryIO, path: str) -> Iterator[_Message]:
    """Kind and bytes of each message. Reads their headers alone."""
    file_bytes = file.seek(0, io.SEEK_END)
    file.seek(0)
    position = len(FILE_MAGIC) if file.read(len(FILE_MAGIC)) == FILE_MAGIC else 0
    while True:
        file.seek(position)
        prefix = file.read(8)
        if len(prefix) < 8:
            raise _cut_off(path, file_bytes)
        if prefix == END:
            return
        size = int.from_bytes(prefix[4:], "little", signed=True)
        if prefix[:4] != CONTINUATION or not 0 < size < LARGEST_HEADER:
            raise _damaged(path, position)
        header = file.read(size)
        if len(header) < size:
            raise _cut_off(path, file_bytes)
        try:
            kind, body_bytes, num_rows = _parsed(header)
        except struct.error:
            raise _damaged(path, position) from None
        end = position + 8 + size + body_bytes
        if body_bytes < 0 or num_rows < 0 or not position and kind != SCHEMA:
            raise _damaged(path, position)
        if end > file_bytes:
            raise _cut_off(path, file_bytes)
        yield _Message(kind, position, end, num_rows)
        position = end


def _parsed(header: bytes) -> tuple[int, int, int]:
    """Kind, bytes of the body and number of rows of a message: fields 1, 3 and, inside field 2, 0 of flatbuffers.

    Raises:
        struct.error: the bytes are none.
    """
    (message,) = struct.unpack_from("<I", header)
    (kind,) = _field(header, message, 1, "<B")
    (body_bytes,) = _field(header, message, 3, "<q")
    if kind != RECORD_BATCH:
        return kind, body_bytes, 0
    at = message + _offset(header, message, 2)
    (num_rows,) = _field(header, at + struct.unpack_from("<I", header, at)[0], 0, "<q")
    return kind, body_bytes, num_rows


def _field(header: bytes, table: int, number: int, form: str) -> tuple[int]:
    """A field of a flatbuffers table; 0 if it is left out."""
    offset = _offset(header, table, number)
    return struct.unpack_from(form, header, table + offset) if offset else (0,)


def _offset(header: bytes, table: int, number: int) -> int:
    """Where a field is, counted from the table, whose first four bytes say where its own table of offsets is."""
    offsets = table - struct.unpack_from("<i", header, table)[0]
    if offsets < 0:
        raise struct.error("a table of offsets before the first byte")
    at = 4 + 2 * number
    return struct.unpack_from("<H", header, offsets + at)[0] if at < struct.unpack_from("<H", header, offsets)[0] else 0


def _damaged(path: str, byte: int) -> InputError:
    return InputError(f"{Location(path).name}: damaged or unusual Arrow: no message begins at byte {byte:,}")


def _cut_off(path: str, byte: int) -> InputError:
    return InputError(
        f"{Location(path).name}: its Arrow data ends at byte {byte:,} without the mark of its end: the file is cut "
        "off; get a whole copy"
    )
