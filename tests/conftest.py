"""Fixtures for all tests, and the order in which they run."""

import multiprocessing
import os

import numpy as np
import pytest
from helpers.datasets import write

pytest_plugins = ["helpers.tokenizer_fixtures"]
os.environ.setdefault("OMP_NUM_THREADS", "1")
SLOWEST_FILES = (
    "end_to_end/test_training.py",
    "end_to_end/test_long_runs.py",
    "end_to_end/test_crashes.py",
    "end_to_end/test_parallel_equivalence.py",
    "cluster/test_launchers.py",
    "megatron_core/test_gpt_dataset.py",
)
"""They take half of the time. They start first, so that no worker is left alone with one at the end."""


def pytest_itemcollected(item):
    """``-k case_07`` finds the tests that are marked with ``case(7)``."""
    for marker in item.iter_markers("case"):
        item.extra_keyword_matches.update(f"case_{number:02}" for number in marker.args)


def pytest_collection_modifyitems(items):
    """Files that take longest come first; the others stay in their order."""
    ranks = {path: rank for rank, path in enumerate(SLOWEST_FILES)}
    items.sort(key=lambda item: ranks.get("/".join(item.path.parts[-2:]), len(ranks)))


@pytest.fixture
def write_dataset(tmp_path):
    """``write`` into the test's own folder."""
    return lambda documents, name="data", dtype=np.uint16: write(tmp_path / name, documents, dtype)


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left():
    """A worker process that a test has left behind is an error; Python would wait for it at its end, perhaps for ever.

    With pytest-xdist each of its workers looks after its own tests: the session of this fixture is that of a worker.
    """
    yield
    left = multiprocessing.active_children()
    for process in left:
        process.kill()
    assert left == []
