"""Verify's proof by sums: right indexes pass by it, and no wrong one does."""

import numpy as np
import pytest
from helpers.datasets import documents_of
from helpers.indexes import forge
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bfp import SequenceIndexError
from megatron_bfp.packing import census as census_module
from megatron_bfp.packing.best_fit import plan_runs
from megatron_bfp.packing.census import take_census
from megatron_bfp.packing.placing import place_documents, sort_documents
from megatron_bfp.sequence_index import coverage
from megatron_bfp.sequence_index import verify as verification
from megatron_bfp.sequence_index.builder import build
from megatron_bfp.sequence_index.coverage import PairSums
from megatron_bfp.sequence_index.key import IndexKey, index_directory


@st.composite
def corpora(draw):
    seq_length = draw(st.integers(2, 40))
    lengths = draw(st.lists(st.integers(0, 3 * seq_length), max_size=60))
    return seq_length, np.array(lengths, dtype=np.int32), draw(st.sampled_from([None, 1, 2, 5]))


def both_sums(seq_length, lengths, cap, first_document, change=None):
    """The sums over a corpus and over its packing, whose document ids ``change`` may alter."""
    sums, census = PairSums(seq_length), take_census(lengths, seq_length)
    runs = plan_runs(census.remainders, seq_length, cap)
    sorted_ids = sort_documents(lengths, census.remainders, np.uint32, first_document)
    ids = np.concatenate([*place_documents(runs, sorted_ids), np.empty(0, dtype=np.uint32)])
    if change is not None:
        change(ids)
    ends, of_index, entry = np.cumsum(census.remainders[::-1]), 0, 0
    for run in runs:
        end = entry + run.num_sequences * run.chunks
        of_index += sums.of_sequences(iter([ids[entry:end]]), coverage._chunk_lengths(run, ends))
        entry = end
    remainders = lengths % seq_length
    return sums.of_documents(first_document, remainders), of_index % (1 << 64)


@settings(max_examples=60, deadline=None)
@given(corpora(), st.integers(0, 1 << 31), st.sampled_from([1, 3, 1 << 13]))
def test_sums_of_a_corpus_and_its_packing_are_equal(corpus, first_document, piece):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coverage, "PIECE", piece)
        of_dataset, of_index = both_sums(*corpus, first_document)
    assert of_dataset == of_index


@settings(max_examples=60, deadline=None)
@given(corpora(), st.data())
def test_sums_differ_if_any_document_is_another(corpus, data):
    seq_length, lengths, _ = corpus
    remainders = lengths % seq_length
    if np.count_nonzero(remainders) < 2:
        return

    def change(ids):
        entry = data.draw(st.integers(0, len(ids) - 1))
        others = [document for document in range(len(lengths) + 2) if document != ids[entry]]
        ids[entry] = data.draw(st.sampled_from(others))

    of_dataset, of_index = both_sums(*corpus, 0, change)
    assert of_dataset != of_index


def test_sums_differ_if_documents_of_different_lengths_change_places():
    """Every document is named once, so that a sum over documents alone would not see it."""
    lengths = np.array([7, 3, 5, 5, 2, 8], dtype=np.int32)

    def change(ids):
        ids[[0, 1]] = ids[[1, 0]]

    assert len(set(both_sums(10, lengths, None, 0))) == 1
    assert len(set(both_sums(10, lengths, None, 0, change))) == 2


def test_each_check_draws_other_functions():
    lengths = np.array([1, 2, 3])
    assert PairSums(8).of_documents(0, lengths) != PairSums(8).of_documents(0, lengths)


def test_weights_reach_the_longest_remainder():
    assert PairSums(2).of_documents(0, np.array([1])) != 0 == PairSums(2).of_documents(0, np.array([0]))
    with pytest.raises(IndexError):
        PairSums(2).of_documents(0, np.array([2]))


@pytest.fixture
def index_of(write_dataset):
    def build_one(lengths, seq_length):
        dataset = write_dataset(documents_of(lengths))
        return build(dataset, IndexKey(seq_length, 0, len(lengths)), index_directory(dataset.prefix))

    return build_one


def test_documents_of_a_planned_index_are_not_looked_up(index_of, monkeypatch):
    def refuse(*arguments):
        raise AssertionError("looked up")

    monkeypatch.setattr(coverage, "_look_up_each", refuse)
    index = index_of([5, 3, 4, 4, 17, 0, 8], 8)
    verification.verify(index.path, index.dataset)
    monkeypatch.setattr(coverage, "planned_runs", lambda key, census: plan_runs(census.remainders, key.seq_length, 1))
    with pytest.raises(AssertionError, match="looked up"):
        verification.verify(index.path, index.dataset)


def test_an_index_of_another_planner_is_right_if_its_sequences_are(index_of, tmp_path):
    """A later version may plan in another way; indexes on disk go on being right."""
    index = index_of([4, 4, 2, 6], 8)  # planned: 6 + 2, 4 + 4
    runs, key = np.array(index.table.runs), index.key
    assert runs.tolist() == [[0, 0, 2, 40], [1, 2, 2, 32]]
    folder = tmp_path / "data.bfp" / key.name
    other_runs = np.array([[0, 0, 2, 32], [1, 2, 2, 40]])
    forge(folder, key, document_ids=np.array([0, 1, 3, 2], dtype=np.uint32), runs=other_runs)
    assert len(verification.verify(index.path, index.dataset)) == 2
    forge(folder, key, document_ids=np.array([3, 2, 0, 1], dtype=np.uint32))
    with pytest.raises(SequenceIndexError, match="the work in runs.npy"):
        verification.verify(index.path, index.dataset)
    too_long = np.array([[0, 0, 2, 20], [1, 2, 2, 52]])
    forge(folder, key, document_ids=np.array([0, 2, 3, 1], dtype=np.uint32), runs=too_long)
    with pytest.raises(SequenceIndexError, match="a sequence that does not fit"):
        verification.verify(index.path, index.dataset)


@pytest.mark.parametrize("change", ["more", "fewer", "another document", "another count"])
def test_other_long_documents_are_found_block_by_block(index_of, tmp_path, change, monkeypatch):
    monkeypatch.setattr(census_module, "BLOCK", 2)
    index = index_of([8, 3, 17, 9, 3, 8], 8)
    verification.verify(index.path, index.dataset)
    long = np.array(index.table.long_documents)
    assert long.tolist() == [[0, 1], [2, 3], [3, 4], [5, 5]]
    if change == "more":
        long = np.insert(long, 1, [1, 1], axis=0)
    elif change == "fewer":
        long = np.delete(long, 1, axis=0)
    elif change == "another document":
        long[1, 0] = 1
    else:
        long[1, 1] = 2
    forge(tmp_path / "data.bfp" / index.key.name, index.key, long_documents=long)
    with pytest.raises(SequenceIndexError, match="long_documents.npy does not match"):
        verification.verify(index.path, index.dataset)


def test_the_idx_is_hashed_once_for_all_indexes(index_of, monkeypatch):
    index = index_of([5, 3, 4, 4], 8)
    build(index.dataset, IndexKey(8, 0, 2), index_directory(index.dataset.prefix))
    hashed = []

    def counted(dataset, progress):
        hashed.append(dataset.prefix)
        return index.idx_sha256

    monkeypatch.setattr(verification, "idx_sha256", counted)
    assert len(verification.verify_all(index.dataset.prefix)) == 2
    assert hashed == [index.dataset.prefix]
