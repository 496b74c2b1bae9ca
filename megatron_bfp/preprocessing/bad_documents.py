"""The list of bad documents that ``--skip-bad-documents`` leaves out: OUT.bad.jsonl, an object a line.

Of JSON Lines: ``{"file": ..., "line": ..., "byte": ..., "reason": ...}``, where the line begins at that byte of the
(decompressed) file; of Parquet: ``{"file": ..., "row": ..., "reason": ...}``.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from ..errors import InputError, OptionError
from .plan import Shard
from .readers.documents import BadDocument
from .readers.inputs import Piece, count_lines
from .task import ShardRecord


class BadDocuments:
    """Takes bad documents as they are met: raises the first, or lists all of them in a file.

    The file gets its name in ``finalize``. Leaving the ``with`` block without it removes what was written.

    Args:
        path: of the file; one that is there is replaced.
        folder: of the run, on the same file system; the file is there until it gets its name.
        skip: whether bad documents are left out, not an error.

    Raises:
        OptionError: the file cannot be written.
    """

    def __init__(self, path: str, skip: bool, folder: str) -> None:
        self._path, self._skip = path, skip
        self._part = os.path.join(folder, "bad.jsonl.part")
        self.number = 0
        self.first: BadDocument | None = None
        self._file = self._open() if skip else None

    def _open(self):
        try:
            return open(self._part, "w", encoding="utf-8")
        except OSError as error:
            raise OptionError(f"{self._path}: cannot be written: {error.strerror}") from None

    def __enter__(self) -> "BadDocuments":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            with suppress(FileNotFoundError):
                os.remove(self._part)

    def add(self, documents: Iterable[BadDocument]) -> None:
        """Raise the first of them, or write each down.

        Raises:
            InputError: a document is bad and not to be skipped; or the file cannot be written.
        """
        for document in documents:
            if not self._skip:
                raise InputError(f"{document} (--skip-bad-documents leaves such documents out)")
            self.first = self.first or document
            self.number += 1
            place = document.place
            entry = {"file": place.path, "line": place.line, "byte": place.byte, "row": place.row}
            entry = {name: value for name, value in entry.items() if value is not None} | {"reason": document.reason}
            self._write(json.dumps(entry) + "\n")

    def _write(self, line: str) -> None:
        try:
            self._file.write(line)
        except OSError as error:
            raise InputError(f"{self._path}: cannot be written: {error.strerror}") from None

    def finalize(self) -> None:
        """Give the file its name, or without bad documents remove what an earlier run left under it.

        Raises:
            InputError: it cannot be written.
        """
        try:
            if self.number:
                self._file.flush()
                os.fsync(self._file.fileno())
                os.replace(self._part, self._path)
            elif self._skip and os.path.exists(self._path):
                os.remove(self._path)
        except OSError as error:
            raise InputError(f"{self._path}: cannot be written: {error.strerror}") from None


def bad_documents(shards: Iterable[Shard], record_of: Callable[[int], ShardRecord | None]) -> Iterator[BadDocument]:
    """The bad documents of all records, in order, with their lines counted from the first of their files.

    Args:
        shards: in order, from the first on.
        record_of: the record of the shard with a number, None if there is none. Lines of such a shard are counted in
            its input when a bad document follows.

    Raises:
        InputError: an input cannot be read.
    """
    num_lines = 0
    uncounted: list[Piece] = []
    for shard in shards:
        record = record_of(shard.number)
        found: dict[int, list[BadDocument]] = {}
        for number, document in record.bad if record else []:
            found.setdefault(number, []).append(document)
        for number, piece in enumerate(shard.pieces):
            if piece.begin == 0:
                num_lines, uncounted = 0, []
            for document in found.get(number, []):
                while uncounted and document.place.line is not None:
                    num_lines += count_lines(uncounted.pop())
                yield _moved(document, num_lines)
            if record is None:
                uncounted.append(piece)
            else:
                num_lines += record.num_lines[number]


def _moved(document: BadDocument, num_lines: int) -> BadDocument:
    place = document.place
    if place.line is None:
        return document
    return document._replace(place=place._replace(line=place.line + num_lines))
