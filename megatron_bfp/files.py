"""Files that appear whole or not at all, and who is at work on a file or folder.

Whether an owner still lives is told by three kinds of evidence:

- The kernel that runs it knows for certain, but only processes of the same container can ask it: ``has_ended``.
- A lock ends with its holder, but on some file systems each machine has locks of its own, or there are none.
- A file that its owner renews shows on every machine that the owner lives. Silence takes a while to notice.

Host names prove nothing: containers share them. ``Lease`` uses locks and renewal.
"""

import fcntl
import hashlib
import json
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from .errors import OptionError

BEAT_SECONDS = 2.0
"""Between two renewals of a lease."""
WATCHED_SECONDS = 5 * BEAT_SECONDS
"""How long an owner on another machine is watched before it counts as dead."""


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


@contextmanager
def whole_folder(path: str, overwrite: bool = False) -> Iterator[str]:
    """Write a folder under its name only when all of it is on disk.

    Args:
        path: the folder, which may exist if it is empty.
        overwrite: replace it if it is not.

    Yields:
        Where to write: a folder beside it, which is removed after an error, and by the next call after a kill.

    Raises:
        OptionError: it exists and is not to be replaced, or cannot be written.
    """
    target = os.path.abspath(path)
    parent, name = os.path.split(target)
    temporary = os.path.join(parent, f".{name}.{process_label()}.{secrets.token_hex(4)}")
    replaced = f"{temporary}.replaced"
    try:
        os.makedirs(parent, exist_ok=True)
        _remove_unfinished(parent, name)
        exists = os.path.isfile(target) or (os.path.isdir(target) and bool(os.listdir(target)))
        if exists and not overwrite:
            raise OptionError(f"{path}: exists already; give --overwrite to replace it, or another folder")
        os.mkdir(temporary)
        yield temporary
        for entry in os.scandir(temporary):
            sync_file(entry.path)
        sync_file(temporary)
        if exists:
            os.rename(target, replaced)
        os.rename(temporary, target)
        sync_file(parent)
    except OSError as error:
        raise OptionError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        if os.path.isdir(replaced) and not os.path.exists(target):
            os.rename(replaced, target)
        for folder in (temporary, replaced):
            shutil.rmtree(folder, ignore_errors=True)


def _remove_unfinished(parent: str, name: str) -> None:
    """Remove what killed calls of ``whole_folder`` left beside a folder; one killed between its renames is undone."""
    prefix = f".{name}."
    for other in filter(lambda other: other.startswith(prefix), os.listdir(parent)):
        path = os.path.join(parent, other)
        if has_ended(other.removeprefix(prefix).split(".")[0]):
            if other.endswith(".replaced") and not os.path.exists(os.path.join(parent, name)):
                os.rename(path, os.path.join(parent, name))
            else:
                shutil.rmtree(path, ignore_errors=True)


def read_json_object(path: str) -> dict[str, Any] | None:
    """The JSON object in a file; None if there is no such file or it holds something else."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def process_label() -> str:
    """A name for this process, for ``has_ended`` on whichever machine and in whichever container. Without dots."""
    return f"{_pid_namespace()}-{os.getpid()}-{_start_time(os.getpid())}"


def has_ended(label: str) -> bool:
    """Whether the process of a ``process_label`` has ended for certain.

    False is also the answer for processes of other machines and containers.
    """
    namespace, _, process = label.partition("-")
    pid, _, start_time = process.partition("-")
    if not pid.isascii() or not pid.isdigit() or not namespace or namespace != _pid_namespace():
        return False
    return _start_time(int(pid)) != start_time  # None, or that of a later process with the same number


def kernel_id() -> str:
    """The running kernel's id: the same in all containers of a machine, another one after each boot."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:  # not Linux
        return "unknown-" + os.urandom(8).hex()  # which no owner before had


