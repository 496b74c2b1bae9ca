"""When damage is noticed: at open, at the read, or by ``verify`` alone, as the README says."""

import itertools
import json
import os
import shutil

import numpy as np
import pytest
from helpers.datasets import documents_of, write

from megatron_bfp import IndexedDatasetError, SequenceIndexError
from megatron_bfp.indexed_dataset.format import HEADER_BYTES
from megatron_bfp.indexed_dataset.reader import IndexedDataset
from megatron_bfp.indexed_dataset.writer import IndexedDatasetWriter
from megatron_bfp.sequence_index.builder import build
from megatron_bfp.sequence_index.fingerprints import END_BYTES
from megatron_bfp.sequence_index.format import canonical_json
from megatron_bfp.sequence_index.key import IndexKey, index_directory
from megatron_bfp.sequence_index.reader import SequenceIndex
from megatron_bfp.sequence_index.verify import verify, verify_all

LENGTHS = [5, 0, 12, 3, 16, 2, 2, 9, 7, 1, 20, 8]
LARGE = 10_000
DAMAGE = (SequenceIndexError, IndexedDatasetError)


def content_of(folder):
    return {name: (folder / name).read_bytes() for name in sorted(os.listdir(folder))}


def flipped(content, offset):
    return content[:offset] + bytes([content[offset] ^ (1 << offset % 8)]) + content[offset + 1 :]


def refused_at_open(path, prefix):
    with pytest.raises(DAMAGE):
        SequenceIndex(path, IndexedDataset(prefix))


def refused_by_verify(prefix):
    with pytest.raises(DAMAGE):
        verify_all(prefix)


@pytest.mark.parametrize("nested", [False, True])
def test_verify_refuses_every_flipped_byte_and_every_truncation_of_the_idx(write_dataset, tmp_path, nested):
    documents = documents_of(LENGTHS)
    dataset = write_dataset([documents[:2], documents[2:]] if nested else documents)
    build(dataset, IndexKey(8, 0, dataset.num_documents), index_directory(dataset.prefix))
    path = tmp_path / "data.idx"
    content = path.read_bytes()
    for offset in range(len(content)):
        for altered in (flipped(content, offset), content[:offset]):
            path.write_bytes(altered)
            refused_by_verify(dataset.prefix)
    path.write_bytes(content)
    assert len(verify_all(dataset.prefix)) == 1


def test_a_count_that_decides_how_documents_are_looked_up_is_checked_at_open(tmp_path):
    """Without empty documents, and as many sequences as documents, documents are not looked up. This .idx has as many,
    and one document without a sequence: an index.json that denies it would shift the others."""
    prefix = str(tmp_path / "data")
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        writer.add(np.arange(45), np.array([5, 12, 1, 16, 2, 9]), np.array([1, 2, 0, 1, 1, 1]))
        writer.finalize()
    dataset = IndexedDataset(prefix)
    index = build(dataset, IndexKey(8, 0, 6), index_directory(prefix))
    path = tmp_path / "data.bfp" / index.key.name / "index.json"
    content = path.read_bytes()
    assert b'"empty_documents": 1' in content
    path.write_bytes(content.replace(b'"empty_documents": 1', b'"empty_documents": 0'))
    refused_at_open(index.path, prefix)


def test_verify_refuses_every_pair_of_swapped_files(tmp_path):
    """Of two datasets with files of the same sizes, and of their indexes for two sequence lengths."""
    files = []
    for name, lengths in (("a", LENGTHS), ("b", LENGTHS[::-1])):
        dataset = write(tmp_path / name, documents_of(lengths))
        files += [f"{name}.bin", f"{name}.idx"]
        for key in (IndexKey(8, 0, 12), IndexKey(7, 0, 12, 2)):
            folder = f"{name}.bfp/{build(dataset, key, index_directory(dataset.prefix)).key.name}"
            files += [f"{folder}/{file}" for file in sorted(os.listdir(tmp_path / folder))]
    contents = {file: (tmp_path / file).read_bytes() for file in files}
    pairs = [pair for pair in itertools.combinations(files, 2) if contents[pair[0]] != contents[pair[1]]]
    assert len(pairs) > 150
    for first, second in pairs:
        (tmp_path / first).write_bytes(contents[second])
        (tmp_path / second).write_bytes(contents[first])
        refusals = 0
        for name in "ab":
            try:
                verify_all(str(tmp_path / name))
            except DAMAGE:
                refusals += 1
        only_tokens = first.endswith(".bin") and second.endswith(".bin")
        assert refusals or only_tokens, (first, second)  # tokens have no checksum: the README says so
        for file in (first, second):
            (tmp_path / file).write_bytes(contents[file])
    assert all(len(verify_all(str(tmp_path / name))) == 2 for name in "ab")


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """An index whose arrays are larger than what is checked of them at open: half of the documents are long."""
    folder = tmp_path_factory.mktemp("large")
    lengths = np.random.default_rng(1).integers(1, 30, LARGE)
    with IndexedDatasetWriter(str(folder / "data"), np.uint16) as writer:
        writer.add(np.arange(lengths.sum()) % 60_000, lengths)
        writer.finalize()
    dataset = IndexedDataset(str(folder / "data"))
    build(dataset, IndexKey(16, 0, LARGE), index_directory(dataset.prefix))
    return folder


