"""File systems of a few megabytes, for what happens when a disk is full."""

import contextlib
import os
import subprocess

import pytest


@contextlib.contextmanager
def small_disk(folder, size):
    """A file system of its own in a new folder, of a size such as "1m"."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system is allowed to root alone, and not everywhere")
    try:
        yield folder
    finally:  # lazily: a thread of what was tested may still hold a file open
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
