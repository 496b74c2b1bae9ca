"""What to tell the kernel about memory maps: scattered reads, passes from end to end, and what is done with.

Left alone, the kernel fetches up to megabytes around every page that is missing, which makes a scattered read from a
cold file many times slower; and pages of a pass count as this process's memory long after it went by. Advice changes
speed only, never content, and is left out where the system has none.
"""

import mmap

import numpy as np


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
    done = array[max(0, 2 * first - end) : first]
    expect_scattered_reads(done)
    _advise(done, "MADV_DONTNEED")
    return array[first:end]


def _advise(array: np.ndarray, advice: str) -> None:
    """Give advice on the pages that hold ``array``, a view of a read-only map."""
    mapped = _mapping(array)
    if mapped is None or array.nbytes == 0 or not hasattr(mmap, advice):
        return
    start = _address(array) - _address(np.frombuffer(mapped, dtype=np.uint8))
    first_page = start // mmap.PAGESIZE * mmap.PAGESIZE
    mapped.madvise(getattr(mmap, advice), first_page, start + array.nbytes - first_page)


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def _mapping(array: np.ndarray) -> mmap.mmap | None:
    """The map that an array is a view of; None if it is none."""
    base = array
    while isinstance(base, (np.ndarray, memoryview)):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    return base if isinstance(base, mmap.mmap) else None