@pytest.mark.parametrize("name", ["document_ids.npy", "long_documents.npy"])
def test_damage_deep_inside_a_large_array_is_found_by_verify(large, tmp_path, name):
    """At the ends, opening refuses it. In between, the read refuses what contradicts the lengths; another document that
    would fit as well is refused by verify alone."""
    shutil.copytree(large, tmp_path, dirs_exist_ok=True)
    dataset = IndexedDataset(str(tmp_path / "data"))
    folder = tmp_path / "data.bfp" / f"s16-d0-{LARGE}"
    index = SequenceIndex(str(folder), dataset)
    truth = [index.chunk_spans(i) for i in range(len(index))]
    content = (folder / name).read_bytes()
    assert len(content) > 2 * END_BYTES
    outcomes = {"open": 0, "read": 0, "verify": 0}
    offsets = np.random.default_rng(2).integers(END_BYTES, len(content) - END_BYTES, 15).tolist()
    for offset in [0, 100, END_BYTES - 1, len(content) - END_BYTES, len(content) - 1, *offsets]:
        (folder / name).write_bytes(flipped(content, offset))
        with pytest.raises(SequenceIndexError):
            verify(str(folder), dataset)
        try:
            opened = SequenceIndex(str(folder), dataset)
        except SequenceIndexError:
            outcomes["open"] += 1
            continue
        try:
            assert [opened.chunk_spans(i) for i in range(len(opened))] != truth
            outcomes["verify"] += 1
        except SequenceIndexError:
            outcomes["read"] += 1
    assert outcomes["open"] == 5 and outcomes["read"] > 1 and sum(outcomes.values()) == 20


@pytest.mark.parametrize("part", ["lengths", "pointers", "documents"])
def test_damage_deep_inside_an_idx_is_found_by_verify_and_gives_no_wrong_sample(tmp_path, part):
    """Between the offsets that opening looks at."""
    number = 300_000
    with IndexedDatasetWriter(str(tmp_path / "data"), np.uint16) as writer:
        writer.add(np.arange(2 * number) % 60_000, np.full(number, 2))
        writer.finalize()
    dataset = IndexedDataset(str(tmp_path / "data"))
    index = build(dataset, IndexKey(3, 0, number), index_directory(dataset.prefix))
    truth = index.chunk_spans(number // 2)
    start = HEADER_BYTES + {"lengths": 0, "pointers": 4 * number, "documents": 12 * number}[part]
    path = tmp_path / "data.idx"
    content = path.read_bytes()
    opened = 0
    for offset in range(start + number // 2 * 4, start + number // 2 * 4 + 20_000, 1001):
        path.write_bytes(flipped(content, offset))
        refused_by_verify(dataset.prefix)
        try:
            altered = SequenceIndex(index.path, IndexedDataset(dataset.prefix))
            opened += 1
            assert altered.chunk_spans(number // 2) == truth
        except DAMAGE:
            continue
    assert opened


def test_an_index_of_another_split_or_dataset_is_refused_by_name(tmp_path):
    datasets = [write(tmp_path / name, documents_of(lengths)) for name, lengths in (("a", LENGTHS), ("b", [3] * 12))]
    first, second = (build(dataset, IndexKey(8, 0, 6), index_directory(dataset.prefix)) for dataset in datasets)
    with pytest.raises(SequenceIndexError, match="a.bfp/s8-d0-6: it was built from another .*b.idx"):
        SequenceIndex(first.path, datasets[1])
    os.rename(second.path, tmp_path / "b.bfp" / "s8-d6-12")
    with pytest.raises(SequenceIndexError, match="s8-d6-12.* describes another index"):
        SequenceIndex(str(tmp_path / "b.bfp" / "s8-d6-12"), datasets[1])


@pytest.mark.parametrize("entry", ["counts", "files", "documents", "seq_length"])
def test_an_index_json_with_the_right_form_and_another_content_is_refused(write_dataset, tmp_path, entry):
    dataset = write_dataset(documents_of(LENGTHS))
    path = tmp_path / "data.bfp" / build(dataset, IndexKey(8, 0, 12), index_directory(dataset.prefix)).key.name
    metadata = json.loads((path / "index.json").read_bytes())
    metadata[entry] = {
        "counts": metadata["counts"] | {"tokens": 1},
        "files": {},
        "documents": [0, 11],
        "seq_length": 9,
    }[entry]
    (path / "index.json").write_bytes(canonical_json(metadata))
    refused_at_open(str(path), dataset.prefix)
