"""Indexes for fill-in-the-middle: their names, counts and commands, how they are verified and refused."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from helpers.datasets import documents_of
from helpers.indexes import LENGTHS, forge, write_metadata

from megatron_bfp import SequenceIndexError
from megatron_bfp.samples.fill_in_the_middle import FimDocuments, RearrangedSpan
from megatron_bfp.sequence_index.builder import build
from megatron_bfp.sequence_index.key import IndexKey, build_command, index_directory
from megatron_bfp.sequence_index.reader import SequenceIndex
from megatron_bfp.sequence_index.split import PackedSplit
from megatron_bfp.sequence_index.verify import verify

ALL = FimDocuments(1, 7)


@pytest.fixture
def index(dataset):
    return build(dataset, IndexKey(8, 1, 11, fim=ALL), index_directory(dataset.prefix))


def test_the_name_and_the_command_say_so(dataset):
    names = {
        IndexKey(8, 0, 12, fim=FimDocuments(0.5, 1234)): "s8-d0-12-fim0.5-1234",
        IndexKey(8, 3, 7, 2, True, True, FimDocuments(1, 0)): "s8-d3-7-m2-e-t-fim1-0",
        IndexKey(8, 0, 12, fim=FimDocuments(1e-6, 5)): "s8-d0-12-fim0.000001-5",
    }
    for key, name in names.items():
        assert key.name == name and IndexKey.from_name(name) == key
    assert " --fim-rate 0.5 --seed 1234" in build_command(dataset, IndexKey(8, 0, 12, fim=FimDocuments(0.5, 1234)))
    for name in ("s8-d0-1-fim0.50-1", "s8-d0-1-fim0-1", "s8-d0-1-fim1.0-1", "s8-d0-1-fim2-1", "s8-d0-1-fim0.5-01"):
        assert IndexKey.from_name(name) is None
    for name in ("s8-d0-1-fim0.5-1-t", "s8-d0-1-fim.5-1", "s8-d0-1-fim0.5", "s8-d0-1-fim0.1234567-1"):
        assert IndexKey.from_name(name) is None


@pytest.mark.parametrize("targets_only", [False, True])
def test_counts_and_spans_are_those_of_the_rearranged_documents(dataset, targets_only):
    """All that fit are chosen here: those of 2 to 5 tokens, with targets only to 6."""
    key = IndexKey(8, 1, 11, targets_only=targets_only, fim=ALL)
    index = verify(build(dataset, key, index_directory(dataset.prefix)).path, dataset)
    lengths = LENGTHS[1:11]
    rearranged = [length for length in lengths if 2 <= length <= 5 + targets_only]
    positions = sum(lengths) - targets_only * np.count_nonzero(lengths) + 3 * len(rearranged)
    assert index.counts["fim_documents"] == len(rearranged) > 2
    assert index.counts["fim_too_long_documents"] == sum(length > 5 + targets_only for length in lengths)
    assert index.counts["tokens"] == sum(lengths) and index.counts["empty_documents"] == 1
    assert index.counts["padding"] == 8 * len(index) - positions
    spans = [chunk for i in range(len(index)) for chunk in index.chunk_spans(i)]
    shown = [chunk for chunk in spans if isinstance(chunk, RearrangedSpan)]
    assert sorted(chunk.document_end - chunk.start for chunk in shown) == sorted(rearranged)
    assert sum(chunk.num_tokens for chunk in spans) == positions
    assert index.work(np.arange(len(index))).tolist() == [
        sum(chunk.num_tokens**2 for chunk in index.chunk_spans(i)) for i in range(len(index))
    ]


def test_an_index_under_another_s_name_is_refused(dataset, index, tmp_path):
    for name in ("s8-d1-11", "s8-d1-11-fim1-8", "s8-d1-11-fim0.5-7"):
        moved = os.rename(index.path, tmp_path / "data.bfp" / name) or str(tmp_path / "data.bfp" / name)
        with pytest.raises(SequenceIndexError, match="describes another index; the directory was renamed"):
            SequenceIndex(moved, dataset)
        os.rename(moved, index.path)


def test_wrong_counts_and_arrays_of_the_plain_documents_are_found(dataset, index):
    folder, key = Path(index.path), index.key
    metadata = json.loads((folder / "index.json").read_bytes())
    for name in ("fim_documents", "fim_too_long_documents"):
        counts = metadata["counts"] | {name: metadata["counts"][name] + 1}
        write_metadata(folder, metadata | {"counts": counts})
        with pytest.raises(SequenceIndexError):
            verify(index.path, dataset)
    write_metadata(folder, metadata)
    verify(index.path, dataset)
    plain = build(dataset, IndexKey(8, 1, 11), index_directory(dataset.prefix))
    forge(folder, key, runs=np.load(Path(plain.path) / "runs.npy"))
    with pytest.raises(SequenceIndexError):
        verify(index.path, dataset)


def test_a_missing_one_is_named_with_its_command(dataset):
    with pytest.raises(SequenceIndexError, match="no sequence index s8-d0-12-fim0.5-3.*--fim-rate 0.5 --seed 3$"):
        PackedSplit.open(dataset, 8, None, fim=FimDocuments(0.5, 3), builds=False)


@pytest.mark.parametrize("lengths", [[], [0], [1], [2], [5], [6], [5, 5, 5], [8, 13]])
def test_corpora_at_the_edges_build_and_verify(write_dataset, lengths):
    dataset = write_dataset(documents_of(lengths) if lengths else [])
    for targets_only in (False, True):
        key = IndexKey(8, 0, len(lengths), targets_only=targets_only, fim=ALL)
        verify(build(dataset, key, index_directory(dataset.prefix)).path, dataset)
