"""Check that checkpoints can be written to a folder, before training starts rather than at the first checkpoint.

Imports no torch, so that preflight answers at once.
"""

import os
import shutil
import tempfile

from megatron_bfp.errors import OptionError
from megatron_bfp.files import sync_file

PROBE_BYTES = 1 << 20
"""Size of the test file: more than a file system stores in the inode itself."""


def check_save(folder: str, checkpoint_bytes: int = 0) -> None:
    """Check that a folder can be created, written to and renamed in, and has enough free space. Creates the folder.

    Args:
        folder: of ``--save``.
        checkpoint_bytes: fewest bytes that one checkpoint takes.

    Raises:
        OptionError: it cannot be written, or has less free space than that.
    """
    try:
        _make(folder)
        _write_and_remove(folder)
    except (FileExistsError, NotADirectoryError):
        raise OptionError(f"--save {folder}: not a folder; a file is in the way: {_file_in_the_way(folder)}") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise OptionError(
            f"--save {folder}: cannot be written: {reason}; give a folder that this user can write"
        ) from None
    if os.path.isdir(os.path.join(folder, "latest")):
        raise OptionError(f"--save {folder}: cannot be written: its file 'latest' is a folder; remove that")
    space = shutil.disk_usage(folder)
    if space.total and space.free < checkpoint_bytes:  # some network file systems tell nothing
        raise OptionError(
            f"--save {folder}: has {space.free / 1e9:,.1f} GB free, a checkpoint takes at least "
            f"{checkpoint_bytes / 1e9:,.1f} GB; free some space or give another folder"
        )


def smallest_checkpoint(num_parameters: int) -> int:
    """Fewest bytes that a checkpoint takes: each weight and Adam's two averages in fp32."""
    return 12 * num_parameters


def _make(folder: str) -> None:
    """Create a folder and its missing parents, and force their names to disk."""
    parent = os.path.dirname(os.path.abspath(folder))
    if not os.path.isdir(folder):
        if not os.path.isdir(parent):
            _make(parent)
        os.makedirs(folder, exist_ok=True)
        sync_file(parent)


def _write_and_remove(folder: str) -> None:
    """Do what saving does: write, force to disk, rename, remove.

    Raises:
        OSError: one of them fails.
    """
    descriptor, path = tempfile.mkstemp(prefix=".write_test_", dir=folder)
    try:
        with open(descriptor, "wb", buffering=0) as file:
            rest = memoryview(bytes(PROBE_BYTES))
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        renamed = f"{path}_renamed"
        os.replace(path, renamed)
        path = renamed
        sync_file(folder)
    finally:
        os.remove(path)


def _file_in_the_way(folder: str) -> str:
    """The innermost part of a path that exists, which is not a folder."""
    path = os.path.abspath(folder)
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path
