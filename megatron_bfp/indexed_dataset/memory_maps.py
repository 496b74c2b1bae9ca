"""Memory maps, and advice to the kernel about them: scattered reads, passes from end to end, pages no longer needed.

A map holds its file open, which matters if a blend has thousands of corpora. Without advice the kernel fetches up to
megabytes around every missing page, which makes a scattered read from a cold file many times slower; and the pages of a
pass count as this process's memory long after they were read. Advice changes speed only, never content. On systems
without it nothing is advised.
"""

import contextlib
import errno
import mmap
import os
import resource
import time
from collections.abc import Callable
from typing import Any, BinaryIO, TypeVar

import numpy as np

SMALL = 1 << 14
"""Bytes of an array that is read rather than mapped: a map takes a page or more and holds a file open."""
SLOW_READ, SLOW_ITEM = 50e-6, 10e-6
"""Seconds of a read, and of each of its items, above which pages seem to come from a disk. From the cache an item takes
1e-6; one wait for a disk takes 20e-6 to 1e-3."""
ASKED_READS = 16
"""After a slow read, so many reads have their pages asked for."""

MAPPED_AROUND = 1 << 18
"""Bytes, more than what the kernel maps around a page that is touched: it maps again what was let go just before."""

Opened = TypeVar("Opened")


def map_file(path: str) -> np.ndarray:
    """The bytes of a file that is not empty, uint8, mapped and read-only.

    Raises:
        OSError: it cannot be opened.
    """
    return _with_files_to_spare(path, lambda: np.asarray(np.memmap(path, mode="r")))


def open_unmapped(path: str) -> BinaryIO:
    """A file to read by system calls, unbuffered.

    Raises:
        OSError: it cannot be opened.
    """

    def open_with_one_to_spare() -> BinaryIO:
        file = open(path, "rb", buffering=0)
        os.close(os.dup(file.fileno()))  # the next file, which may not come through here, can be opened, too
        return file

    return _with_files_to_spare(path, open_with_one_to_spare)


def load_array(path: str) -> np.ndarray:
    """An array in numpy's format, mapped and read-only, or read if it is small.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is no such array. (numpy's parser raises other errors as well.)
    """
    if os.path.getsize(path) <= SMALL:
        return np.load(path, allow_pickle=False)
    return _with_files_to_spare(path, lambda: np.asarray(np.load(path, mmap_mode="r", allow_pickle=False)))


def _with_files_to_spare(path: str, open_it: Callable[[], Opened]) -> Opened:
    """Open, and if this process has too many files open, raise its limit as far as it may and open again: each map
    holds one, and blends have thousands.

    Raises:
        OSError: it cannot be opened or mapped; names the file, and what helps.
    """
    try:
        return open_it()
    except OSError as error:
        if error.errno != errno.EMFILE:
            if error.filename is None:  # not from opening it, but from mapping it
                raise OSError(error.errno, _refused(path, error), path) from None
            raise
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return _with_files_to_spare(path, open_it)
    raise OSError(errno.EMFILE, f"too many files are open, {soft} are allowed; raise the limit (ulimit -Hn)", path)


def _refused(path: str, error: OSError) -> str:
    """Why a file could not be mapped, and what helps."""
    reason = error.strerror or str(error)
    if error.errno == errno.ENOMEM:
        remedy = (
            "raise the limits on memory maps (sysctl vm.max_map_count, ulimit -v), join corpora with "
            "megatron-bfp merge, or train with --no-mmap-bin-files, which maps no .bin"
        )
    elif path.endswith(".bin"):
        remedy = "train with --no-mmap-bin-files (mmap_bin_files=False in a script), which reads it by system calls"
    else:
        remedy = "copy it to a file system that allows memory maps; --no-mmap-bin-files is for the .bin alone"
    return f"mapping it into memory failed ({reason}); {remedy}"


def expect_scattered_reads(array: np.ndarray) -> None:
    """From now on fetch only the pages that are touched."""
    _advise(array, "MADV_RANDOM")


def expect_pass(array: np.ndarray) -> None:
    """From now on fetch ahead of the pages that are touched."""
    _advise(array, "MADV_SEQUENTIAL")


def expect_next(array: np.ndarray, first: int, end: int) -> np.ndarray:
    """``array[first:end]``, the next step of a pass in such steps. What came before it leaves this process's memory;
    the kernel may keep it cached."""
    expect_pass(array[first : 2 * end - first])
    done = array[max(0, 2 * first - end - MAPPED_AROUND // array.itemsize) : first]
    expect_scattered_reads(done)
    _advise(done, "MADV_DONTNEED")
    return array[first:end]


class ScatteredReads:
    """Reads of the same few items from several arrays of one map, with the pages asked for beforehand where that pays.

    A page that is not cached costs a wait for the disk, and a dozen pages a dozen waits, unless they are asked for
    together. But asking is one system call per page, which would double the time of a read from the cache. So pages
    are asked for after a slow read, for the next ``ASKED_READS``; the one after them shows whether reads still are.

    Args:
        arrays: views of a read-only map.
    """

    def __init__(self, *arrays: np.ndarray) -> None:
        mapped = _mapping(arrays[0]) if hasattr(mmap, "MADV_WILLNEED") else None
        self._advise = mapped.madvise if mapped is not None else None
        self._starts = [(_offset(array, mapped), array.itemsize) for array in arrays] if mapped is not None else []
        self._num_asked = 0  # of the reads to come
        self._began = 0.0

    def begin(self, items: np.ndarray) -> None:
        """Items [k] of each array are read now. One that does not exist is left for the read itself to refuse."""
        self._began = time.perf_counter()
        if self._num_asked and self._advise is not None:
            for item in items.tolist():
                for start, itemsize in self._starts:
                    page = (start + item * itemsize) // mmap.PAGESIZE * mmap.PAGESIZE
                    with contextlib.suppress(ValueError, OverflowError, OSError):  # beyond the map
                        self._advise(mmap.MADV_WILLNEED, page, mmap.PAGESIZE)

    def end(self, num_items: int) -> None:
        """They have been read."""
        if self._num_asked:
            self._num_asked -= 1
        elif time.perf_counter() - self._began > SLOW_READ + num_items * SLOW_ITEM:
            self._num_asked = ASKED_READS


def _advise(array: np.ndarray, advice: str) -> None:
    """Give advice on the pages that hold ``array``, a view of a read-only map."""
    mapped = _mapping(array)
    if mapped is None or array.nbytes == 0 or not hasattr(mmap, advice):
        return
    start = _offset(array, mapped)
    first_page = start // mmap.PAGESIZE * mmap.PAGESIZE
    with contextlib.suppress(OSError):  # refused: what is read stays the same
        mapped.madvise(getattr(mmap, advice), first_page, start + array.nbytes - first_page)


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def _offset(array: np.ndarray, mapped: mmap.mmap) -> int:
    """Bytes from the start of the map to the array."""
    return _address(array) - _address(np.frombuffer(mapped, dtype=np.uint8))


def _mapping(array: np.ndarray) -> mmap.mmap | None:
    """The map that an array is a view of; None for other arrays."""
    base: Any = array
    while isinstance(base, (np.ndarray, memoryview)):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    return base if isinstance(base, mmap.mmap) else None
