"""The central invariant: every token is an input once, and every token but a document's first a target once."""

from collections import Counter

import numpy as np
import pytest
from helpers.chunks import chunk_rows
from helpers.datasets import documents_of, write
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bfp.samples import reused_memory
from megatron_bfp.samples.sample import build_sample, dense_attention_mask
from megatron_bfp.sequence_index.builder import build
from megatron_bfp.sequence_index.key import IndexKey, index_directory

LENGTHS = st.lists(st.sampled_from([0, 1, 1, 2, 3, 5, 8, 13, 31, 64]) | st.integers(0, 70), max_size=25)
EOD = 7


def samples_of(dataset, seq_length, cap=None, **options):
    key = IndexKey(seq_length, 0, dataset.num_documents, cap)
    index = build(dataset, key, index_directory(dataset.prefix))
    return [build_sample(dataset, index.chunk_spans(i), seq_length, **options) for i in range(len(index))]


def segments(sample):
    boundaries = sample.cu_seqlens.tolist()
    return [(start, end) for start, end in zip(boundaries, boundaries[1:]) if start < end]


@pytest.mark.case(19)
@settings(max_examples=150, deadline=None)
@given(lengths=LENGTHS, seq_length=st.integers(1, 20), cap=st.none() | st.integers(1, 3))
def test_every_token_is_an_input_once_and_every_later_one_a_target_once(lengths, seq_length, cap, tmp_path_factory):
    documents = documents_of(lengths, first_token=1)  # all tokens differ: counting them counts positions
    dataset = write(tmp_path_factory.mktemp("data") / "data", documents)
    inputs, targets = Counter(), Counter()
    for sample in samples_of(dataset, seq_length, cap):
        used = sample.tokens > 0
        inputs.update(sample.tokens[used].tolist())
        has_target = sample.loss_mask == 1.0
        targets.update(sample.labels[has_target].tolist())
        assert set(np.unique(sample.loss_mask)) <= {0.0, 1.0}
        assert not sample.labels[~has_target].any() and not has_target[~used].any()
        assert np.array_equal(sample.labels[has_target], sample.tokens[has_target] + 1)
    assert inputs == Counter(token for document in documents for token in document)
    assert targets == Counter(token for document in documents for token in document[1:])


@pytest.mark.case(20, 23)
@settings(max_examples=100, deadline=None)
@given(data=st.data(), seq_length=st.integers(1, 16))
def test_values_of_tokens_decide_nothing(data, seq_length, tmp_path_factory):
    """EOD inside a text, pad (0) equal to EOD or to a text's token: the masks follow the positions alone."""
    documents = data.draw(st.lists(st.lists(st.sampled_from([0, EOD, 9]), max_size=40), min_size=1, max_size=10))
    folder = tmp_path_factory.mktemp("data")
    dataset = write(folder / "data", documents)
    reference = write(folder / "reference", documents_of([len(document) for document in documents]))
    samples, expected = samples_of(dataset, seq_length), samples_of(reference, seq_length)
    text = [0] + [token for document in documents for token in document]
    for sample, same in zip(samples, expected, strict=True):
        for name in ("loss_mask", "position_ids", "cu_seqlens", "max_seqlen"):
            assert np.array_equal(getattr(sample, name), getattr(same, name))
        assert sample.tokens.tolist() == [text[token] for token in same.tokens.tolist()]
        assert sample.labels.tolist() == [text[token] for token in same.labels.tolist()]


@pytest.mark.case(22, 24)
@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS, seq_length=st.integers(1, 20))
def test_boundaries_are_the_chunks_and_then_the_padding(lengths, seq_length, tmp_path_factory):
    dataset = write(tmp_path_factory.mktemp("data") / "data", documents_of(lengths))
    index = build(dataset, IndexKey(seq_length, 0, len(lengths)), index_directory(dataset.prefix))
    for i, sample in enumerate(samples_of(dataset, seq_length)):
        chunk_lengths = chunk_rows(index, i)[:, 2].tolist()
        padding = seq_length - sum(chunk_lengths)
        assert [end - start for start, end in segments(sample)] == chunk_lengths + [padding] * (padding > 0)
        strictly = np.diff(sample.cu_seqlens)
        assert np.all(strictly[: len(segments(sample))] > 0) and np.all(sample.cu_seqlens[-1:] == seq_length)
        assert sample.max_seqlen == max(end - start for start, end in segments(sample))


