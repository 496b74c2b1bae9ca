"""A folder for one process at a time, also on file systems whose locks are each machine's own, or that have none.

The owner locks a file in it and writes down who it is: the running kernel's id, host name and process. While it lives,
it renews the file's time of modification. If the last owner ran on the same kernel, getting the lock proves that it is
dead. If it ran on another, the lock proves nothing, and a newcomer watches whether the file is still renewed. Host
names prove nothing either: containers share them.
"""

import fcntl
import os
import socket
import threading
import time
from contextlib import suppress

BEAT_SECONDS = 2.0
WATCHED_SECONDS = 5 * BEAT_SECONDS


class TakenError(Exception):
    """Another process owns the folder. Its message is its host and process, where these are known."""


class Lease:
    """Taken when it is made, and until ``release``. A fork of the owner does not own it.

    Args:
        path: of the file to lock.
        seconds: how long to wait for an owner to end.

    Raises:
        TakenError: another process has it.
        OSError: the file cannot be written.
    """

    def __init__(self, path: str, seconds: float) -> None:
        self._path = path
        self._file, is_locked = _locked(path, time.monotonic() + seconds)
        try:
            before = os.pread(self._file, 1000, 0).decode(errors="replace").split()
            if before and not (is_locked and before[0] == kernel_id()) and self._is_renewed():
                raise TakenError(_owner(before))
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"{kernel_id()} {socket.gethostname()} {os.getpid()}\n".encode(), 0)
            os.fsync(self._file)
        except BaseException:
            os.close(self._file)
            raise
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True)
        self._thread.start()
        os.register_at_fork(after_in_child=self._forget)

    def release(self) -> None:
        """Give it up."""
        if self._file is None:
            return
        self._ended.set()
        self._thread.join()
        with suppress(OSError):
            os.ftruncate(self._file, 0)  # there is nobody to wait for
            fcntl.flock(self._file, fcntl.LOCK_UN)  # of forks too, which may not have closed it yet
        self._forget()

    def _forget(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _renew(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            with suppress(OSError):  # of a server that is away for a while
                os.utime(self._file)

    def _is_renewed(self) -> bool:
        """Whether a living owner renews the file."""
        first = _renewed_at(self._path)
        deadline = time.monotonic() + WATCHED_SECONDS
        while time.monotonic() < deadline:
            time.sleep(BEAT_SECONDS / 8)
            if _renewed_at(self._path) != first:
                return True
        return False


def kernel_id() -> str:
    """Of the running kernel: the same in all containers of a machine, another one after each boot."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return "unknown-" + os.urandom(8).hex()  # which no owner before had


def _renewed_at(path: str) -> int:
    # Network file systems ask the server when a file is opened, and else may answer from memory.
    with suppress(OSError), open(path, "rb") as file:
        return os.fstat(file.fileno()).st_mtime_ns
    return 0


def _owner(words: list[str]) -> str:
    return f"{words[1]}, process {words[2]}" if len(words) == 3 else ""


def _locked(path: str, deadline: float) -> tuple[int, bool]:
    """The open file, and whether it is locked: some file systems have no locks.

    Raises:
        TakenError: another process has it until the deadline.
    """
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        is_locked = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _owner(os.pread(file, 1000, 0).decode(errors="replace").split())
            os.close(file)
            if time.monotonic() > deadline:
                raise TakenError(owner) from None
            time.sleep(0.1)
            continue
        except OSError:
            is_locked = False
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(file)):
                return file, is_locked
        os.close(file)  # its owner removed the folder meanwhile
