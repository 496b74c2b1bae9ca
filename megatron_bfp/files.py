"""Files that appear whole or not at all, and locks that a killed process cannot leave behind."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager


def sync_file(path: str) -> None:
    """Force a file's or a directory's content to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: str, content: bytes) -> None:
    """Write a file under its name only when all of it is on disk."""
    temporary = f"{path}.{os.getpid()}.part"
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)


@contextmanager
def locked_directory(path: str) -> Iterator[bool]:
    """Hold the exclusive lock of a directory; waits for whoever holds it.

    The lock belongs to the open directory itself, so it needs no file and ends with its holder.

    Yields:
        Whether the lock is held. Some file systems have none: callers must stay correct without it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            held = True
        except OSError:
            held = False
        yield held
    finally:
        os.close(descriptor)


def open_exclusively(path: str) -> int:
    """Create or open a file for writing from its start, for one process at a time.

    Returns:
        A file descriptor of the emptied file. Its lock ends when the descriptor is closed, also by a kill.

    Raises:
        BlockingIOError: another process has the file open through this function.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise
            except OSError:
                pass  # a file system without locks
            if _is_still(path, descriptor):
                os.ftruncate(descriptor, 0)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its previous owner renamed it before our lock: that file is finished, take a new one


def _is_still(path: str, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
