"""What a sequence index holds and how it is read: the same bytes everywhere, and every read is checked."""

import dataclasses
import importlib
import json
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
from helpers.chunks import chunk_rows
from helpers.datasets import ROOT, documents_of
from helpers.index_bytes import index_digests, sequences_digest
from helpers.indexes import LENGTHS

from megatron_bfp import SequenceIndexError, pack
from megatron_bfp.indexed_dataset.reader import IndexedDataset
from megatron_bfp.indexed_dataset.writer import IndexedDatasetWriter
from megatron_bfp.sequence_index.builder import build
from megatron_bfp.sequence_index.key import IndexKey, document_range, index_directory
from megatron_bfp.sequence_index.verify import verify_all


def test_an_index_holds_what_packing_gives(dataset, index):
    packing = pack(LENGTHS[1:11], 8)
    assert index.work(np.arange(len(index))).tolist() == packing.work.tolist()
    assert len(index) == len(packing)
    for i in range(len(index)):
        assert chunk_rows(index, i).tolist() == (packing[i] + [1, 0, 0]).tolist()
    assert index.counts == {
        "documents": 10,
        "empty_documents": 1,
        "padding": packing.padding,
        "sequences": len(packing),
        "tokens": sum(LENGTHS[1:11]),
    }


@pytest.mark.parametrize(
    ("documents", "shift"),
    [
        ([[5], [12], [3], [16], [2], [9]], 0),
        ([[5, 4], [12], [3], [16], [2], [9]], 1),
        ([[], [12], [3], [16], [2], [9]], -1),
        ([[5], [12], [0], [16], [2], [9]], None),
        ([[5], [12, 1], [], [16], [2], [9]], None),
        ([[5], [12, 1], [3], [16], [2], [9]], None),
    ],
)
def test_documents_of_one_sequence_each_are_not_looked_up(tmp_path, documents, shift):
    """Documents 1 to 5 of ``documents``, which are lengths of sequences."""
    prefix = str(tmp_path / "data")
    with IndexedDatasetWriter(prefix, np.int32) as writer:
        writer.add(
            np.arange(sum(map(sum, documents)), dtype=np.int32),
            np.array([length for document in documents for length in document]),
            np.array([len(document) for document in documents]),
        )
        writer.finalize()
    dataset = IndexedDataset(prefix)
    index = build(dataset, IndexKey(8, 1, 5), index_directory(prefix))
    lengths = [sum(document) for document in documents]
    packing = pack(lengths[1:5], 8)
    assert index._shift == shift
    for i in range(len(index)):
        assert chunk_rows(index, i).tolist() == (packing[i] + [1, 0, 0]).tolist()
        for chunk, (document, offset, length) in zip(index.chunk_spans(i), packing[i].tolist(), strict=True):
            start = sum(lengths[: document + 1]) + offset
            assert chunk == (document + 1, start, start + length, sum(lengths[: document + 2]))


def test_chunk_spans_are_where_the_chunks_are(dataset, index):
    packing = pack(LENGTHS[1:11], 8)
    for i in range(len(index)):
        for chunk, (document, offset, length) in zip(index.chunk_spans(i), packing[i].tolist(), strict=True):
            expected = dataset.document(document + 1)[offset : offset + length].tolist()
            assert chunk.document == document + 1
            assert dataset.tokens(chunk.start, chunk.num_tokens).tolist() == expected
            assert chunk.document_end - chunk.start + offset == LENGTHS[document + 1]
            assert chunk.continues == (offset + length < LENGTHS[document + 1])


EXPECTED_DIGESTS = {
    "s2048-d0-3000": "e58ba3bf18be4e2dafde69760ce1c0ca3a940c8495159714e9c10358d58d060d",
    "s2048-d100-2900-m4": "9b3fb7676acf58e9016ccda4f6dc774575e8a75cc0a85d1a7f02d55b310133b2",
}
"""They are the same in every release: they may only change together with the format's version."""

