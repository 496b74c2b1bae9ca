"""``--input`` to batches of raw documents: which files, in which order, and what reads each."""

import glob
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from ..errors import InputError, OptionError
from . import parquet
from .compression import chunks_of
from .documents import STANDARD_INPUT, Batch, Place
from .jsonl import line_batches

DATA_NAME = re.compile(r"\.(jsonl|json|ndjson|parquet)(\.(gz|zst|zstd|bz2|xz))?$", re.IGNORECASE)
BAD_DOCUMENTS_SUFFIX = ".bad.jsonl"
"""Ends the name of the list of bad documents, which is no input."""
START_BYTES = 512
"""Enough to tell what a file is."""


def input_files(inputs: Sequence[str]) -> tuple[list[str], list[str]]:
    """The files that ``--input`` names, in the order of its values.

    Args:
        inputs: paths of files and folders, glob patterns (``**`` for folders in folders), ``-`` for standard input.

    Returns:
        The files of a folder (those whose names end as ``DATA_NAME`` says, in folders below it too) and of a pattern
        are sorted by their paths. Second, the folders' other files, which are not read.

    Raises:
        OptionError: there is no such file, a pattern matches none, or standard input is named twice.
    """
    files: list[str] = []
    others: list[str] = []
    for value in inputs:
        if value == STANDARD_INPUT:
            files.append(value)
        elif os.path.isdir(value):
            _add_folder(value, files, others)
        elif os.path.exists(value):
            files.append(value)
        elif glob.has_magic(value):
            _add_matches(value, files, others)
        else:
            raise OptionError(f"--input {Place(value).name}: no such file")
    if files.count(STANDARD_INPUT) > 1:
        raise OptionError("--input: standard input (-) can be read once only")
    return files, others


def _add_matches(pattern: str, files: list[str], others: list[str]) -> None:
    matches = sorted(glob.glob(pattern, recursive=True))
    found = [path for path in matches if not os.path.isdir(path)]
    if not matches:
        raise OptionError(f"--input {Place(pattern).name}: no file matches this pattern")
    if found:
        files += found
    else:
        for folder in matches:
            _add_folder(folder, files, others)


def _add_folder(folder: str, files: list[str], others: list[str]) -> None:
    found = []
    for path, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        for name in names:
            is_data = DATA_NAME.search(name) and not name.startswith((".", "_"))
            place = found if is_data and not name.endswith(BAD_DOCUMENTS_SUFFIX) else others
            place.append(os.path.join(path, name))
    if not found:
        raise OptionError(
            f"--input {Place(folder).name}: no file in this folder is named as data (.jsonl, .json, .ndjson, .parquet, "
            "compressed or not); name the files or give a pattern"
        )
    files += sorted(found)


def read_batches(path: str, keys: Sequence[str]) -> Iterator[Batch]:
    """The raw documents of a file of any kind we know, in order, in constant memory.

    Args:
        keys: what will be asked of the batches; of Parquet nothing else is read.

    Raises:
        InputError: the file cannot be read, or is none of these kinds.
        OptionError: a library for its kind is not installed.
    """
    name = Place(path).name
    try:
        with _opened(path) as file:
            start = _start(file)
            if start.startswith(parquet.MAGIC):
                if not file.seekable():
                    raise InputError(f"{name}: is Parquet, which cannot be read from a pipe; give the file's path")
                file.seek(0)
                yield from parquet.row_batches(file, path, keys)
            else:
                yield from line_batches(chunks_of(file, name, start), path)
    except OSError as error:
        raise InputError(f"{name}: cannot be read: {error.strerror or error}") from None


def _opened(path: str) -> BinaryIO:
    if path != STANDARD_INPUT:
        return open(path, "rb")
    if sys.stdin is None:
        raise InputError("standard input: is closed")
    return open(sys.stdin.fileno(), "rb", closefd=False)


def _start(file: BinaryIO) -> bytes:
    """The first ``START_BYTES``, less if there are no more; a pipe gives them as they come."""
    start = b""
    while len(start) < START_BYTES and (more := file.read(START_BYTES - len(start))):
        start += more
    return start
