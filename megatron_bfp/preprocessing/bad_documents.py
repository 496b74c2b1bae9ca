"""The list of bad documents that ``--skip-bad-documents`` leaves out: OUT.bad.jsonl, one JSON object per line.

Of JSON Lines: ``{"file": ..., "line": ..., "byte": ..., "reason": ...}``, where the line begins at that byte of the
(decompressed) file; of Parquet: ``{"file": ..., "row": ..., "reason": ...}``.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..errors import InputError
from .plan import Task
from .readers.documents import BadDocument
from .readers.inputs import Piece, count_lines
from .task import TaskRecord


class BadDocumentsFile:
    """The file of bad documents. It is written in the job's folder and gets its name in ``publish``.

    Args:
        path: of the file. An existing one is replaced.
        folder: of the job, on the same file system.
    """

    def __init__(self, path: str, folder: str) -> None:
        self._path = path
        self._part = os.path.join(folder, "bad.jsonl.part")
        self._number = 0

    def write(self, documents: Iterable[BadDocument]) -> None:
        """Write bad documents, and force the file to disk.

        Raises:
            InputError: an input cannot be read, or the file cannot be written.
        """
        try:
            with open(self._part, "w", encoding="utf-8") as file:
                for document in documents:
                    file.write(json.dumps(_entry(document)) + "\n")
                    self._number += 1
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise self._cannot_write(error) from None

    def publish(self) -> None:
        """Give the file its name. If there are no bad documents, remove the file of an earlier job.

        Raises:
            InputError: it cannot be renamed.
        """
        try:
            if self._number:
                os.replace(self._part, self._path)
            elif os.path.exists(self._path):
                os.remove(self._path)
        except OSError as error:
            raise self._cannot_write(error) from None

    def _cannot_write(self, error: OSError) -> InputError:
        return InputError(f"{self._path}: cannot be written: {error.strerror}")


def _entry(document: BadDocument) -> dict[str, Any]:
    where = document.location
    position = {"line": where.line, "byte": where.byte, "row": where.row}
    known = {name: value for name, value in position.items() if value is not None}
    return {"file": where.path, **known, "reason": document.reason}


def bad_documents(tasks: Iterable[Task], record_of: Callable[[int], TaskRecord | None]) -> Iterator[BadDocument]:
    """The bad documents of all records, in order, with lines counted from the beginning of their files.

    Args:
        tasks: in order, beginning with the input's first.
        record_of: number of a task -> its record; None if it is not finished. The lines of such a task are counted in
            its input if a bad document follows.

    Raises:
        InputError: an input cannot be read.
    """
    num_lines = 0
    uncounted: list[Piece] = []
    for task in tasks:
        record = record_of(task.number)
        bad_by_piece: dict[int, list[BadDocument]] = {}
        for number, document in record.bad if record else []:
            bad_by_piece.setdefault(number, []).append(document)
        for number, piece in enumerate(task.pieces):
            if piece.begin == 0:
                num_lines, uncounted = 0, []
            for document in bad_by_piece.get(number, []):
                while uncounted and document.location.line is not None:
                    num_lines += count_lines(uncounted.pop())
                yield _moved(document, num_lines)
            if record is None:
                uncounted.append(piece)
            else:
                num_lines += record.num_lines[number]


def _moved(document: BadDocument, num_lines: int) -> BadDocument:
    """The document with its line counted from ``num_lines`` earlier lines."""
    where = document.location
    if where.line is None:
        return document
    return document._replace(location=where._replace(line=where.line + num_lines))
