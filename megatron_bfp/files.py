"""Files that appear whole or not at all, and locks that a killed process cannot leave behind."""

import fcntl
import hashlib
import os
import secrets
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
    """Write a file under its name only when all of it is on disk.

    The name that it has before cannot be guessed and must be new: nobody can put a link there, and processes of several
    machines do not write to the same one.
    """
    temporary = f"{path}.{secrets.token_hex(8)}.part"
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)


def process_label() -> str:
    """A name for this process that tells, on whichever machine and in whichever container it is read, whether the
    process has ended: see ``has_ended``. Without dots."""
    return f"{_pid_namespace()}-{os.getpid()}-{_start_time(os.getpid())}"


def has_ended(label: str) -> bool:
    """Whether the process of a ``process_label`` has ended for certain.

    Host names and locks prove nothing: containers share names, and locks may not be seen by other machines. Only the
    kernel that runs a process knows, so False is also the answer for processes of other machines and containers.
    """
    namespace, _, process = label.partition("-")
    pid, _, start_time = process.partition("-")
    if not pid.isascii() or not pid.isdigit() or not namespace or namespace != _pid_namespace():
        return False
    return _start_time(int(pid)) != start_time  # None, or that of a later process with the same number


def _pid_namespace() -> str:
    """What distinguishes the process numbers of this container, on this boot of this machine; "" if it is unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return hashlib.sha256(f"{boot} {os.readlink('/proc/self/ns/pid')}".encode()).hexdigest()[:16]
    except OSError:  # not Linux
        return ""


def _start_time(pid: int) -> str | None:
    """When a process of this container started, in ticks since the boot; None if there is none, or it was killed."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            state, *fields = file.read().rpartition(")")[2].split()  # its name, in brackets, may hold anything
    except OSError:
        return None
    return None if state in "ZX" else fields[18]


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
