"""Advice on memory maps changes no content and takes a pass out of this process's memory."""

import re

import numpy as np

from megatron_bfp.memory_maps import expect_next, expect_scattered_reads


def resident_file_pages():
    """Bytes of mapped files that count as this process's memory."""
    with open("/proc/self/status", encoding="ascii") as file:
        return 1024 * int(re.search(r"RssFile:\s+(\d+)", file.read()).group(1))


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
