"""Parquet: row groups are read in batches of rows; see ``columns``."""

from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from ...errors import InputError, OptionError
from .columns import BATCH_BYTES, MAX_ROWS, RowBatch, column_of, values_of
from .documents import Location

MAGIC = b"PAR1"
READ_BYTES = 1 << 20


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
            columns = [column_of(parquet.schema_arrow, key, name) for key in keys]
            for group in groups:
                # If a column's description is damaged, reading a row raises an error, but asking for the column's size
                # ends the process: pyarrow does not catch that C++ exception.
                next(parquet.iter_batches(1, [group], columns, use_threads=False), None)
                rows = _rows_a_batch(parquet.metadata, group, keys)
                for batch in parquet.iter_batches(rows, [group], columns, use_threads=False):
                    values = tuple(values_of(batch, key) for key in keys)
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