def _pid_namespace() -> str:
    """What distinguishes the process numbers of this container, on this boot of this machine; "" if it is unknown."""
    try:
        return hashlib.sha256(f"{kernel_id()} {os.readlink('/proc/self/ns/pid')}".encode()).hexdigest()[:16]
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
    descriptor, _ = _open_locked(path)
    try:
        os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _open_locked(path: str) -> tuple[int, bool]:
    """Create or open a file and lock it.

    Returns:
        A file descriptor, and whether it is locked: some file systems have no locks.

    Raises:
        BlockingIOError: another process has locked it.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        is_locked = True
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise
            except OSError:
                is_locked = False
            with suppress(FileNotFoundError):
                if os.path.samestat(os.stat(path), os.fstat(descriptor)):
                    return descriptor, is_locked
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its owner renamed or removed it before our lock: take a new one


class TakenError(Exception):
    """Another process owns the lease. Its message is the owner's host and process, where these are known."""


class Lease:
    """A file that one process at a time owns, also on file systems whose locks are each machine's own, or without any.

    The owner locks the file, writes into it who it is, and renews its modification time while it lives. If the previous
    owner ran on the same kernel, getting the lock proves that it is dead. If it ran elsewhere, the lock proves nothing,
    and a newcomer watches for ``WATCHED_SECONDS`` whether the file is still renewed.

    The lease is taken when it is made, and until ``release``. A fork of the owner does not own it.

    Args:
        path: of the file to lock.
        seconds: how long to wait for an owner to end.

    Raises:
        TakenError: another process has it.
        OSError: the file cannot be written.
    """

    def __init__(self, path: str, seconds: float) -> None:
        self._path = path
        descriptor, is_locked = _wait_for_lock(path, time.monotonic() + seconds)
        try:
            before = _words(descriptor)
            if before and not (is_locked and before[0] == kernel_id()) and self._is_renewed():
                raise TakenError(_host_and_process(before))
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{kernel_id()} {socket.gethostname()} {os.getpid()}\n".encode(), 0)
            os.fsync(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor: int | None = descriptor
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, args=(descriptor,), daemon=True)
        self._thread.start()
        os.register_at_fork(after_in_child=self._forget)

    def release(self) -> None:
        """Give it up."""
        if self._descriptor is None:
            return
        self._ended.set()
        self._thread.join()
        with suppress(OSError):
            os.ftruncate(self._descriptor, 0)  # there is nobody to wait for
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # of forks too, which may not have closed it yet
        self._forget()

    def _forget(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _renew(self, descriptor: int) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            with suppress(OSError):  # of a server that is away for a while
                os.utime(descriptor)

    def _is_renewed(self) -> bool:
        """Whether a living owner renews the file."""
        first = _renewed_at(self._path)
        deadline = time.monotonic() + WATCHED_SECONDS
        while time.monotonic() < deadline:
            time.sleep(BEAT_SECONDS / 8)
            if _renewed_at(self._path) != first:
                return True
        return False


def _wait_for_lock(path: str, deadline: float) -> tuple[int, bool]:
    """As ``_open_locked``, once the lock's holder has ended.

    Raises:
        TakenError: another process holds it until the deadline.
    """
    while True:
        try:
            return _open_locked(path)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TakenError(_owner_in(path)) from None
        time.sleep(0.1)


def _words(descriptor: int) -> list[str]:
    """What the owner wrote into its file: kernel, host and process."""
    return os.pread(descriptor, 1000, 0).decode(errors="replace").split()


def _host_and_process(words: list[str]) -> str:
    return f"{words[1]}, process {words[2]}" if len(words) == 3 else ""


def _owner_in(path: str) -> str:
    with suppress(OSError), open(path, "rb") as file:
        return _host_and_process(_words(file.fileno()))
    return ""


def _renewed_at(path: str) -> int:
    # Network file systems ask the server when a file is opened, and else may answer from memory.
    with suppress(OSError), open(path, "rb") as file:
        return os.fstat(file.fileno()).st_mtime_ns
    return 0
