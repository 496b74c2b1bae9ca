"""Indexes of targets only: their names, counts and bytes, how they are read, verified and refused."""

import dataclasses
import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
from helpers.chunks import chunk_rows
from helpers.datasets import DATA, documents_of
from helpers.indexes import LENGTHS, content_of, forge, write_metadata

from megatron_bfp import SequenceIndexError, pack
from megatron_bfp.indexed_dataset.reader import IndexedDataset
from megatron_bfp.indexed_dataset.writer import IndexedDatasetWriter
from megatron_bfp.sequence_index.builder import build
from megatron_bfp.sequence_index.key import IndexKey, build_command, index_directory, split_fractions
from megatron_bfp.sequence_index.reader import SequenceIndex
from megatron_bfp.sequence_index.split import PackedSplit
from megatron_bfp.sequence_index.verify import verify


@pytest.fixture
def index(dataset):
    return build(dataset, IndexKey(8, 1, 11, targets_only=True), index_directory(dataset.prefix))


def test_an_index_holds_what_packing_gives(dataset, index):
    packing = pack(LENGTHS[1:11], 8, targets_only=True)
    assert index.work(np.arange(len(index))).tolist() == packing.work.tolist()
    assert [chunk_rows(index, i).tolist() for i in range(len(index))] == [
        (packing[i] + [1, 0, 0]).tolist() for i in range(len(packing))
    ]
    assert index.counts == {
        "documents": 10,
        "empty_documents": 1,
        "one_token_documents": 1,
        "padding": packing.padding,
        "sequences": len(packing),
        "tokens": sum(LENGTHS[1:11]),
    }
    for i in range(len(index)):
        for chunk in index.chunk_spans(i):
            ((start, end),) = dataset.spans(np.array([chunk.document]))
            assert start <= chunk.start < chunk.end < chunk.document_end == end and chunk.continues


def test_the_name_and_the_command_say_so(dataset, index):
    assert os.path.basename(index.path) == "s8-d1-11-t"
    for key in (IndexKey(8, 0, 12, None, False, True), IndexKey(8, 3, 7, 2, True, True)):
        assert IndexKey.from_name(key.name) == key and " --targets-only" in build_command(dataset, key)
    assert IndexKey(8, 3, 7, 2, True, True).name == "s8-d3-7-m2-e-t"
    for name in ("s8-d0-1-t-e", "s8-d0-1-t-m2", "s8-d0-1-T", "s8-d0-1-t-t", "s8-d0-1t"):
        assert IndexKey.from_name(name) is None


def test_the_options_of_a_run_mean_it(dataset):
    ((_, half), *_) = split_fractions("1,1")
    for split in ("1,1", (0.0, half)):
        packed = PackedSplit.open(dataset, 8, split, targets_only=True)
        assert packed.index.key == IndexKey(8, 0, 6, targets_only=True)
        assert PackedSplit.open(dataset, 8, split).index.key == IndexKey(8, 0, 6)
    with pytest.raises(SequenceIndexError, match="no sequence index s8-d0-12-t, only .*--targets-only$"):
        PackedSplit.open(dataset, 8, None, targets_only=True, builds=False)


def test_the_order_is_not_that_of_the_other_index(dataset, index):
    other = build(dataset, IndexKey(8, 1, 11), index_directory(dataset.prefix))
    assert index.identity != other.identity and index.identity.endswith("-t")


@pytest.mark.parametrize("lengths", [[], [0, 0], [1], [1, 0, 1], [2], [9], [17, 1]])
def test_corpora_at_the_edges_build_and_verify(write_dataset, lengths):
    dataset = write_dataset(documents_of(lengths) if lengths else [])
    index = build(dataset, IndexKey(8, 0, len(lengths), targets_only=True), index_directory(dataset.prefix))
    assert len(verify(index.path, dataset)) == len(pack(lengths, 8, targets_only=True))
    assert index.counts["one_token_documents"] == lengths.count(1)


def test_an_index_under_the_other_s_name_is_refused(dataset, index, tmp_path):
    other = build(dataset, IndexKey(8, 1, 11), index_directory(dataset.prefix))
    for one, name in ((index, "s8-d1-11-e"), (other, "s8-d1-11-e-t")):
        os.rename(one.path, tmp_path / "data.bfp" / name)
        with pytest.raises(SequenceIndexError, match="describes another index; the directory was renamed"):
            SequenceIndex(str(tmp_path / "data.bfp" / name), dataset)


def test_arrays_of_every_token_under_the_name_are_found(dataset, index, tmp_path):
    """Forged with every checksum right."""
    other = build(dataset, IndexKey(8, 1, 11), index_directory(dataset.prefix))
    folder = tmp_path / "data.bfp" / index.key.name
    arrays = {name: np.load(os.path.join(other.path, f"{name}.npy")) for name in ("runs", "document_ids")}
    forge(folder, index.key, **arrays)
    with pytest.raises(SequenceIndexError):
        verify(str(folder), dataset)


@pytest.mark.parametrize("name, change", [("one_token_documents", -1), ("tokens", 1), ("padding", -1)])
def test_a_wrong_count_is_found(dataset, index, name, change):
    folder = Path(index.path)
    metadata = json.loads((folder / "index.json").read_bytes())
    metadata["counts"][name] += change
    write_metadata(folder, metadata)
    with pytest.raises(SequenceIndexError):
        verify(index.path, dataset)


def test_full_chunks_that_a_document_has_no_more_are_refused_at_the_read(write_dataset):
    dataset = write_dataset(documents_of([16, 9, 3]))  # without its last token, the first has one full chunk
    index = build(dataset, IndexKey(8, 0, 3, targets_only=True), index_directory(dataset.prefix))
    assert index.table.long_documents.tolist() == [[0, 1], [1, 2]]
    index.chunk_spans(0)
    index.table = dataclasses.replace(index.table, long_documents=index.table.long_documents + np.array([0, 1]))
    with pytest.raises(SequenceIndexError, match="sequence 0 does not match the length of document 0"):
        index.chunk_spans(0)


EXPECTED_DIGEST = "fce5e55f3be79de711308c3eccf33d6f30752608ead67ab82154b59d25862aa0"
"""The same in every release: it may only change together with the format's version."""


def test_the_bytes_are_the_same_in_every_release(tmp_path):
    lengths = np.load(DATA / "text_lengths.npy")[:3000]
    prefix = str(tmp_path / "data")
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        writer.add(np.arange(lengths.sum()) % 60_000, lengths)
        writer.finalize()
    index = build(IndexedDataset(prefix), IndexKey(2048, 0, 3000, None, True, True), index_directory(prefix))
    digest = hashlib.sha256()
    for name, content in content_of(tmp_path / "data.bfp" / index.key.name).items():
        digest.update(name.encode() + content)
    assert digest.hexdigest() == EXPECTED_DIGEST
