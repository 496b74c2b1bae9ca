"""A checkpoint that cannot be written must not end the run: what failed is noted, and all ranks learn of it.

DeepSpeed's ranks meet between the files of a checkpoint. A rank that raised there would leave the others waiting, so it
goes on without the file, and the ranks agree at the end whether the checkpoint is whole.
"""

import contextlib
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from typing import Any

from ..ranks import of_all_ranks

TORCH_WRITES = re.compile(r"PytorchStreamWriter|inline_container\.cc|^write\(\): ")
"""In the messages of the RuntimeErrors with which torch answers a write that failed."""


class FailedWrites:
    """The first write of this rank that failed in one checkpoint."""

    def __init__(self) -> None:
        self._first: str | None = None

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note an error of a write that is done inside, and go on. Other errors are raised."""
        try:
            yield
        except OSError as error:
            self._first = self._first or error.strerror or str(error)
        except RuntimeError as error:
            if not TORCH_WRITES.search(str(error)):
                raise
            self._first = self._first or str(error).split("\n")[0]

    @contextlib.contextmanager
    def noted_in(self, engine: Any) -> Iterator[None]:
        """Note errors of the writes of DeepSpeed's ``engine.save_checkpoint``."""
        writers = ((engine.checkpoint_engine, "save"), (engine, "_copy_recovery_script"))
        with contextlib.ExitStack() as stack:
            for owner, name in writers:
                setattr(owner, name, self._noting(getattr(owner, name)))
                stack.callback(delattr, owner, name)
            yield

    def _noting(self, write: Callable[..., None]) -> Callable[..., None]:
        def write_or_note(*arguments: Any, **keywords: Any) -> None:
            with self.noted():
                write(*arguments, **keywords)

        return write_or_note

    def of_any_rank(self) -> str | None:
        """The first failure, with its node; None if all ranks wrote everything. Call it on all ranks."""
        mine = self._first and f"{self._first} (node {socket.gethostname()})"
        return next(filter(None, of_all_ranks(mine)), None)


def lack_of_room(folder: str, needed: int) -> str | None:
    """What is missing for a checkpoint; None if there is room, or the folder is yet to be created.

    Args:
        needed: bytes of a checkpoint.
    """
    if not os.path.isdir(folder):
        return None
    space = shutil.disk_usage(folder)
    if not space.total or space.free >= needed:  # some network file systems tell nothing
        return None
    return f"{space.free / 1e9:,.1f} GB are free, a checkpoint takes {needed / 1e9:,.1f} GB"
