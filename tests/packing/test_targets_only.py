"""Packing of targets only: exactly best-fit decreasing of one token less per document, and what that saves."""

import numpy as np
import pytest
from helpers.datasets import DATA
from helpers.oracle import best_fit_decreasing
from helpers.packings import assert_whole
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bfp import OptionError, pack
from megatron_bfp.packing.positions import TargetLengths

LENGTHS = st.lists(st.sampled_from([0, 1, 1, 2]) | st.integers(0, 70), max_size=60)


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(1, 20), st.none() | st.integers(1, 4), st.booleans())
def test_every_token_but_the_last_is_in_one_sequence(lengths, seq_length, cap, even):
    packing = pack(lengths, seq_length, cap, even, targets_only=True)
    positions = [max(0, length - 1) for length in lengths]
    assert_whole(packing, positions, seq_length)
    assert (packing.num_tokens, packing.padding) == (sum(lengths), len(packing) * seq_length - sum(positions))
    assert packing.work.tolist() == [(packing[i][:, 2] ** 2).sum() for i in range(len(packing))]
    if cap is None and not even:
        assert len(packing) == len(best_fit_decreasing(positions, seq_length))


def test_a_document_of_one_token_more_than_a_sequence_stays_whole():
    packing = pack([9, 1, 0, 17, 4], 8, targets_only=True)
    assert [packing[i].tolist() for i in range(len(packing))] == [[[0, 0, 8]], [[3, 0, 8]], [[3, 8, 8]], [[4, 0, 3]]]
    assert [packing.padding, pack([9, 1, 0, 17, 4], 8).padding] == [5, 1]
    assert repr(packing) == "Packing(5 documents, 31 tokens in 4 sequences of 8, padding 5)"
    without = pack([9, 1, 0, 17, 4], 8)  # the control: it is cut, and the document of one token takes a position
    assert [chunk for i in range(len(without)) for chunk in without[i][:, :1].ravel()].count(0) == 2
    assert 1 in [chunk for i in range(len(without)) for chunk in without[i][:, 0]]


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int32, np.uint64])
def test_positions_keep_the_dtype_of_lengths_and_none_is_below_0(dtype):
    positions = TargetLengths(np.array([0, 1, 2, 127], dtype=dtype))
    assert len(positions) == 4 and positions[0:4].dtype == dtype and positions[1:].tolist() == [0, 1, 126]
    assert positions[:1].tolist() == [0]


@pytest.mark.parametrize(
    "lengths, percent",
    [
        (np.load(DATA / "text_lengths.npy"), 0.176),
        (np.load(DATA / "code_lengths.npy"), 0.030),
        (np.ceil(np.random.default_rng(0).lognormal(5.84, 0.98, 400_000)).astype(np.int32), 0.180),
    ],
    ids=["text", "code", "lognormal"],
)
def test_sequences_are_saved(lengths, percent):
    """As many as there are last tokens to leave out, up to padding."""
    without, with_targets_only = (len(pack(lengths, 2048, targets_only=only)) for only in (False, True))
    saved = 100 * (without - with_targets_only) / without
    assert saved == pytest.approx(percent, abs=0.003)
    assert saved == pytest.approx(100 * len(lengths) / int(lengths.sum()), abs=0.02)


def test_only_a_flag_switches_it_on():
    with pytest.raises(OptionError, match="targets_only"):
        pack([3], 8, targets_only=2)
    with pytest.raises(OptionError, match="document 1 has the length -3"):
        pack([3, -3], 8, targets_only=True)
