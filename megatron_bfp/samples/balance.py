"""Orders of a global batch in which ranks need not wait for each other.

Attention inside documents makes the time of a sample grow with its work, the sum of its squared chunk lengths, and in
each step all ranks wait for the slowest. Reordering the samples *inside* a global batch changes nothing else: the batch
holds the same samples, so its gradient is the same sum.

Guarantee: the order depends on the works and the micro-batch size alone, not on the number of ranks. Cost: a sort of
the batch for each sample of a micro-batch.

Example: eight samples; the slots of the batch get these places of the sorted works, 0 being the least::

    0 1 3 2 6 7 5 4

Each aligned pair, and each aligned half, is of neighbours, so ranks that work at the same time do equal work. Every
second pair and every second half runs backwards, so the small differences that remain cancel in the sum over
micro-batches. With two ranks and a micro-batch of 1, rank 0 gets the places 0, 3, 6, 5 and rank 1 gets 1, 2, 7, 4: both
add up to 14.

A rank runs the samples of a micro-batch together, so what counts is the micro-batch's sum. Neighbours in one
micro-batch would make some sums large and others small. So samples are grouped into micro-batches of about equal sums
first, and the micro-batches take the places above. With several samples in a micro-batch, no order can be even for
another micro-batch size as well.
"""

from functools import lru_cache

import numpy as np

from .order import shuffled


def balanced_order(work: np.ndarray, micro_batch_size: int = 1) -> np.ndarray:
    """The order of one global batch in which any tile of consecutive micro-batches holds some of about equal work.

    Args:
        work: int64 [n], of each sample.
        micro_batch_size: samples that a rank runs together; if n is no multiple of it, 1.

    Returns:
        int64 [n]: the sample of each slot; a permutation.
    """
    groups = even_micro_batches(work, micro_batch_size if len(work) % micro_batch_size == 0 else 1)
    ascending = groups[np.argsort(work[groups].sum(axis=1), kind="stable")]
    return ascending[reflected_places(len(groups))].reshape(-1)


def even_micro_batches(work: np.ndarray, size: int) -> np.ndarray:
    """Group samples into micro-batches of about equal sums.

    In rounds, from heavy to light: the next samples go one each to all micro-batches, the heaviest to the one with the
    least work so far.

    Args:
        work: int64 [n], of each sample; n is a multiple of ``size``.

    Returns:
        int64 [n / size, size]: the samples of each micro-batch.
    """
    rounds = np.argsort(-work, kind="stable").reshape(size, -1)
    groups = rounds.T.copy()
    so_far = work[groups[:, 0]]
    for number in range(1, size):
        lightest_first = np.argsort(so_far, kind="stable")
        groups[lightest_first, number] = rounds[number]
        so_far = so_far + work[groups[:, number]]
    return groups


def dealt_order(work: np.ndarray, num_batches: int, tile: int, seed: int, micro_batch_size: int = 1) -> np.ndarray:
    """The order of several global batches of which each step's micro-batches are of about equal work.

    The micro-batches are sorted, and tiles of neighbours are dealt to the batches in turn, back and forth, so that
    batches are alike in sum. So which samples share a batch depends on their work. Inside a batch, the tiles of the
    most uneven works come first, and of each tile the least work goes to the slot with the most so far. The batches
    come in a random order, as otherwise they would go from light to heavy where a batch has one tile only.

    Args:
        work: int64 [n], of each sample; n is a multiple of ``num_batches * tile``.
        num_batches: global batches.
        tile: samples that all ranks together work on at once: data-parallel size times micro-batch size.
        seed: chooses the order of the batches.
        micro_batch_size: samples that a rank runs together; it divides ``tile``.

    Returns:
        int64 [n]: the sample of each slot; a permutation.
    """
    groups = even_micro_batches(work, micro_batch_size)
    order = _dealt(work[groups].sum(axis=1), num_batches, tile // micro_batch_size, seed)
    return groups[order].reshape(-1)


def _dealt(work: np.ndarray, num_batches: int, tile: int, seed: int) -> np.ndarray:
    """``dealt_order`` of micro-batches, given their work."""
    tiles = np.argsort(work, kind="stable").reshape(-1, num_batches, tile)  # [micro-step, batch, slot]
    tiles[1::2] = tiles[1::2, ::-1]
    work_of_tiles = work[tiles]
    spreads = (work_of_tiles[..., -1] - work_of_tiles[..., 0]).sum(axis=1)
    so_far = np.zeros((num_batches, tile), dtype=work.dtype)
    for micro_step in np.argsort(-spreads, kind="stable"):
        slots = np.argsort(-so_far, kind="stable")
        np.put_along_axis(tiles[micro_step], slots, tiles[micro_step].copy(), axis=1)
        so_far += work[tiles[micro_step]]
    batches = [shuffled(batch, num_batches, seed, 0, "balanced batches") for batch in range(num_batches)]
    return tiles.transpose(1, 0, 2)[batches].reshape(-1)


@lru_cache(maxsize=16)
def reflected_places(num_slots: int) -> np.ndarray:
    """For each slot of a batch, the place of its sample among all, sorted by work: a reflected Gray code.

    The radices are the prime factors of ``num_slots``, the largest ones outside, as micro-batch sizes and numbers of
    ranks are mostly powers of two. For each divisor of ``num_slots`` that is a product of the inner ones, aligned tiles
    of that many slots hold neighbours, and every second tile runs backwards.

    Returns:
        int64 [num_slots], a permutation.
    """
    places = np.zeros(1, dtype=np.int64)
    for radix in _prime_factors(num_slots):
        rows = np.tile(places, (radix, 1))
        rows[1::2] = places[::-1]
        places = (rows + len(places) * np.arange(radix)[:, None]).reshape(-1)
    places.flags.writeable = False  # it is cached
    return places


def _prime_factors(number: int) -> list[int]:
    """In ascending order."""
    factors, factor = [], 2
    while factor * factor <= number:
        while number % factor == 0:
            factors.append(factor)
            number //= factor
        factor += 1
    return factors + [number] if number > 1 else factors
