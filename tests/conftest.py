"""Fixtures for all tests: datasets on disk from lists of documents, and the examples on the path."""

import multiprocessing
import os
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
DATA = Path(__file__).parent / "data"
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(Path(__file__).parent)]
os.environ.setdefault("OMP_NUM_THREADS", "1")

from megatron_bfp.indexed_dataset.reader import IndexedDataset
from megatron_bfp.indexed_dataset.writer import IndexedDatasetWriter


def write(prefix, documents, dtype=np.uint16):
    """Write documents (lists of token ids, or of such lists for several sequences a document) and open them."""
    with IndexedDatasetWriter(str(prefix), dtype) as writer:
        for document in documents:
            nested = len(document) and isinstance(document[0], list)
            sequences = document if nested else [document]
            tokens = np.concatenate([np.asarray(sequence, dtype=np.int64) for sequence in sequences])
            writer.add(tokens, np.array([len(sequence) for sequence in sequences]), [len(sequences)])
        writer.finalize()
    return IndexedDataset(str(prefix))


def documents_of(lengths, first_token=1):
    """Documents whose tokens are all different, so that a misplaced one cannot hide."""
    ends = np.cumsum(lengths)
    return [list(range(first_token + end - length, first_token + end)) for end, length in zip(ends, lengths)]


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
