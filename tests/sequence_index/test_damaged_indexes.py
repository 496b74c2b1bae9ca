"""No damage to a sequence index goes unseen: at open, at the read, or by verify."""

import hashlib
import json
import os
import shutil

import numpy as np
import pytest
from helpers.datasets import documents_of, write
from helpers.indexes import LENGTHS, content_of, forge, write_metadata

from megatron_bfp import IndexedDatasetError, SequenceIndexError, pack
from megatron_bfp.indexed_dataset import reader as dataset_reader
from megatron_bfp.indexed_dataset.format import HEADER_BYTES
from megatron_bfp.indexed_dataset.reader import IndexedDataset
from megatron_bfp.sequence_index import coverage
from megatron_bfp.sequence_index.builder import build, open_or_build
from megatron_bfp.sequence_index.fingerprints import ends_sha256, sampled_fingerprint
from megatron_bfp.sequence_index.key import IndexKey, index_directory
from megatron_bfp.sequence_index.reader import SequenceIndex
from megatron_bfp.sequence_index.verify import verify, verify_all


def damage(path, content, offset=None, size=None):
    if size is not None:
        content = content[:size]
    else:
        content = bytearray(content)
        content[offset] ^= 1 << offset % 8
    path.write_bytes(content)


def test_verify_refuses_every_flipped_byte_and_every_truncation(dataset, index, tmp_path):
    folder = tmp_path / "data.bfp" / index.key.name
    whole = content_of(folder)
    assert sorted(whole) == ["document_ids.npy", "index.json", "long_documents.npy", "runs.npy"]
    rounds = 0
    for name, content in whole.items():
        for case in [{"offset": offset} for offset in range(len(content))] + [{"size": n} for n in range(len(content))]:
            damage(folder / name, content, **case)
            with pytest.raises(SequenceIndexError, match="s8-d1-11"):
                verify(str(folder), dataset)
            rounds += 1
        (folder / name).write_bytes(content)
    assert rounds == 2 * sum(map(len, whole.values()))
    verify(str(folder), dataset)


def test_every_flipped_byte_of_a_small_index_is_found_at_open(dataset, index, tmp_path):
    folder = tmp_path / "data.bfp" / index.key.name
    for name, content in content_of(folder).items():
        for offset in range(len(content)):
            damage(folder / name, content, offset)
            with pytest.raises(SequenceIndexError, match="s8-d1-11"):
                SequenceIndex(str(folder), dataset)
        (folder / name).write_bytes(content)


def test_an_altered_idx_is_found(dataset, index, tmp_path):
    path = tmp_path / "data.idx"
    content = path.read_bytes()
    for offset in range(len(content)):
        damage(path, content, offset)
        with pytest.raises((SequenceIndexError, IndexedDatasetError)):
            SequenceIndex(index.path, IndexedDataset(dataset.prefix))
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["document_ids.npy", "index.json", "long_documents.npy", "runs.npy"])
def test_a_missing_file_is_named(dataset, index, tmp_path, name):
    (tmp_path / "data.bfp" / index.key.name / name).unlink()
    with pytest.raises(SequenceIndexError, match=f"{name} cannot be read.*--overwrite"):
        SequenceIndex(index.path, dataset)


def test_a_foreign_file_is_found_by_verify(dataset, index, tmp_path):
    (tmp_path / "data.bfp" / index.key.name / "notes.txt").write_text("")
    with pytest.raises(SequenceIndexError, match="do not belong"):
        verify(index.path, dataset)


@pytest.mark.case(11)
def test_a_stale_index_is_refused_with_the_command_that_rebuilds_it(dataset, index, tmp_path):
    other = write(tmp_path / "data", documents_of(LENGTHS[:-1] + [7]))
    with pytest.raises(SequenceIndexError, match="built from another .*megatron-bfp index .*data .*--overwrite"):
        open_or_build(other, index.key)
    rebuilt = build(other, index.key, index_directory(other.prefix), overwrite=True)
    assert verify(rebuilt.path, other).counts["documents"] == 10
    assert os.listdir(tmp_path / "data.bfp") == [index.key.name]


def test_an_index_under_another_name_is_refused(dataset, index, tmp_path):
    for name in ("s8-d1-10", "s4-d1-11", "s8-d0-10", "s8-d1-11-m3"):
        shutil.copytree(index.path, tmp_path / "data.bfp" / name)
        with pytest.raises(SequenceIndexError, match="renamed"):
            SequenceIndex(str(tmp_path / "data.bfp" / name), dataset)


def test_an_index_of_another_dataset_is_refused(dataset, index, tmp_path):
    other = write(tmp_path / "other", documents_of([5] * 12))
    shutil.copytree(index_directory(dataset.prefix), index_directory(other.prefix))
    with pytest.raises(SequenceIndexError, match="built from another"):
        open_or_build(other, index.key)


