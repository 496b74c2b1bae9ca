"""Orders of a global batch, as permutations: which samples are together, and how even what is together is."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bfp.samples.balance import balanced_order, dealt_order, even_micro_batches, reflected_places

WORKS = st.lists(st.integers(0, 10**9), min_size=1, max_size=200).map(np.array)


@settings(max_examples=200, deadline=None)
@given(WORKS, st.integers(1, 9))
def test_the_order_of_a_batch_is_a_permutation(work, micro_batch_size):
    assert sorted(balanced_order(work, micro_batch_size).tolist()) == list(range(len(work)))


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6), st.integers(1, 4), st.integers(0, 99), st.randoms())
def test_the_order_of_several_batches_is_a_permutation(micro_steps, num_batches, ranks, size, seed, random):
    work = np.array([random.randrange(50) for _ in range(micro_steps * num_batches * ranks * size)])
    order = dealt_order(work, num_batches, ranks * size, seed, size)
    assert sorted(order.tolist()) == list(range(len(work)))


def test_the_example_of_the_module():
    assert reflected_places(8).tolist() == [0, 1, 3, 2, 6, 7, 5, 4]
    assert reflected_places(12).tolist() == [0, 1, 3, 2, 6, 7, 5, 4, 8, 9, 11, 10]
    ranks = reflected_places(8).reshape(4, 2).T
    assert ranks.sum(axis=1).tolist() == [14, 14]


@pytest.mark.parametrize("num_slots", [1, 2, 3, 8, 24, 96, 250, 251, 768, 1024])
def test_aligned_tiles_hold_neighbours_and_every_second_one_runs_backwards(num_slots):
    places, tile = reflected_places(num_slots), 1
    for radix in prime_factors(num_slots):
        tile *= radix
        tiles = places.reshape(-1, tile)
        firsts = tiles.min(axis=1)
        assert np.array_equal(np.sort(tiles, axis=1), firsts[:, None] + np.arange(tile))
        assert sorted(firsts.tolist()) == list(range(0, num_slots, tile))
        for number, (first, tile_places) in enumerate(zip(firsts, tiles)):
            assert np.array_equal(tile_places - first, tiles[0][::-1] if number % 2 else tiles[0])


def prime_factors(number):
    """In ascending order."""
    least = next((factor for factor in range(2, number + 1) if number % factor == 0), None)
    return [least, *prime_factors(number // least)] if least else []


def lost(work, ranks, micro_batch_size):
    """By how much the slowest rank is above the mean: once per step, and in every micro-step."""
    times = (1 + 2 * work).reshape(-1, ranks, micro_batch_size).sum(axis=2)
    once = times.sum(axis=0).max() / times.sum(axis=0).mean() - 1
    return once, times.max(axis=1).sum() / times.mean(axis=1).sum() - 1


@pytest.mark.parametrize(
    "ranks, micro_batch_size", [(2, 1), (8, 1), (8, 4), (64, 1), (64, 2), (3, 2), (24, 1), (96, 1)]
)
def test_an_order_is_even_for_every_number_of_ranks(ranks, micro_batch_size):
    rng = np.random.default_rng(5)
    of_random_order, of_balanced = [], []
    for _ in range(20):
        work = rng.beta(1, 4, 768)  # of L squared
        of_random_order.append(lost(work, ranks, micro_batch_size))
        of_balanced.append(lost(work[balanced_order(work, micro_batch_size)], ranks, micro_batch_size))
    for random_order, balanced in zip(np.mean(of_random_order, axis=0), np.mean(of_balanced, axis=0)):
        assert balanced < 0.6 * random_order


def test_several_batches_leave_next_to_nothing_to_wait_for():
    rng = np.random.default_rng(5)
    work = rng.beta(1, 4, 8 * 256)
    one = np.mean([lost(batch[balanced_order(batch)], 64, 1) for batch in work.reshape(8, 256)], axis=0)
    several = np.mean([lost(batch, 64, 1) for batch in work[dealt_order(work, 8, 64, 3)].reshape(8, 256)], axis=0)
    assert np.all(several < 0.3 * one)


def test_several_batches_do_not_go_from_light_to_heavy():
    work = np.arange(16 * 8)
    sums = [work[dealt_order(work, 16, 8, seed)].reshape(16, 8).sum(axis=1).tolist() for seed in (1, 2)]
    assert sums[0] != sorted(sums[0]) and sorted(sums[0]) == sorted(sums[1]) and sums[0] != sums[1]


def test_batches_of_several_micro_steps_are_alike_in_sum():
    work = np.sort(np.random.default_rng(0).beta(1, 4, 4 * 8 * 16))
    sums = work[dealt_order(work, 4, 16, 1)].reshape(4, -1).sum(axis=1)
    assert sums.std() < 0.05 * sums.mean()
    in_order = work.reshape(4, -1).sum(axis=1)  # the control
    assert in_order.std() > 0.3 * in_order.mean()


@pytest.mark.parametrize("micro_batch_size", [2, 4, 8])
def test_micro_batches_of_several_samples_have_about_equal_sums(micro_batch_size):
    work = np.random.default_rng(3).beta(2, 4, 256)
    sums = work[even_micro_batches(work, micro_batch_size)].sum(axis=1)
    neighbours = np.sort(work).reshape(-1, micro_batch_size).sum(axis=1)  # the control
    assert sums.std() < 0.35 * neighbours.std()


def test_one_micro_batch_for_each_rank_is_not_worse_than_random_order():
    """With neighbours in each micro-batch, as an order for single samples has it, it is."""
    rng = np.random.default_rng(5)
    works = [rng.beta(1, 4, 256) for _ in range(20)]
    orders = {
        "random": lambda work: np.arange(256),
        "for single samples": balanced_order,
        "for micro-batches": lambda work: balanced_order(work, 4),
    }
    of_order = {
        name: np.mean([lost(work[order(work)], 64, 4) for work in works], axis=0)[0] for name, order in orders.items()
    }
    assert of_order["for micro-batches"] < 0.4 * of_order["random"] < of_order["for single samples"]


def test_equal_works_keep_their_order():
    assert balanced_order(np.full(8, 5)).tolist() == reflected_places(8).tolist()
