"""Time and peak memory of a command with all its processes.

Memory is anonymous memory (RssAnon), which leaves out mapped files. Pages that a forked worker shares count for each.
"""

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron_bfp.errors import InputError

SHORTEST_WAIT, LONGEST_WAIT = 0.02, 0.5
"""Seconds between two readings of the memory. The wait grows, as readings slow the process down."""


class Memory(NamedTuple):
    """Peaks of anonymous memory, bytes: of one process, and of all processes at the same time."""

    largest: int
    total: int


class MemoryWatch:
    """Reads the memory of a process and its descendants while the ``with`` block runs.

    Args:
        leader: process id of the leader of their session.
    """

    def __init__(self, leader: int) -> None:
        self.peak = Memory(0, 0)
        self._leader, self._is_done = str(leader), threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._is_done.set()
        self._thread.join()

    def _watch(self) -> None:
        seconds = SHORTEST_WAIT
        while not self._is_done.wait(seconds):
            seconds = min(1.5 * seconds, LONGEST_WAIT)
            sizes = [size for size in map(self._anonymous_bytes, filter(str.isdigit, os.listdir("/proc"))) if size]
            self.peak = Memory(max([self.peak.largest, *sizes]), max(self.peak.total, sum(sizes)))

    def _anonymous_bytes(self, process: str) -> int:
        try:
            with open(f"/proc/{process}/stat") as file:
                session = file.read().rpartition(")")[2].split()[3]
            if session != self._leader:
                return 0
            with open(f"/proc/{process}/status") as file:
                return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon:"))
        except (OSError, IndexError, StopIteration):  # it ended
            return 0


class Finished(NamedTuple):
    """A command that ran to its end."""

    seconds: float
    memory: Memory
    output: str


def timed(name: str, command: Sequence[str], **environment: str) -> Finished:
    """Run a command, after pending writes of others are on disk.

    Args:
        name: of the command, for messages.
        environment: variables to add.

    Raises:
        InputError: it failed.
    """
    os.sync()
    with tempfile.TemporaryFile("w+") as errors, tempfile.TemporaryFile("w+") as output:
        start = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=output, stderr=errors, env=os.environ | environment, start_new_session=True
        )
        try:
            with MemoryWatch(process.pid) as watch:
                process.wait()
            seconds = time.perf_counter() - start
        finally:
            if process.poll() is None:  # Ctrl-C reached only this process
                os.killpg(process.pid, signal.SIGKILL)
        errors.seek(0), output.seek(0)
        if process.returncode:
            last = (errors.read().strip() or "no message").splitlines()[-1]
            raise InputError(f"{name}: failed with status {process.returncode}: {last}")
        return Finished(seconds, watch.peak, output.read())
