"""Advice on memory maps changes no content and takes a pass out of this process's memory; limits on open files."""

import errno
import mmap
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from helpers.datasets import ROOT, write

from megatron_bfp.errors import IndexedDatasetError, SequenceIndexError
from megatron_bfp.indexed_dataset import memory_maps
from megatron_bfp.indexed_dataset.memory_maps import (
    ASKED_READS,
    SMALL,
    ScatteredReads,
    _mapping,
    expect_next,
    expect_scattered_reads,
    load_array,
)
from megatron_bfp.indexed_dataset.reader import IndexedDataset
from megatron_bfp.sequence_index.builder import build
from megatron_bfp.sequence_index.key import IndexKey
from megatron_bfp.sequence_index.reader import SequenceIndex


def resident_file_pages():
    """Bytes of mapped files that count as this process's memory. Those of /dev/shm, where tests run, are RssShmem."""
    with open("/proc/self/status", encoding="ascii") as file:
        return 1024 * sum(map(int, re.findall(r"Rss(?:File|Shmem):\s+(\d+)", file.read())))


def test_a_pass_reads_everything_and_stays_small(tmp_path):
    content = np.random.default_rng(1).integers(0, 256, 64 << 20, dtype=np.uint8)
    (tmp_path / "file").write_bytes(content.tobytes())
    mapped = np.asarray(np.memmap(tmp_path / "file", mode="r"))
    expect_scattered_reads(mapped)
    array = np.frombuffer(mapped, np.int64, len(mapped) // 8 - 1, 3)  # not aligned, as in an .idx
    expected = np.frombuffer(content, np.int64, len(mapped) // 8 - 1, 3)
    before, step = resident_file_pages(), 1 << 17
    for first in range(0, len(array), step):
        end = min(first + step, len(array))
        assert np.array_equal(expect_next(array, first, end), expected[first:end])
        assert resident_file_pages() - before < 16 << 20
    assert np.array_equal(array, expected)


def test_arrays_that_are_no_maps_are_left_alone():
    array = np.arange(10)
    expect_scattered_reads(array)
    expect_scattered_reads(array[:0])
    assert expect_next(array, 2, 5).tolist() == [2, 3, 4]


def test_small_arrays_are_read_and_large_ones_mapped(tmp_path):
    for size, is_mapped in ((8, False), (SMALL, True)):
        array = np.arange(size)
        np.save(tmp_path / f"{size}.npy", array)
        loaded = load_array(str(tmp_path / f"{size}.npy"))
        assert np.array_equal(loaded, array)
        assert (_mapping(loaded) is not None) == is_mapped


def forget_cached_pages(path):
    """What is on the disk is read from there next time."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def pages_asked_for(reads):
    """The numbers of the pages that are asked for, as they are."""
    asked, advise = [], reads._advise

    def note(advice, start, size):
        advise(advice, start, size)
        asked.append(start // mmap.PAGESIZE)

    reads._advise = note
    return asked


def test_pages_are_asked_for_after_a_slow_read_and_no_longer_when_reads_are_fast(tmp_path, monkeypatch):
    per_page = mmap.PAGESIZE // 8
    np.arange(64 * per_page).tofile(tmp_path / "file")
    array = np.frombuffer(memory_maps.map_file(str(tmp_path / "file")), np.int64)
    expect_scattered_reads(array)
    reads = ScatteredReads(array[: 32 * per_page], array[32 * per_page :].view(np.int32))
    asked = pages_asked_for(reads)

    def read(items):
        reads.begin(np.array(items))
        reads.end(len(items))

    monkeypatch.setattr(memory_maps, "SLOW_READ", -1.0)  # every read is slow
    read([0])
    assert asked == []
    read([0, 3 * per_page, 40 * per_page])
    assert asked == [0, 32, 3, 33, 40, 52]
    forget_cached_pages(tmp_path / "file")
    monkeypatch.setattr(memory_maps, "SLOW_READ", 1.0)  # none is
    for _ in range(ASKED_READS - 1):
        read([1])
    assert len(asked) == 6 + 2 * (ASKED_READS - 1)
    read([1])
    read([1])
    assert len(asked) == 6 + 2 * (ASKED_READS - 1)
    assert np.array_equal(array, np.arange(64 * per_page))


def test_asking_for_items_that_are_not_there_is_left_to_the_read(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_maps, "SLOW_READ", -1.0)
    np.arange(4096).tofile(tmp_path / "file")
    array = np.frombuffer(memory_maps.map_file(str(tmp_path / "file")), np.int64)
    for reads in (ScatteredReads(array), ScatteredReads(np.arange(4))):
        for items in ([0], [-(10**6), 10**15, -1, 10**6, 2**62]):
            reads.begin(np.array(items))
            reads.end(len(items))


OPEN_MANY = """
import resource, sys
from megatron_bfp.indexed_dataset.memory_maps import map_file
resource.setrlimit(resource.RLIMIT_NOFILE, (60, 200))
maps = [map_file(sys.argv[1]) for _ in range(int(sys.argv[2]))]
print(len(maps), resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.case(9)
@pytest.mark.parametrize("number, message", [(100, "100 (200, 200)"), (300, "raise the limit (ulimit -Hn)")])
def test_more_files_than_the_limit_allows(tmp_path, number, message):
    (tmp_path / "file").write_bytes(b"1234")
    command = [sys.executable, "-c", OPEN_MANY, str(tmp_path / "file"), str(number)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert message in done.stdout + done.stderr


def refuse_maps(monkeypatch, code, allowed=0):
    """The system gives ``allowed`` more maps, and then none."""
    real, left = mmap.mmap, [allowed]

    class Refused(real):
        def __new__(cls, *arguments, **keywords):
            left[0] -= 1
            if left[0] < 0:
                raise OSError(code, os.strerror(code))
            return real.__new__(real, *arguments, **keywords)

    monkeypatch.setattr(mmap, "mmap", Refused)


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOMEM, errno.ENODEV])
def test_fault_B10_a_refused_map_of_the_bin_names_the_file_and_the_option(write_dataset, monkeypatch, code):
    prefix = write_dataset([[1, 2, 3]]).prefix
    refuse_maps(monkeypatch, code, allowed=1)  # the .idx is opened first
    with pytest.raises(IndexedDatasetError) as error:
        IndexedDataset(prefix)
    message = str(error.value)
    assert message.startswith(f"{prefix}.bin: ") and "--no-mmap-bin-files" in message and "\n" not in message
    assert os.strerror(code) in message
    monkeypatch.undo()
    refuse_maps(monkeypatch, code, allowed=1)
    assert IndexedDataset(prefix, mmap=False).document(0).tolist() == [1, 2, 3]  # the option helps


@pytest.mark.parametrize("code, remedy", [(errno.EPERM, "copy it to"), (errno.ENOMEM, "vm.max_map_count")])
def test_fault_B10_a_refused_map_of_the_idx_or_the_index_says_what_helps(tmp_path, monkeypatch, code, remedy):
    dataset = write(tmp_path / "data", [[1, 2, 3]] * 5000)
    index = build(dataset, IndexKey(8, 0, 5000), str(tmp_path / "data.bfp"))
    refuse_maps(monkeypatch, code)
    with pytest.raises(IndexedDatasetError, match=rf"data\.idx: .*{remedy}.*--no-mmap-bin-files"):
        IndexedDataset(dataset.prefix)
    with pytest.raises(SequenceIndexError, match=rf"document_ids\.npy: .*{remedy}.*--no-mmap-bin-files"):
        SequenceIndex(index.path, dataset)
    monkeypatch.undo()
    SequenceIndex(index.path, IndexedDataset(dataset.prefix))  # the control


OPEN_MANY_DATASETS = """
import resource, sys
from megatron_bfp.indexed_dataset.reader import IndexedDataset
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), 400))
datasets = [IndexedDataset(sys.argv[1], mmap=False) for _ in range(60)]
print([dataset.document(0).tolist() for dataset in datasets] == [[1, 2, 3]] * 60)
"""


@pytest.mark.parametrize("limit", [40, 41])
def test_fault_B10_reading_without_maps_raises_the_limit_on_open_files_too(write_dataset, limit):
    prefix = write_dataset([[1, 2, 3]]).prefix
    command = [sys.executable, "-c", OPEN_MANY_DATASETS, prefix, str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.stdout == "True\n", done.stderr


def test_fault_B10_refused_advice_changes_nothing(tmp_path):
    class Refusing(mmap.mmap):
        def madvise(self, *_):
            raise OSError(errno.EINVAL, "Invalid argument")

    (tmp_path / "file").write_bytes(bytes(range(100)))
    with open(tmp_path / "file", "rb") as file:
        array = np.frombuffer(Refusing(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    expect_scattered_reads(array)
    assert expect_next(array, 10, 20).tolist() == list(range(10, 20))
