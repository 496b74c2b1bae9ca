"""The interface of trackers, and the two ways to drive one: at once, or in a thread that follows the journal.

Neither lets a tracker end or hold up the run: an error is one line of the log.
"""

import importlib
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from megatron_bfp.errors import OptionError
from megatron_bfp.optional import pip_command

from ..ranks import log
from .journal import Journal, Row

RETRY_SECONDS = 60.0
"""Between an error and the next attempt."""


class Tracker(Protocol):
    """A library's run. Its methods may raise anything; after an error it is opened again."""

    name: str
    """For messages."""

    def open(self, iteration: int) -> str:
        """Begin the run, or go on with it, and find out how far its history goes.

        Args:
            iteration: steps of the checkpoint that the run resumed from.

        Returns:
            What the log says: which run it is, and where.
        """

    def send(self, rows: Sequence[Row]) -> None:
        """Take rows, in order. Those that the history has already are skipped."""

    def close(self, failed: bool) -> None:
        """Complete the run.

        Args:
            failed: whether training ended with an error.
        """


class Direct:
    """Gives a tracker each row at once: for one that writes to a local disk. Rows that it fails to take are lost.

    Args:
        iteration: steps of the checkpoint that the run resumed from.
    """

    def __init__(self, tracker: Tracker, iteration: int) -> None:
        self._tracker, self._is_open, self._has_failed, self._next_attempt = tracker, False, False, 0.0
        self._attempt(lambda: self._open(iteration))

    def append(self, row: Row) -> None:
        """Hand over a row."""
        if not self._is_open and time.monotonic() >= self._next_attempt:
            self._attempt(lambda: self._open(row.iteration - 1))
        if self._is_open:
            self._attempt(lambda: self._tracker.send([row]))

    def close(self, failed: bool) -> None:
        """Complete the run."""
        if self._is_open:
            self._attempt(lambda: self._tracker.close(failed))

    def _open(self, iteration: int) -> None:
        self._tracker.open(iteration)
        self._is_open = True

    def _attempt(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # a tracker may raise anything, and must not end the run
            self._is_open, self._next_attempt = False, time.monotonic() + RETRY_SECONDS
            if not self._has_failed:
                log(f"{self._tracker.name}: {reason(error)}; the run goes on, and steps are missing there")
            self._has_failed = True


class Follower(threading.Thread):
    """Sends a journal's rows to a tracker, in the background. After an error it opens the tracker anew and sends what
    its history lacks.

    Args:
        iteration: steps of the checkpoint that the run resumed from.
    """

    def __init__(self, tracker: Tracker, journal: Journal, iteration: int) -> None:
        super().__init__(name=tracker.name, daemon=True)
        self._tracker, self._journal, self._iteration = tracker, journal, iteration
        self._news, self._closing = threading.Event(), threading.Event()
        self._failed = self._is_failing = self._is_complete = self._is_abandoned = False

    def notify(self) -> None:
        """Say that the journal has another row."""
        self._news.set()

    def finish(self, failed: bool) -> None:
        """Ask it to send what is left and to complete the run.

        Args:
            failed: whether training ended with an error.
        """
        self._failed = failed
        self._closing.set()
        self._news.set()

    def wait(self, seconds: float) -> None:
        """Wait for that, and say if it takes longer."""
        self.join(seconds)
        self._is_abandoned = True
        if not self._is_complete:
            later = "; the same command sends them" if self._journal.is_kept else ""
            log(f"{self._tracker.name}: the last steps may be missing there{later}")

    def run(self) -> None:
        """Send rows until ``finish``, after which there is a last attempt.

        Nothing is opened before the first row, when all loader workers have been forked: a library that starts a
        process waits for the end of a pipe, and a worker that is forked in that moment would hold it open.
        """
        self._news.wait()
        while True:
            is_last = self._closing.is_set()
            try:
                self._follow(self._tracker.open(self._iteration))
                self._tracker.close(self._failed)
                self._is_complete = True
                return
            except Exception as error:  # a tracker may raise anything, and must not end the run
                if not self._is_failing:
                    self._say(f"{reason(error)}; the run goes on, and its steps are sent when it works again")
                self._is_failing = True
            if is_last:
                return
            self._closing.wait(RETRY_SECONDS)

    def _follow(self, which: str) -> None:
        """Send all rows, and those that come, until ``finish`` and none is left.

        Args:
            which: what the log says of the run, once it works.
        """
        position = 0
        if not self._is_failing:
            self._say(which)
        while True:
            self._news.clear()
            is_last = self._closing.is_set()
            rows, position = self._journal.read(position)
            if rows:
                self._tracker.send(rows)
                continue
            if self._is_failing:
                self._say(f"works again, {which}")
                self._is_failing = False
            if is_last:
                return
            self._news.wait()

    def _say(self, line: str) -> None:
        if not self._is_abandoned:
            log(f"{self._tracker.name}: {line}")


def reason(error: Exception) -> str:
    """An error as part of a line."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return textwrap.shorten(text.strip().split("\n")[0], 200)


def import_for(option: str, module: str) -> Any:
    """Import the library of a tracker, before workers are forked.

    Raises:
        OptionError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise OptionError(f"{option} needs {module}: {pip_command(module)}") from None