def test_a_consistent_forgery_is_found_by_verify(dataset, index, tmp_path):
    """Arrays changed together with their checksums: the sequences themselves are counted and must fit."""
    folder = tmp_path / "data.bfp" / index.key.name
    ids = np.load(folder / "document_ids.npy")
    for forged in (np.roll(ids, 1), np.full_like(ids, ids[0])):
        np.save(folder / "document_ids.npy", forged)
        content = (folder / "document_ids.npy").read_bytes()
        metadata = json.loads((folder / "index.json").read_bytes())
        metadata["files"]["document_ids.npy"] = {
            "bytes": len(content),
            "ends_sha256": ends_sha256(folder / "document_ids.npy"),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
        write_metadata(folder, metadata)
        with pytest.raises(SequenceIndexError, match="document_ids.npy"):
            verify(index.path, dataset)


def test_runs_that_contradict_each_other_are_refused_at_open(write_dataset, tmp_path):
    """With every checksum right: a run without sequences, one without chunks, and runs that are not in order."""
    dataset = write_dataset(documents_of([5, 3, 4, 4, 2, 2, 2, 2]))
    key = IndexKey(8, 0, 8)
    index = build(dataset, key, index_directory(dataset.prefix))
    runs, folder = np.array(index.table.runs), tmp_path / "data.bfp" / key.name
    assert runs.tolist() == [[0, 0, 2, 34], [1, 2, 2, 32], [2, 4, 4, 16]]
    for rows in (
        [[0, 0, 2], [2, 4, 7], [2, 4, 4]],
        [[0, 0, 2], [2, 4, 4], [3, 8, 1]],
        [[0, 0, 0], [0, 0, 2], [2, 4, 4]],
        [[0, 0, 2], [1, 4, 4]],
        [[2, 4, 4], [0, 0, 2]],
        [[1, 0, 2], [2, 2, 6]],
        [[0, 1, 2], [2, 5, 3]],
    ):
        forge(folder, key, runs=np.array([[*row, 16] for row in rows], dtype=np.int64))
        with pytest.raises(SequenceIndexError, match="contradict index.json"):
            SequenceIndex(index.path, dataset)
    forge(folder, key, runs=runs)
    assert len(SequenceIndex(index.path, dataset)) == 3


def test_counts_that_contradict_the_index_are_refused_at_open(dataset, index, tmp_path):
    """With the right checksum: the number of documents is also in the name, the padding follows from the others."""
    folder = tmp_path / "data.bfp" / index.key.name
    right = json.loads((folder / "index.json").read_bytes())
    for name, change in (("documents", 1), ("documents", -1), ("padding", 1), ("tokens", 1), ("sequences", 1)):
        write_metadata(folder, right | {"counts": right["counts"] | {name: right["counts"][name] + change}})
        with pytest.raises(SequenceIndexError, match="contradict index.json"):
            SequenceIndex(index.path, dataset)
    write_metadata(folder, right)
    assert SequenceIndex(index.path, dataset).counts == right["counts"]


def test_verify_checks_pointers_of_documents_that_are_in_no_index(write_dataset, tmp_path, monkeypatch):
    """They are far from the ends of the .idx, which opening checks, and the index is of the .idx that is there."""
    monkeypatch.setattr(dataset_reader, "CHECKED_AT_OPEN", 1)
    dataset = write_dataset(documents_of([3] * 8))
    pointer_of_document_6 = HEADER_BYTES + 8 * 4 + 6 * 8
    content = bytearray((tmp_path / "data.idx").read_bytes())
    content[pointer_of_document_6] += 2
    build(dataset, IndexKey(8, 0, 4), index_directory(dataset.prefix))
    assert len(verify_all(dataset.prefix)) == 1
    shutil.rmtree(tmp_path / "data.bfp")
    (tmp_path / "data.idx").write_bytes(content)
    build(IndexedDataset(dataset.prefix), IndexKey(8, 0, 4), index_directory(dataset.prefix))
    with pytest.raises(IndexedDatasetError, match="length or pointer of sequence 5"):
        verify_all(dataset.prefix)


@pytest.mark.parametrize("block", [1, 2, 1 << 17])
def test_fault_D08_a_document_twice_in_one_step_is_found_by_verify(write_dataset, tmp_path, monkeypatch, block):
    """Of equal length and in the same step, where both are read before either is marked as seen."""
    dataset = write_dataset(documents_of([4] * 8))
    key = IndexKey(8, 0, 8)
    index = build(dataset, key, index_directory(dataset.prefix))
    ids = np.array(index.table.document_ids)
    monkeypatch.setattr(coverage, "BLOCK", block)
    verify(index.path, dataset)
    for position, copied in ((1, 0), (7, 6), (7, 0)):
        forged = ids.copy()
        forged[position] = ids[copied]
        forge(tmp_path / "data.bfp" / key.name, key, document_ids=forged)
        with pytest.raises(SequenceIndexError, match="does not name every document once"):
            verify(index.path, dataset)


def test_fault_D08_more_documents_than_the_cap_are_found_by_verify(write_dataset, tmp_path):
    dataset = write_dataset(documents_of([2] * 8))
    key = IndexKey(8, 0, 8)
    build(dataset, key, index_directory(dataset.prefix))
    for cap, is_right in ((4, True), (3, False)):
        capped = IndexKey(8, 0, 8, cap)
        folder = forge(tmp_path / "data.bfp" / key.name, capped)
        if is_right:
            verify(str(folder), dataset)
        else:
            with pytest.raises(SequenceIndexError, match="more documents than max_documents_per_sequence"):
                verify(str(folder), dataset)
        folder.rename(tmp_path / "data.bfp" / key.name)


def test_a_sequence_that_does_not_fit_is_found_by_verify(write_dataset, tmp_path):
    dataset = write_dataset(documents_of([5, 3, 4, 4]))
    key = IndexKey(8, 0, 4)
    index = build(dataset, key, index_directory(dataset.prefix))
    forge(tmp_path / "data.bfp" / key.name, key, document_ids=np.array([0, 2, 1, 3], dtype=np.uint32))
    with pytest.raises(SequenceIndexError, match="a sequence that does not fit"):
        verify(index.path, dataset)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"null", b"{}", b"\xff", b'{"format": 1}', b"[" * 100_000, b'{"version": 1e999}']
)
def test_any_index_json_gives_our_error(dataset, index, tmp_path, content):
    (tmp_path / "data.bfp" / index.key.name / "index.json").write_bytes(content)
    with pytest.raises(SequenceIndexError, match="index.json"):
        SequenceIndex(index.path, dataset)


