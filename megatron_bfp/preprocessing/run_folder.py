"""OUT.shards, the folder of a run that is not finished: what it is for, the shards that are done, the datasets that
grow of them.

It is there from the first shard to the finished datasets. A run that is started again goes on with it, if it is the
same run: the same inputs (by path, size and time of modification), tokenizer and options.
"""

import json
import os
import re
import shutil
import socket
import sys
import time
from contextlib import suppress
from typing import Any

from ..errors import InputError, OptionError
from ..files import open_exclusively, sync_file, write_whole
from .shards import shard_folder

SUFFIX = ".shards"
FORMAT = 2
"""Of what is in the folder, which depends on how the input is cut into shards, too."""
IDENTITY = "run"
LOCK = "lock"
VERIFIED = "verified"
"""Is there when the datasets are finished and right: nothing is left but to give them their names."""
SHARD = re.compile(r"[0-9]{6,}")
LOCK_SECONDS = 2.0
"""How long to wait for processes that a kill has left to themselves."""
JOINED = re.compile(r"joined-[0-9]+\.(bin|idx|lengths)")
UNFINISHED = re.compile(r"[0-9]{6,}\..*\.part|segment-.*|.*\.[0-9]+\.part")


class RunFolder:
    """The folder of a run, for one process at a time.

    Leaving the ``with`` block removes what is unfinished, and the folder if no shard is done.

    Args:
        path: of the folder.
        identity: what makes this run another one; can be written as JSON.
        overwrite: begin anew if the folder is another run's.

    Raises:
        OptionError: the folder is another run's and not to be overwritten, or another process has it.
        InputError: the folder cannot be written.
    """

    def __init__(self, path: str, identity: dict[str, Any], overwrite: bool) -> None:
        self.path = path
        self._identity = identity | {"folder_format": FORMAT}
        self._overwrite = overwrite
        self._lock: int | None = None

    def __enter__(self) -> "RunFolder":
        try:
            os.makedirs(self.path, exist_ok=True)
            self._take_lock()
            self._begin()
        except OSError as error:
            self._release()
            raise InputError(f"{error.filename or self.path}: cannot be written: {error.strerror}") from None
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        with suppress(OSError):  # of a disk that is full, say: what is unfinished does no harm
            self._remove_unfinished()
        number = len(self.finished())
        if not number and not self.is_verified:
            self.remove()
        elif error is not None:
            what = f"keeps {number} finished shard{'s' if number > 1 else ''}"
            print(f"{self.path}: {what}; the same command goes on from there", file=sys.stderr, flush=True)
        self._release()

    def is_of_this_run(self) -> bool:
        """Whether there is something of this run to go on with."""
        return read_json(os.path.join(self.path, IDENTITY)) == self._identity

    def finished(self) -> set[int]:
        """The numbers of the shards that are done."""
        names = os.listdir(self.path) if os.path.isdir(self.path) else []
        return {int(name) for name in names if SHARD.fullmatch(name)}

    def is_finished(self, number: int) -> bool:
        """Whether a shard is done."""
        return os.path.isdir(shard_folder(self.path, number))

    def joined_prefix(self, key: int) -> str:
        """The path of the dataset for a key, given by its number, that the shards are joined to."""
        return os.path.join(self.path, f"joined-{key}")

    @property
    def is_verified(self) -> bool:
        """Whether the joined datasets are finished, and were found to be right."""
        return os.path.exists(os.path.join(self.path, VERIFIED))

    def set_verified(self) -> None:
        """Remember that the joined datasets are finished and right.

        Raises:
            InputError: the disk is full.
        """
        path = os.path.join(self.path, VERIFIED)
        try:
            write_whole(path, b"")
            sync_file(self.path)  # before any file leaves
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error.strerror}") from None

    def clear(self) -> None:
        """Forget the shards that are done.

        Raises:
            InputError: they cannot be removed.
        """
        try:
            for number in self.finished():
                shutil.rmtree(shard_folder(self.path, number))
            for name in os.listdir(self.path):  # after the shards, which may not be without them
                if name == VERIFIED or JOINED.fullmatch(name):
                    os.remove(os.path.join(self.path, name))
        except OSError as error:
            raise InputError(f"{error.filename}: cannot be removed: {error.strerror}") from None

    def remove(self) -> None:
        """Remove the folder: its run is finished."""
        with suppress(OSError):  # what a kill leaves of the rest is then no run to go on with
            os.remove(os.path.join(self.path, IDENTITY))
        shutil.rmtree(self.path, ignore_errors=True)

    def _take_lock(self) -> None:
        deadline = time.monotonic() + LOCK_SECONDS
        while self._lock is None:
            try:
                self._lock = open_exclusively(os.path.join(self.path, LOCK))
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise OptionError(f"{self.path}: another process is writing these datasets") from None
                time.sleep(0.1)
        os.register_at_fork(after_in_child=self._release)
        os.write(self._lock, f"{socket.gethostname()} {os.getpid()}\n".encode())

    def _begin(self) -> None:
        """Go on with what is there, or begin anew."""
        names = set(os.listdir(self.path)) - {LOCK}
        strange = sorted(name for name in names if not _is_ours(name))
        if strange:
            raise OptionError(f"{self.path}: is no folder of unfinished runs (it holds {strange[0]}); move it away")
        found = read_json(os.path.join(self.path, IDENTITY))
        if found is not None and found != self._identity and not self._overwrite:
            raise OptionError(
                f"{self.path}: holds what another run has done: {difference(found, self._identity)}. Run that command "
                "again to go on with it, or give --overwrite to begin anew"
            )
        self._remove_unfinished()
        if found != self._identity or (self._overwrite and self.is_verified):  # the datasets of that are in place
            self.clear()
            write_whole(os.path.join(self.path, IDENTITY), json.dumps(self._identity).encode())

    def _remove_unfinished(self) -> None:
        for name in os.listdir(self.path):
            path = os.path.join(self.path, name)
            if UNFINISHED.fullmatch(name):
                shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _is_ours(name: str) -> bool:
    return name in (IDENTITY, VERIFIED) or any(form.match(name) for form in (SHARD, JOINED, UNFINISHED))


def read_json(path: str) -> dict[str, Any] | None:
    """What a file holds as JSON; None if there is no such file or it is no JSON object."""
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """What makes two runs different ones, in words."""
    inputs_before, inputs_now = ({path: rest for path, *rest in run.get("inputs", [])} for run in (before, now))
    for path in [*inputs_now, *inputs_before]:
        if (path in inputs_before) != (path in inputs_now):
            return f"its inputs were others, {path} is in one of the two only"
        if inputs_now[path] != inputs_before[path]:
            return f"its input {path} has changed since"
    names = [name for name in now if now[name] != before.get(name)]
    if not names or "folder_format" in names:
        return "it is another version's"
    return f"it differs in {names[0]}"
