"""Checksums of files: sampled ones in constant time, and whole ones."""

import hashlib
import os
from typing import Any

import numpy as np

from ..indexed_dataset.memory_maps import expect_next
from ..indexed_dataset.reader import IndexedDataset
from ..progress import Progress

HASHED_BYTES = 1 << 24
"""Bytes hashed in one step."""

END_BYTES = 1 << 14
"""Bytes at each end of an array file that are checked when the index is opened."""


def sampled_fingerprint(content: np.ndarray) -> dict[str, Any]:
    """Size and sampled sha256 of a file's content, in constant time: its first and last 64 KiB, and 256 blocks of 4 KiB
    evenly spaced over all of it.

    Args:
        content: uint8 [bytes], usually a memory map. The fingerprint is of the bytes that are read, and not of a file
            that may have taken their place.

    Returns:
        {"bytes": int, "sampled_sha256": str}
    """
    size = len(content)
    digest = hashlib.sha256()
    offsets = [(0, 1 << 16), (max(0, size - (1 << 16)), 1 << 16)]
    offsets += [(max(0, size - 4096) * block // 255, 4096) for block in range(256)]
    for offset, count in offsets:
        digest.update(content[offset : offset + count].data)
    return {"bytes": size, "sampled_sha256": digest.hexdigest()}


def ends_sha256(path: str) -> str:
    """sha256 of a file's first and last ``END_BYTES``, in hexadecimal: of a small file, of every byte."""
    with open(path, "rb") as file:
        digest = hashlib.sha256(file.read(END_BYTES))
        file.seek(max(0, os.path.getsize(path) - END_BYTES))
        digest.update(file.read(END_BYTES))
    return digest.hexdigest()


def file_sha256(path: str, progress: Progress) -> str:
    """sha256 of a whole file, in hexadecimal."""
    digest, size = hashlib.sha256(), os.path.getsize(path)
    with open(path, "rb") as file:
        for _ in progress(range(0, size, HASHED_BYTES), -(-size // HASHED_BYTES), f"hashing {os.path.basename(path)}"):
            digest.update(file.read(HASHED_BYTES))
    return digest.hexdigest()


def idx_sha256(dataset: IndexedDataset, progress: Progress) -> str:
    """sha256 of the .idx as it was when it was opened, in hexadecimal."""
    digest, size = hashlib.sha256(), len(dataset.idx_content)
    for first in progress(range(0, size, HASHED_BYTES), -(-size // HASHED_BYTES), "hashing the .idx"):
        digest.update(expect_next(dataset.idx_content, first, first + HASHED_BYTES).data)
    return digest.hexdigest()