SEQUENCES_OF_FORMAT_2 = {
    "s2048-d0-3000": "68c0656e0d66672f4df96039ff777137f7a9feb7a1386f20b740c552a5c2d9f2",
    "s2048-d100-2900-m4": "3106d309143415a182df98d024851f7bfcbb8e4bc25071f8c2f8258e25be5612",
}
"""Written by version 0.2.0. A run goes on with the index of a later format only if its sequences are the same."""


def test_the_bytes_are_the_same_in_every_release(tmp_path):
    assert index_digests(tmp_path) == EXPECTED_DIGESTS
    assert {name: sequences_digest(tmp_path, name) for name in EXPECTED_DIGESTS} == SEQUENCES_OF_FORMAT_2


def digests_by(python, folder, **environment):
    """Digests of the same indexes, built by another process."""
    command = [python, str(ROOT / "tests" / "helpers" / "index_bytes.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_bytes_are_the_same_without_the_processor_s_wide_vectors(tmp_path):
    core = "numpy._core" if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else "numpy.core"
    features = importlib.import_module(f"{core}._multiarray_umath").__cpu_dispatch__
    digests = digests_by(sys.executable, tmp_path, NPY_DISABLE_CPU_FEATURES=" ".join(features))
    assert digests == EXPECTED_DIGESTS


def test_the_bytes_are_the_same_on_other_pythons(tmp_path):
    """Of OTHER_PYTHONS, paths with colons between of Pythons that have numpy."""
    pythons = [python for python in os.environ.get("OTHER_PYTHONS", "").split(os.pathsep) if python]
    if not pythons:
        pytest.skip("OTHER_PYTHONS names none")
    for number, python in enumerate(pythons):
        (tmp_path / str(number)).mkdir()
        assert digests_by(python, tmp_path / str(number)) == EXPECTED_DIGESTS


@pytest.mark.case(1)
@pytest.mark.parametrize("lengths", [[], [0, 0], [1], [8], [9], [7, 1], [16, 24]])
@pytest.mark.parametrize("seq_length", [1, 8, 1000])
def test_corpora_at_the_edges_build_and_verify(write_dataset, lengths, seq_length):
    dataset = write_dataset(documents_of(lengths) if lengths else [])
    build(dataset, IndexKey(seq_length, 0, len(lengths)), index_directory(dataset.prefix))
    (index,) = verify_all(dataset.prefix)
    assert len(index) == len(pack(lengths, seq_length))


def test_the_name_says_what_an_index_is_for(dataset):
    for key in (IndexKey(8, 0, 12), IndexKey(8, 3, 7, 2), IndexKey(8, 0, 12, None, True), IndexKey(8, 3, 7, 2, True)):
        assert IndexKey.from_name(key.name) == key
        assert os.path.basename(build(dataset, key, index_directory(dataset.prefix)).path) == key.name
    assert IndexKey(2048, 0, 969, 8).name == "s2048-d0-969-m8"
    assert IndexKey(2048, 0, 969, 8, True).name == "s2048-d0-969-m8-e"
    assert IndexKey(2, 0, 9, None, True).name == "s2-d0-9-e"
    for name in ("s0-d0-1", "s08-d0-1", "s8-d00-1", "s8-d0-1-m0", "s8-d0-1-", "S8-d0-1", ".s8-d0-1", "s8-d0"):
        assert IndexKey.from_name(name) is None
    for name in ("s8-d0-1-e-m2", "s8-d0-1-E", "s8-d0-1-e-e", "s8-d0-1e"):
        assert IndexKey.from_name(name) is None


def test_ranges_are_rounded_as_megatron_core_rounds():
    assert document_range((0.0, 0.969), 1000) == (0, 969)
    assert document_range((0.5, 1.0), 5) == (2, 5)  # Python rounds 2.5 to 2


@pytest.mark.parametrize(
    "fractions, number, expected",
    [((0.0, 0.75), 9, (0, 7)), ((0.25, 0.75), 7, (2, 5)), ((0.0, 0.9), 12, (0, 11)), ((0.35, 0.65), 10, (4, 6))],
)
def test_fault_D17_bounds_of_a_split_are_rounded_and_not_cut(fractions, number, expected):
    assert document_range(fractions, number) == expected
    assert document_range(fractions, number) != tuple(int(fraction * number) for fraction in fractions)


def test_pickling_keeps_paths_and_not_arrays(dataset, index):
    content = pickle.dumps(index)
    assert len(content) < 1000
    assert chunk_rows(pickle.loads(content), 2).tolist() == chunk_rows(index, 2).tolist()


def test_an_open_index_is_printed_in_one_line(index):
    assert repr(index).startswith("SequenceIndex('") and "data.bfp/s8-d1-11'" in repr(index) and len(repr(index)) < 250


def test_fault_D06_one_token_too_many_is_refused_at_the_read(write_dataset):
    dataset = write_dataset(documents_of([5, 3, 4, 4]))
    index = build(dataset, IndexKey(8, 0, 4), index_directory(dataset.prefix))
    assert [chunk_rows(index, i)[:, 0].tolist() for i in range(2)] == [[0, 1], [2, 3]]
    ids = np.array([0, 2, 1, 3], dtype=np.uint32)  # 9 and 7 tokens
    index.table = dataclasses.replace(index.table, document_ids=ids)
    with pytest.raises(SequenceIndexError, match="sequence 0 has more tokens than fit"):
        index.chunk_spans(0)
    index.chunk_spans(1)


@pytest.mark.parametrize("outside", [0, 11])
def test_fault_D06_a_document_outside_the_split_is_refused_at_the_read(index, outside):
    ids = np.array(index.table.document_ids)
    sequence = int(index.table.long_documents[-1, 1])  # the first one of remainder chunks
    index.chunk_spans(sequence)
    ids[0] = outside  # the dataset has it, the range of the index, 1 to 11, has not
    index.table = dataclasses.replace(index.table, document_ids=ids)
    with pytest.raises(SequenceIndexError, match=f"sequence {sequence} names document {outside}"):
        index.chunk_spans(sequence)


def test_fault_D06_an_empty_chunk_is_refused_at_the_read(index):
    ids = np.array(index.table.document_ids)
    ids[0] = 1  # which is empty
    sequence = int(index.table.long_documents[-1, 1])
    index.table = dataclasses.replace(index.table, document_ids=ids)
    with pytest.raises(SequenceIndexError, match=f"sequence {sequence} has an empty chunk"):
        index.chunk_spans(sequence)


@pytest.mark.parametrize("change", [-1, 1])
def test_fault_D06_full_chunks_that_a_document_does_not_have_are_refused_at_the_read(write_dataset, change):
    dataset = write_dataset(documents_of([20, 3]))
    index = build(dataset, IndexKey(8, 0, 2), index_directory(dataset.prefix))
    index.chunk_spans(0)
    long = np.array(index.table.long_documents) + np.array([0, change])
    index.table = dataclasses.replace(index.table, long_documents=long)
    with pytest.raises(SequenceIndexError, match="sequence 0 does not match the length of document 0"):
        index.chunk_spans(0)


def test_fault_D03_positions_and_chunks_end_with_the_last_sequence(index):
    index.chunk_spans(len(index) - 1)
    for sequence in (-1, len(index), len(index) + 1):
        with pytest.raises(IndexError, match=f"sequence {sequence} is not in"):
            index.chunk_spans(sequence)


def test_numpy_integers_make_the_same_key(dataset):
    key = IndexKey(np.int64(8), np.int32(0), np.uint32(12), np.int8(3))
    assert key == IndexKey(8, 0, 12, 3) and type(key.seq_length) is int
    assert len(build(dataset, key, index_directory(dataset.prefix)))


def test_the_core_imports_neither_torch_nor_megatron():
    modules = (
        "samples.sample",
        "sequence_index.builder",
        "sequence_index.verify",
        "inspection.report",
        "commands.main",
    )
    others = {"torch", "megatron", "deepspeed", "tqdm", "tokenizers"}
    code = "; ".join(f"import megatron_bfp.{module}" for module in modules)
    code += f"; import sys; sys.exit(any(name.split('.')[0] in {others} for name in sys.modules))"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0
