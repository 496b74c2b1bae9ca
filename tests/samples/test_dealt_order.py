"""Orders of several global batches: tiles of neighbours, whose differences cancel in each slot."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bfp.samples.balance import dealt_order


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 6), st.integers(0, 9), st.integers(1, 40))
def test_tiles_are_neighbours_dealt_to_each_batch(num_batches, micro_steps, tile, seed, most):
    work = np.random.default_rng(seed).integers(0, most, num_batches * micro_steps * tile)
    order = dealt_order(work, num_batches, tile, seed)
    assert sorted(order) == [*range(len(work))]
    tiles = np.sort(work[order].reshape(num_batches, micro_steps, tile))
    neighbours = np.sort(work).reshape(micro_steps, num_batches, tile)
    for step in range(micro_steps):
        assert sorted(tiles[:, step].tolist()) == neighbours[step].tolist()


def test_slots_are_evener_than_by_turning_every_second_tile():
    rng, spreads = np.random.default_rng(0), []
    for _ in range(20):
        work = np.sort((1e6 * rng.beta(1, 4, 8 * 4 * 16)).astype(np.int64))
        dealt = work[dealt_order(work, 8, 16, 1)].reshape(8, 4, 16)
        turned = np.sort(dealt)
        turned[:, 1::2] = turned[:, 1::2, ::-1]
        spreads.append([np.ptp(tiles.sum(axis=1), axis=1).mean() for tiles in (dealt, turned, np.sort(dealt))])
    dealt, turned, sorted_tiles = np.mean(spreads, axis=0)
    assert dealt < 0.8 * turned < 0.8 * sorted_tiles