@pytest.mark.parametrize("lengths", [[5], [20], [3, 4, 1, 1], [8], [1] * 8])
def test_shapes_and_dtypes(write_dataset, lengths):
    for sample in samples_of(write_dataset(documents_of(lengths)), 8):
        forms = {name: (array.dtype, array.shape) for name, array in sample._asdict().items()}
        assert forms == {
            "tokens": (np.int64, (8,)),
            "labels": (np.int64, (8,)),
            "loss_mask": (np.float32, (8,)),
            "position_ids": (np.int64, (8,)),
            "cu_seqlens": (np.int32, (9,)),
            "max_seqlen": (np.int32, ()),
        }
        assert sample.position_ids.tolist() == list(range(8))


def test_positions_restart_in_every_chunk_if_asked(write_dataset):
    for sample in samples_of(write_dataset(documents_of([3, 2, 12])), 8, reset_position_ids=True):
        expected = [position for start, end in segments(sample) for position in range(end - start)]
        assert sample.position_ids.tolist() == expected


def test_eod_inputs_get_no_loss_if_asked(write_dataset):
    dataset = write_dataset([[1, EOD, 2, EOD], [3, EOD]])
    (sample,) = samples_of(dataset, 8, masked_input=EOD)
    assert sample.tokens.tolist() == [1, EOD, 2, EOD, 3, EOD, 0, 0]
    assert sample.loss_mask.tolist() == [1, 0, 1, 0, 1, 0, 0, 0]
    (sample,) = samples_of(dataset, 8)
    assert sample.loss_mask.tolist() == [1, 1, 1, 0, 1, 0, 0, 0]
    (sample,) = samples_of(dataset, 8, masked_input=0)  # padding is not an input
    assert sample.loss_mask.tolist() == [1, 1, 1, 0, 1, 0, 0, 0]


def test_fault_D04_an_eod_of_id_0_gets_no_loss_if_asked(write_dataset):
    dataset = write_dataset([[1, 0, 2, 0], [3, 0]])
    (sample,) = samples_of(dataset, 8, masked_input=0)
    assert sample.tokens.tolist() == [1, 0, 2, 0, 3, 0, 0, 0]
    assert sample.loss_mask.tolist() == [1, 0, 1, 0, 1, 0, 0, 0]
    (sample,) = samples_of(dataset, 8)
    assert sample.loss_mask.tolist() == [1, 1, 1, 0, 1, 0, 0, 0]


def test_documents_of_several_sequences_are_one_document(write_dataset):
    dataset = write_dataset([[[1, 2], [], [3, 4, 5]], [[6], [7]]])
    sample = samples_of(dataset, 8)[0]
    assert sample.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 0]
    assert sample.labels.tolist() == [2, 3, 4, 5, 0, 7, 0, 0]


@pytest.mark.case(21)
def test_two_reads_are_equal_and_share_no_memory(write_dataset):
    dataset = write_dataset(documents_of([3, 2, 12]))
    first, second = samples_of(dataset, 8), samples_of(dataset, 8)
    for one, other in zip(first, second):
        for name in one._fields:
            assert np.array_equal(getattr(one, name), getattr(other, name))
            assert not np.shares_memory(getattr(one, name), getattr(other, name))
    arrays = list(first[0])
    assert not any(np.shares_memory(a, b) for i, a in enumerate(arrays) for b in arrays[:i])


def test_samples_whose_memory_is_used_again_are_those_of_fresh_memory(write_dataset, monkeypatch):
    """Ragged and padded, read after samples that left other bytes behind, kept and let go in turn."""
    dataset = write_dataset(documents_of([60, 64, 3, 64, 30, 29, 1, 130, 5]))
    fresh = samples_of(dataset, 64, reset_position_ids=True)
    monkeypatch.setattr(reused_memory, "SMALL", 0)
    kept = []
    for round_number in range(4):
        for number, sample in enumerate(samples_of(dataset, 64, reset_position_ids=True)):
            if (round_number + number) % 2:
                kept.append((number, sample))
            else:
                for array in sample:
                    array.fill(77)
        samples_of(dataset, 64)
    assert len(kept) == 2 * len(fresh)
    for number, sample in kept:
        assert all(np.array_equal(*arrays) for arrays in zip(sample, fresh[number], strict=True))
    assert not np.array_equal(kept[0][1].tokens, kept[1][1].tokens)


def test_the_dense_mask_hides_other_documents_and_the_future(write_dataset):
    for sample in samples_of(write_dataset(documents_of([3, 2, 12, 1])), 8):
        mask = dense_attention_mask(sample.cu_seqlens)
        assert mask.shape == (1, 8, 8) and mask.dtype == bool
        segment_of = [number for number, (start, end) in enumerate(segments(sample)) for _ in range(start, end)]
        for query in range(8):
            for key in range(8):
                visible = key <= query and segment_of[key] == segment_of[query]
                assert mask[0, query, key] == (not visible)
