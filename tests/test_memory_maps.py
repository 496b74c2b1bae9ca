"""Advice on memory maps changes no content and takes a pass out of this process's memory; limits on open files."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT

from megatron_bfp.memory_maps import SMALL, _mapping, expect_next, expect_scattered_reads, load_array


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


def test_small_arrays_are_read_and_large_ones_mapped(tmp_path):
    for size, is_mapped in ((8, False), (SMALL, True)):
        array = np.arange(size)
        np.save(tmp_path / f"{size}.npy", array)
        found = load_array(str(tmp_path / f"{size}.npy"))
        assert np.array_equal(found, array)
        assert (_mapping(found) is not None) == is_mapped


OPEN_MANY = """
import resource, sys
from megatron_bfp.memory_maps import map_file
resource.setrlimit(resource.RLIMIT_NOFILE, (60, 200))
maps = [map_file(sys.argv[1]) for _ in range(int(sys.argv[2]))]
print(len(maps), resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize("number, message", [(100, "100 (200, 200)"), (300, "raise the limit (ulimit -Hn)")])
def test_more_files_than_the_limit_allows(tmp_path, number, message):
    (tmp_path / "file").write_bytes(b"1234")
    command = [sys.executable, "-c", OPEN_MANY, str(tmp_path / "file"), str(number)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert message in done.stdout + done.stderr
