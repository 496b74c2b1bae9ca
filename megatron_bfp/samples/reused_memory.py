"""Memory of large arrays, used again once nobody refers to them.

What a process frees, the allocator soon gives back to the kernel, and each page of the next sample is a page fault: at
131,072 tokens 1,100 of them, which take longer than making the sample. Here freed memory is kept for the next array of
the same size, as much as the samples of a few batches need.
"""

import weakref
from collections import defaultdict, deque
from functools import partial

import numpy as np
from numpy.typing import DTypeLike

SMALL = 1 << 18
"""Bytes below which the allocator keeps memory itself."""
MOST_KEPT = 64
"""Free pieces kept of each size. A sample takes three of the largest size."""

_free: defaultdict[int, deque[bytearray]] = defaultdict(partial(deque, maxlen=MOST_KEPT))


def empty_array(count: int, dtype: DTypeLike) -> np.ndarray:
    """As ``numpy.empty(count, dtype)``, perhaps in memory of an earlier array.

    No array that can still be reached uses it: it is free when the array made here, all views of it and all tensors
    over them are gone.
    """
    nbytes = count * np.dtype(dtype).itemsize
    if nbytes < SMALL:
        return np.empty(count, dtype)
    free = _free[nbytes]
    try:
        memory = free.pop()
    except IndexError:
        memory = bytearray(nbytes)
    # Not an array over an array: a view of one refers to the lowest array, so this one would be gone too early.
    array = np.frombuffer(memory, dtype)
    weakref.finalize(array, free.append, memory).atexit = False
    return array
