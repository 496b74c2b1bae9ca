"""Fixtures for all tests."""

import multiprocessing
import os

import numpy as np
import pytest
from helpers.datasets import write

pytest_plugins = ["helpers.tokenizer_fixtures"]
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_itemcollected(item):
    """``-k case_07`` finds the tests that are marked with ``case(7)``."""
    for marker in item.iter_markers("case"):
        item.extra_keyword_matches.update(f"case_{number:02}" for number in marker.args)


@pytest.fixture
def write_dataset(tmp_path):
    """``write`` into the test's own folder."""
    return lambda documents, name="data", dtype=np.uint16: write(tmp_path / name, documents, dtype)


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left():
    """A worker that a test has left behind is an error; Python would wait for it at its end, perhaps for ever."""
    yield
    left = multiprocessing.active_children()
    for process in left:
        process.kill()
    assert left == []
