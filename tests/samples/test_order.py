"""The order of an epoch is a bijection, differs between epochs and seeds, and looks random."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bfp.samples.order import sequence_of_sample, sequences_of_samples, shuffled


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 3000), st.integers(-5, 2**63), st.integers(0, 10**6))
def test_each_item_comes_exactly_once(num_items, seed, epoch):
    assert sorted(shuffled(i, num_items, seed, epoch, "corpus") for i in range(num_items)) == list(range(num_items))


@pytest.mark.parametrize("num_items", [1, 2, 3, 4, 5, 8, 9, 10, 16, 17, 99, 100, 101])
def test_each_item_comes_exactly_once_at_small_sizes(num_items):
    for epoch in range(20):
        assert sorted(shuffled(i, num_items, 1, epoch, "") for i in range(num_items)) == list(range(num_items))


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {tuple(shuffled(i, 50, seed, epoch, "") for i in range(50)) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100


def test_samples_go_through_the_sequences_epoch_after_epoch():
    expected = [shuffled(index, 7, 1234, epoch, "corpus") for epoch in range(3) for index in range(7)]
    assert [sequence_of_sample(sample, 7, 1234, "corpus") for sample in range(21)] == expected


IDENTITY = "0f" * 32 + " s2048-d0-969"
FIRST_ORDER = [5, 17, 16, 8, 2, 11, 10, 19, 1, 13, 6, 0, 7, 4, 3, 9, 18, 15, 12, 14]
FAR_ITEM = 196999282032


def test_the_order_is_the_same_on_every_machine_and_in_every_release():
    assert [shuffled(i, 20, 1234, 0, IDENTITY) for i in range(20)] == FIRST_ORDER
    assert shuffled(123_456_789, 10**12, 1234, 5, IDENTITY) == FAR_ITEM


def test_every_place_gets_every_item_about_equally_often():
    num_items, epochs = 12, 6000
    counts = np.zeros((num_items, num_items))
    for epoch in range(epochs):
        for index in range(num_items):
            counts[index, shuffled(index, num_items, 42, epoch, "corpus")] += 1
    expected = epochs / num_items
    chi_square = ((counts - expected) ** 2 / expected).sum(axis=1)
    assert chi_square.max() < 40  # 11 degrees of freedom: above 40 once in 30,000


def test_neighbours_are_not_neighbours_afterwards():
    num_items = 100_003
    order = np.array([shuffled(i, num_items, 3, 0, "corpus") for i in range(num_items)])
    steps = np.diff(order)
    assert abs(np.corrcoef(order, np.arange(num_items))[0, 1]) < 0.02
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.02
    assert np.count_nonzero(np.abs(steps) == 1) < 20
    assert np.unique(steps).size > 50_000


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 10**12), st.integers(0, 10**9), st.integers(0, 5), st.lists(st.integers(0, 10**13), max_size=80))
def test_many_samples_at_once_are_those_of_one_by_one(num_sequences, seed, epochs, samples):
    samples = np.array([*samples, *range(epochs * num_sequences, epochs * num_sequences + 30)])
    one_by_one = [sequence_of_sample(sample, num_sequences, seed, "index") for sample in samples.tolist()]
    for some in (slice(None), slice(0, 3)):  # numpy's way, and Python's for a few
        sequences = sequences_of_samples(samples[some], num_sequences, seed, "index")
        assert sequences.dtype == np.int64 and sequences.tolist() == one_by_one[some]
    other = sequences_of_samples(samples, num_sequences, seed + 1, "index")
    assert num_sequences < 100 or other.tolist() != one_by_one
