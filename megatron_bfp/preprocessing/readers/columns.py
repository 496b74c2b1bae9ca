"""Columns of texts, of Parquet and of Arrow: each row is one document. Only the columns asked for are read.

Texts travel as bytes and are decoded by the process that tokenizes them. So a value that is not UTF-8 is a bad
document, not a bad file. Text, large text, dictionary and binary columns are treated alike.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import InputError
from .documents import MAX_DOCUMENT_BYTES, BadDocument, Location, Record
from .jsonl import missing_key

BATCH_BYTES = 1 << 21
MAX_ROWS = 1 << 12


@dataclass(frozen=True)
class RowBatch:
    """Consecutive rows of a file."""

    path: str
    first_row: int
    """Counted from 1."""
    columns: tuple[list[bytes | None], ...]
    """For each key that was asked for, the values of the rows."""

    num_bytes: int
    """As ``Batch.num_bytes``: of the values."""
    num_lines = num_left_out = 0

    def records(self, keys: Sequence[str]) -> Iterator[Record | BadDocument]:
        """Each row's texts under ``keys``, the ones the batch was read for, or what is wrong with it."""
        for number, values in enumerate(zip(*self.columns, strict=True), self.first_row):
            location = Location(self.path, row=number)
            try:
                yield Record(location, [_text(value, key) for value, key in zip(values, keys, strict=True)])
            except ValueError as error:
                yield BadDocument(location, str(error))


def column_of(schema: Any, key: str, name: str) -> str:
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


def values_of(batch: Any, key: str, is_checked: bool = True) -> list[bytes | None]:
    """The values of a column as bytes; None for null.

    Args:
        is_checked: the library checked where values begin and end when it read them, as it does of Parquet. Else that
            is checked here: wrong numbers would end the process.

    Raises:
        ArrowException: one of these numbers is wrong.
    """
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
    if is_checked:
        if pyarrow.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        return column.cast(pyarrow.large_binary()).to_pylist()
    column.validate()
    if pyarrow.types.is_dictionary(column.type):
        texts = _checked(column.dictionary)
        column = pyarrow.DictionaryArray.from_arrays(column.indices, texts).dictionary_decode()
    return _checked(column).to_pylist()


def _checked(column: Any) -> Any:
    """A column of texts as bytes, so that the check does not refuse all of it for a text that is not UTF-8."""
    import pyarrow

    column = column.cast(pyarrow.large_binary())
    column.validate(full=True)
    return column


def _text(value: bytes | None, key: str) -> str:
    if value is None:
        raise ValueError(f"{key!r} holds null, not text")
    if len(value) > MAX_DOCUMENT_BYTES:
        raise ValueError(f"{key!r} holds a text longer than {MAX_DOCUMENT_BYTES >> 30} GiB")
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} of {key!r} is not UTF-8") from None
