"""A small dataset and an index of most of its documents."""

import os

import pytest
from helpers.datasets import documents_of
from helpers.indexes import LENGTHS

from megatron_bfp.sequence_index.builder import build
from megatron_bfp.sequence_index.key import IndexKey, index_directory


@pytest.fixture
def dataset(write_dataset):
    return write_dataset(documents_of(LENGTHS))


@pytest.fixture
def index(dataset):
    return build(dataset, IndexKey(8, 1, 11), index_directory(dataset.prefix))


@pytest.fixture
def read_only(monkeypatch):
    """Make a folder read-only, also for root."""
    real = os.access

    def forbid(folder):
        monkeypatch.setattr(os, "access", lambda path, mode: not str(path).startswith(folder) and real(path, mode))

    return forbid
