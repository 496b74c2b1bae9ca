"""A checkpoint on disk: complete or ignored, and locked while another process reads it.

    FOLDER/iter_0001000/        DeepSpeed's files
        complete.json           written when all others are on disk: their sizes, and what kind of run saved them
    FOLDER/latest               its name, for DeepSpeed's own tools

A folder without ``complete.json``, or with other files than it lists, is incomplete; it is skipped and named in the
log.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from typing import Any, NamedTuple

from megatron_bfp.errors import InputError
from megatron_bfp.huggingface.checkpoint import COMPLETE, FOLDER_NAME

from ..ranks import log

OUR_FILES = re.compile(r"\w+_states\.pt|zero_to_fp32\.py|complete\.json\.\w+\.part")
"""What a checkpoint has beside ``complete.json``. Megatron-LM gives its folders the same names."""


@dataclasses.dataclass(frozen=True)
class SavedRun:
    """What ``complete.json`` says of the run that saved a checkpoint."""

    iteration: int
    consumed_samples: int
    global_batch_size: int
    data_parallel_size: int
    tensor_model_parallel_size: int
    zero_stage: int
    data: dict[str, Any] | None = None
    """What decides data and model, and what was consumed (``DataHistory.at``); None if its version recorded nothing."""


class Checkpoint(NamedTuple):
    """A complete checkpoint, to resume from."""

    path: str
    saved: SavedRun
    universal: str | None
    """The folder of its conversion for this run's number of ranks, if it had to be converted."""


def open_checkpoint(path: str) -> Checkpoint:
    """Read ``complete.json``, and check that all files it lists are there.

    Raises:
        InputError: the checkpoint is incomplete.
    """
    try:
        with open(os.path.join(path, COMPLETE), encoding="utf-8") as file:
            content = json.load(file)
        sizes = content.pop("files")
        saved = SavedRun(**content)
    except FileNotFoundError:
        raise InputError(f"it has no {COMPLETE}: its run ended while writing it") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{COMPLETE}: {error}") from None
    for name, size in sizes.items():
        file_path = os.path.join(path, name)
        if not os.path.isfile(file_path):
            raise InputError(f"{name} is missing")
        if os.path.getsize(file_path) != size:
            raise InputError(f"{name} has {os.path.getsize(file_path)} bytes, not {size}")
    return Checkpoint(path, saved, universal=None)


def latest_checkpoint(folder: str) -> Checkpoint | None:
    """The complete checkpoint of the highest iteration. Logs a line for each later one that is incomplete.

    Raises:
        InputError: the folder cannot be read.
    """
    names = checkpoint_names(folder)
    for iteration in sorted(names, reverse=True):
        path = os.path.join(folder, names[iteration])
        try:
            return open_checkpoint(path)
        except InputError as error:
            log(f"--load {folder}: skipped {path}: {error}")
    return None


def checkpoint_names(folder: str) -> dict[int, str]:
    """The names of a folder's checkpoints, complete or not, by iteration.

    Raises:
        InputError: the folder cannot be read.
    """
    try:
        names = os.listdir(folder) if os.path.isdir(folder) else []
    except OSError as error:
        raise InputError(f"--load {folder}: cannot be read: {error.strerror}") from None
    return {int(match[1]): name for name in names if (match := FOLDER_NAME.fullmatch(name))}


def remove_checkpoint(path: str) -> None:
    """Remove a checkpoint, ``complete.json`` first: one that is half removed is incomplete."""
    if os.path.isfile(os.path.join(path, COMPLETE)):
        os.remove(os.path.join(path, COMPLETE))
    if os.path.isdir(path):
        shutil.rmtree(path)


def is_abandoned(path: str) -> bool:
    """Whether a checkpoint is incomplete because saving or removing it was cut off. A folder with files of others is
    not ours to judge."""
    return all(OUR_FILES.fullmatch(name) for name in os.listdir(path))


@contextlib.contextmanager
def removing(path: str) -> Iterator[bool]:
    """Keep other runs from reading a checkpoint while it is removed.

    Yields:
        False if another process reads it now. A file system without locks forbids nothing.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        is_free = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_free = False
        except OSError:
            pass
        yield is_free
    finally:
        os.close(descriptor)
