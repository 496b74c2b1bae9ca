"""Targets only: every token but a document's last is an input once, and every token but its first a target once."""

from collections import Counter

import numpy as np
import pytest
from helpers.datasets import documents_of, write
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bfp.samples.sample import build_sample
from megatron_bfp.sequence_index.builder import build
from megatron_bfp.sequence_index.key import IndexKey, index_directory
from megatron_bfp.sequence_index.verify import verify

EOD = 7


def samples_of(dataset, seq_length, cap=None, even=False, targets_only=True, **options):
    key = IndexKey(seq_length, 0, dataset.num_documents, cap, even, targets_only)
    index = build(dataset, key, index_directory(dataset.prefix))
    verify(index.path, dataset)
    return [build_sample(dataset, index.chunk_spans(i), seq_length, **options) for i in range(len(index))]


@settings(max_examples=150, deadline=None)
@given(data=st.data(), seq_length=st.integers(1, 20), cap=st.none() | st.integers(1, 3), even=st.booleans())
def test_every_input_has_a_target(data, seq_length, cap, even, tmp_path_factory):
    """Also of documents that are empty, of one token, of a few tokens more than a sequence, and longer than three."""
    special = st.sampled_from([0, 1, 1, 2, seq_length, seq_length + 1, seq_length + 2, 3 * seq_length + 5])
    lengths = data.draw(st.lists(special | st.integers(0, 70), max_size=25))
    documents = documents_of(lengths, first_token=1)  # all tokens differ: counting them counts positions
    dataset = write(tmp_path_factory.mktemp("data") / "data", documents)
    inputs, targets = Counter(), Counter()
    for sample in samples_of(dataset, seq_length, cap, even):
        used = sample.tokens > 0
        inputs.update(sample.tokens[used].tolist())
        targets.update(sample.labels[used].tolist())
        assert np.array_equal(sample.loss_mask, used)
        assert np.array_equal(sample.labels[used], sample.tokens[used] + 1) and not sample.labels[~used].any()
        assert used[: int(used.sum())].all()  # padding comes last
    assert inputs == Counter(token for document in documents for token in document[:-1])
    assert targets == Counter(token for document in documents for token in document[1:])


@settings(max_examples=100, deadline=None)
@given(data=st.data(), seq_length=st.integers(1, 16))
def test_values_of_tokens_decide_nothing(data, seq_length, tmp_path_factory):
    """EOD inside a text, and padding (0) equal to EOD or to a text's token."""
    documents = data.draw(st.lists(st.lists(st.sampled_from([0, EOD, 9]), max_size=40), min_size=1, max_size=10))
    folder = tmp_path_factory.mktemp("data")
    dataset = write(folder / "data", documents)
    reference = write(folder / "reference", documents_of([len(document) for document in documents]))
    text = [0] + [token for document in documents for token in document]
    for sample, same in zip(samples_of(dataset, seq_length), samples_of(reference, seq_length), strict=True):
        for name in ("loss_mask", "position_ids", "cu_seqlens", "max_seqlen"):
            assert np.array_equal(getattr(sample, name), getattr(same, name))
        assert sample.tokens.tolist() == [text[token] for token in same.tokens.tolist()]
        assert sample.labels.tolist() == [text[token] for token in same.labels.tolist()]


def test_a_sample_in_full(write_dataset):
    (sample,) = samples_of(write_dataset([[1, 2, 3, EOD], [9], [4, 5, EOD]]), 8)
    assert sample.tokens.tolist() == [1, 2, 3, 4, 5, 0, 0, 0]
    assert sample.labels.tolist() == [2, 3, EOD, 5, EOD, 0, 0, 0]
    assert sample.loss_mask.tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    assert sample.cu_seqlens.tolist() == [0, 3, 5, 8, 8, 8, 8, 8, 8] and sample.max_seqlen == 3
    (other,) = samples_of(write_dataset([[1, 2, 3, EOD], [4, 5, EOD]], "other"), 8, targets_only=False)  # the control
    assert other.tokens.tolist() == [1, 2, 3, EOD, 4, 5, EOD, 0] and other.loss_mask.tolist() == [
        1,
        1,
        1,
        0,
        1,
        1,
        0,
        0,
    ]


def test_an_eod_inside_a_text_gets_no_loss_if_asked(write_dataset):
    dataset = write_dataset([[1, EOD, 2, EOD], [3, EOD]])
    (sample,) = samples_of(dataset, 8, masked_input=EOD)
    assert sample.tokens.tolist() == [1, EOD, 2, 3, 0, 0, 0, 0]
    assert sample.loss_mask.tolist() == [1, 0, 1, 1, 0, 0, 0, 0]
    (sample,) = samples_of(dataset, 8)
    assert sample.loss_mask.tolist() == [1, 1, 1, 1, 0, 0, 0, 0]


def test_restarted_positions_and_ids_outside_the_vocabulary(write_dataset):
    dataset = write_dataset([[1, 2, 3, 4], [5, 6, 999]])
    (sample,) = samples_of(dataset, 8, reset_position_ids=True)
    assert sample.position_ids.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    with pytest.raises(Exception, match="document 1 holds the token id 999"):  # which is a target alone
        samples_of(dataset, 8, vocab_size=999)
    assert samples_of(dataset, 8, vocab_size=1000)
