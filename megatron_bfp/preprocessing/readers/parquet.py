"""Parquet: row groups are read in batches of rows, and each row is one document. Only the columns asked for are read.

Texts travel as bytes and are decoded by the process that tokenizes them. So a value that is not UTF-8 is a bad
document, not a bad file. Text, large text, dictionary and binary columns are treated alike.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from ...errors import InputError, OptionError
from .documents import MAX_DOCUMENT_BYTES, BadDocument, Location, Record
from .jsonl import missing_key

MAGIC = b"PAR1"
BATCH_BYTES = 1 << 21
MAX_ROWS = 1 << 12
READ_BYTES = 1 << 20


@dataclass(frozen=True)
class RowBatch:
    """Consecutive rows of a Parquet file."""

    path: str
    first_row: int
    """Counted from 1."""
    columns: tuple[list[bytes | None], ...]
    """For each key that was asked for, the values of the rows."""

    num_bytes: int
    """As ``Batch.num_bytes``: of the values."""
    num_lines = 0

    def records(self, keys: Sequence[str]) -> Iterator[Record | BadDocument]:
        """Each row's texts under ``keys``, the ones the batch was read for, or what is wrong with it."""
        for number, values in enumerate(zip(*self.columns, strict=True), self.first_row):
            location = Location(self.path, row=number)
            try:
                yield Record(location, [_text(value, key) for value, key in zip(values, keys, strict=True)])
            except ValueError as error:
                yield BadDocument(location, str(error))


def row_group_sizes(file: BinaryIO, path: str) -> list[int]:
    """The bytes of each row group of a file, before compression.

    Raises:
        InputError: the file is damaged.
        OptionError: pyarrow is not installed.
    """
    with _opened(file, path) as parquet:
        try:
            return [parquet.metadata.row_group(group).total_byte_size for group in range(parquet.num_row_groups)]
        except _errors() as error:
            raise _damaged(path, 1, error) from None


def row_batches(
    file: BinaryIO, path: str, keys: Sequence[str], first_group: int = 0, end_group: int | None = None
) -> Iterator[tuple[RowBatch, float]]:
    """Batches of about ``BATCH_BYTES`` of the values under ``keys``, in order.

    Args:
        keys: names of columns, or of fields in columns of structs: ``meta.text``.
        first_group, end_group: the range of row groups to read; None for all that follow.

    Yields:
        Each batch, and the share of the rows that has been read with it.

    Raises:
        InputError: the file is damaged, or a column is missing or holds no text.
        OptionError: pyarrow is not installed.
    """
    name = Location(path).name
    with _opened(file, path) as parquet:
        row = 1
        try:
            groups = range(parquet.num_row_groups)[first_group:end_group]
            num_rows = [parquet.metadata.row_group(group).num_rows for group in range(groups.stop)]
            first_row = row = 1 + sum(num_rows[: groups.start])
            columns = [_column_of(parquet.schema_arrow, key, name) for key in keys]
            for group in groups:
                # If a column's description is damaged, reading a row raises an error, but asking for the column's size
                # ends the process: pyarrow does not catch that C++ exception.
                next(parquet.iter_batches(1, [group], columns, use_threads=False), None)
                rows = _rows_a_batch(parquet.metadata, group, keys)
                for batch in parquet.iter_batches(rows, [group], columns, use_threads=False):
                    values = tuple(_values(batch, key) for key in keys)
                    num_bytes = sum(len(value) for column in values for value in column if value is not None)
                    row += batch.num_rows
                    share = (row - first_row) / max(1, sum(num_rows[groups.start :]))
                    yield RowBatch(path, row - batch.num_rows, values, num_bytes), share
        except _errors() as error:
            raise _damaged(path, row, error) from None


def _opened(file: BinaryIO, path: str) -> Any:
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise OptionError("Parquet needs the pyarrow package: pip install 'megatron-bfp[preprocess]'") from None
    try:
        # A buffer size lets column chunks be read piece by piece, and not whole row groups.
        return ParquetFile(file, buffer_size=READ_BYTES, pre_buffer=False)
    except _errors() as error:
        raise _damaged(path, 1, error) from None


def _errors() -> tuple[type[Exception], ...]:
    import pyarrow

    # The last three are raised for names and numbers in footers.
    return pyarrow.ArrowException, OSError, ValueError, OverflowError, LookupError


def _damaged(path: str, row: int, error: Exception) -> InputError:
    reason = str(error).strip().split("\n")[0]
    return InputError(f"{Location(path).name}: damaged or unusual Parquet, from row {row} on: {reason}")


def _rows_a_batch(metadata: Any, group: int, keys: Sequence[str]) -> int:
    """How many rows of a row group hold about ``BATCH_BYTES`` of the values under ``keys``."""
    row_group = metadata.row_group(group)
    columns = [index for index in range(len(metadata.schema)) if metadata.schema.column(index).path in keys]
    size = sum(row_group.column(index).total_uncompressed_size for index in columns)
    return max(1, min(MAX_ROWS, BATCH_BYTES * row_group.num_rows // max(1, size)))


def _column_of(schema: Any, key: str, name: str) -> str:
    """The column or field to read for a key.

    A column of null type has no value in any row, and neither has any field of it: its writer knew no type for it.

    Raises:
        InputError: it is missing, is there more than once, or holds no text.
    """
    import pyarrow.types as types

    names, fields = schema.names, list(schema)
    kind: Any = None
    path = [key] if key in names else key.split(".")
    for depth, part in enumerate(path):
        if kind is not None and types.is_null(kind):
            return ".".join(path[:depth])
        parts = [field.type for field in fields if field.name == part]
        if not parts:
            raise InputError(f"{name}: {missing_key(key, names, 'column')}")
        if len(parts) > 1:
            raise InputError(
                f"{name}: has {len(parts)} columns named {part!r}; it is not known which holds the "
                "texts; write the file with only one of them"
            )
        kind = parts[0]
        fields = list(kind) if types.is_struct(kind) else []
    value_kind = kind.value_type if types.is_dictionary(kind) else kind
    is_text = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    is_view = (types.is_string_view, types.is_binary_view)
    if not any(test(value_kind) for test in (*is_text, *is_view, types.is_null)):
        raise InputError(f"{name}: column {key!r} holds {kind}, not text")
    return key


def _values(batch: Any, key: str) -> list[bytes | None]:
    """The values of a column as bytes; None for null."""
    import pyarrow
    import pyarrow.compute as compute

    if key in batch.schema.names:
        column = batch.column(key)
    else:
        first, *fields = key.split(".")
        column = batch.column(first)
        for field in fields:
            if not pyarrow.types.is_null(column.type):
                column = compute.struct_field(column, [field])
    if pyarrow.types.is_null(column.type):
        return [None] * len(column)
    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column.cast(pyarrow.large_binary()).to_pylist()


def _text(value: bytes | None, key: str) -> str:
    if value is None:
        raise ValueError(f"{key!r} holds null, not text")
    if len(value) > MAX_DOCUMENT_BYTES:
        raise ValueError(f"{key!r} holds a text longer than {MAX_DOCUMENT_BYTES >> 30} GiB")
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} of {key!r} is not UTF-8") from None