@pytest.mark.parametrize("version", [1, 2, 4])
def test_another_format_says_so(dataset, index, tmp_path, version):
    folder = tmp_path / "data.bfp" / index.key.name
    write_metadata(folder, json.loads((folder / "index.json").read_bytes()) | {"version": version})
    with pytest.raises(SequenceIndexError, match=f"has format {version}, .* reads format 3.*--overwrite"):
        SequenceIndex(index.path, dataset)


def test_fault_D08_other_long_documents_are_found_by_verify(write_dataset, tmp_path):
    dataset = write_dataset(documents_of([8, 3, 8, 9]))
    key = IndexKey(8, 0, 4)
    index = build(dataset, key, index_directory(dataset.prefix))
    verify(index.path, dataset)
    long = np.array(index.table.long_documents)
    long[0, 0] = 3  # twice, and document 0 not at all
    forge(tmp_path / "data.bfp" / key.name, key, long_documents=long)
    with pytest.raises(SequenceIndexError, match="long_documents.npy does not match"):
        verify(index.path, dataset)


def test_the_sampled_fingerprint_covers_the_whole_file():
    content = np.zeros(1 << 22, dtype=np.uint8)
    fingerprints = {sampled_fingerprint(content)["sampled_sha256"]}
    positions = [0, len(content) - 1, *((len(content) - 4096) * block // 255 + 100 for block in range(0, 256, 5))]
    for position in positions:
        content[position] = 1
        fingerprints.add(sampled_fingerprint(content)["sampled_sha256"])
        content[position] = 0
    assert len(fingerprints) == 1 + len(set(positions))


def test_an_index_carries_the_fingerprint_of_what_it_was_built_from(dataset, tmp_path):
    other = write(tmp_path / "data", documents_of(LENGTHS[::-1]))  # while the first one is still open
    index = build(dataset, IndexKey(8, 0, 12), index_directory(dataset.prefix))
    assert len(index) == len(pack(LENGTHS, 8))
    with pytest.raises(SequenceIndexError, match="built from another"):
        SequenceIndex(index.path, other)


def test_more_documents_than_there_are_cannot_be_claimed(dataset, tmp_path):
    build(dataset, IndexKey(8, 0, 12), index_directory(dataset.prefix))
    path = tmp_path / "data.bfp" / "s8-d0-13"
    os.rename(tmp_path / "data.bfp" / "s8-d0-12", path)
    metadata = json.loads((path / "index.json").read_bytes())
    metadata["documents"] = [0, 13]
    metadata["counts"]["documents"] = 13
    write_metadata(path, metadata)
    with pytest.raises(SequenceIndexError, match="has 12"):
        verify(str(path), dataset)


def test_other_work_than_that_of_the_documents_is_found_by_verify(write_dataset, tmp_path):
    dataset = write_dataset(documents_of([8, 3, 8, 9]))
    key = IndexKey(8, 0, 4)
    index = build(dataset, key, index_directory(dataset.prefix))
    verify(index.path, dataset)
    runs = np.array(index.table.runs)
    runs[-1, 3] += 1
    forge(tmp_path / "data.bfp" / key.name, key, runs=runs)
    with pytest.raises(SequenceIndexError, match=r"the work in runs.npy"):
        verify(index.path, dataset)


@pytest.mark.parametrize("work", [0, 65])
def test_work_that_no_sequence_can_have_is_refused_when_opened(write_dataset, tmp_path, work):
    dataset = write_dataset(documents_of([8, 3, 8, 9]))
    key = IndexKey(8, 0, 4)
    index = build(dataset, key, index_directory(dataset.prefix))
    runs = np.array(index.table.runs)
    runs[-1, 3] = work
    forge(tmp_path / "data.bfp" / key.name, key, runs=runs)
    with pytest.raises(SequenceIndexError, match="contradict"):
        SequenceIndex(index.path, dataset)
