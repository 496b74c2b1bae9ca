"""What a run reports, as JSON Lines in its save folder: trackers read it from there, however late they are."""

import json
import os
import tempfile
import time
from typing import Any, NamedTuple

from megatron_bfp.files import write_whole

from ..ranks import log

FILE = "tracked.jsonl"
BYTES_AT_ONCE = 1 << 16
"""More than any row has."""


class Row(NamedTuple):
    """The numbers of a step or an evaluation."""

    iteration: int
    event: str
    """ "train" or "valid"."""
    milliseconds: int
    """When it was reported, since 1970."""
    values: dict[str, float]

    def named(self) -> dict[str, float]:
        """Its numbers by their names in trackers, such as "train/loss"."""
        return {f"{self.event}/{name}": value for name, value in self.values.items()}


class Journal:
    """The rows of a run up to now, in order. Appending costs one write to the page cache.

    Args:
        folder: of ``--save``; None: the rows are in a temporary file, as nothing can be resumed.
        iteration: steps of the checkpoint that the run resumed from; rows of later steps are dropped, as these steps
            are repeated.
    """

    def __init__(self, folder: str | None, iteration: int) -> None:
        self.is_kept = folder is not None
        self._unwritten, self._is_failing = b"", False
        try:
            self._file = _open(os.path.join(folder, FILE), iteration) if folder else tempfile.TemporaryFile(buffering=0)
        except OSError as error:
            log(f"{folder}/{FILE}: {error.strerror}; trackers get no steps of before the resume")
            self._file, self.is_kept = tempfile.TemporaryFile(buffering=0), False

    def append(self, row: Row) -> None:
        """Add a row. What cannot be written, because the disk is full, is written together with the next row."""
        self._unwritten += json.dumps(row._asdict()).encode() + b"\n"
        try:
            self._file.seek(0, os.SEEK_END)
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                log(f"{FILE}: {error.strerror}; the run goes on, and trackers wait until it can be written")
            self._is_failing = True

    def sync(self) -> None:
        """Force the rows to disk, before a checkpoint of their steps is complete."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            log(f"{FILE}: {error.strerror}")

    def read(self, position: int) -> tuple[list[Row], int]:
        """Some hundred rows from a position in the file on; the beginning is 0. Other threads may call it.

        Returns:
            The rows, and the position after them.
        """
        content = os.pread(self._file.fileno(), BYTES_AT_ONCE, position)
        content = content[: content.rfind(b"\n") + 1]
        return [Row(**json.loads(line)) for line in content.splitlines()], position + len(content)


def row_of(event: str, iteration: int, values: dict[str, Any]) -> Row:
    """The row of an event that is reported now. Texts are left out."""
    numbers = {name: value for name, value in values.items() if isinstance(value, (int, float))}
    return Row(iteration, event, int(1000 * time.time()), numbers)


def _open(path: str, iteration: int) -> Any:
    """Open the journal of a run, without rows of steps after ``iteration`` and without a line that is not whole.

    Raises:
        OSError: it cannot be read or written.
    """
    lines = []
    if os.path.exists(path):
        with open(path, "rb") as file:
            lines = file.readlines()
    kept = [line for line in lines if _iteration(line) <= iteration]
    if kept != lines:
        write_whole(path, b"".join(kept))
    return open(path, "a+b", buffering=0)


def _iteration(line: bytes) -> float:
    try:
        return json.loads(line)["iteration"] if line.endswith(b"\n") else float("inf")
    except (ValueError, KeyError, TypeError):
        return float("inf")
