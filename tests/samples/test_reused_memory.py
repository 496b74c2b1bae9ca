"""Memory of arrays that are gone serves the next ones, and memory in use never does."""

import gc
import pickle
import threading

import numpy as np
import pytest

from megatron_bfp.samples import reused_memory
from megatron_bfp.samples.reused_memory import MOST_KEPT, SMALL, empty_array

COUNT = SMALL // 8


def address(array):
    return array.__array_interface__["data"][0]


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(reused_memory, "_free", type(reused_memory._free)(reused_memory._free.default_factory))


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.float32, np.uint16])
@pytest.mark.parametrize("nbytes", [0, 8, SMALL - 8, SMALL, SMALL + 8])
def test_an_array_is_as_numpys(dtype, nbytes):
    count = nbytes // np.dtype(dtype).itemsize
    array, model = empty_array(count, dtype), np.empty(count, dtype)
    assert (array.shape, array.dtype, array.strides) == (model.shape, model.dtype, model.strides)
    assert array.flags.writeable and array.flags.aligned and array.flags.c_contiguous
    array[:] = 1
    assert np.array_equal(pickle.loads(pickle.dumps(array)), array)


def test_memory_is_used_again_only_if_no_view_is_left():
    array = empty_array(COUNT, np.int64)
    used = address(array)
    views = [array[5:10][::2], array.view(np.float32)[1:], memoryview(array), array.reshape(2, -1).T]
    del array
    while views:
        assert address(empty_array(COUNT, np.int64)) != used
        views.pop(0)
        gc.collect()
    assert used in {address(array) for array in [empty_array(COUNT, np.int64) for _ in range(2)]}


def test_memory_is_used_again_only_if_no_tensor_is_left():
    torch = pytest.importorskip("torch")
    array = empty_array(COUNT, np.int64)
    used = address(array)
    tensor = torch.from_numpy(array[1:])[2:].view(torch.int32)
    del array
    assert address(empty_array(COUNT, np.int64)) != used
    del tensor
    assert used in {address(array) for array in [empty_array(COUNT, np.int64) for _ in range(2)]}


def test_another_size_has_other_memory():
    used = address(empty_array(COUNT, np.int64))
    others = [empty_array(COUNT + 1, np.int64), empty_array(COUNT - 1, np.int32)]
    assert used not in map(address, others)
    assert address(empty_array(COUNT * 2, np.int32)) == used


def test_a_bounded_amount_is_kept():
    arrays = [empty_array(COUNT, np.int64) for _ in range(MOST_KEPT + 5)]
    arrays.clear()
    assert [len(free) for free in reused_memory._free.values()] == [MOST_KEPT]


def test_threads_never_share_memory():
    wrong = []

    def work(number):
        for _ in range(300):
            first, second = empty_array(COUNT, np.int64), empty_array(COUNT, np.int64)
            first[::512], second[::512] = number, -number
            if (first[::512] != number).any() or (second[::512] != -number).any():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
