"""Lengths that are hard to pack, and what holds for every packing."""

from collections import Counter

import numpy as np


def random_lengths(rng, seq_length):
    """Lengths of one of the kinds that are hard in different ways."""
    number = int(rng.integers(0, 300))
    kind = rng.integers(0, 6)
    if kind == 0:
        return rng.integers(0, 2 * seq_length + 2, number)
    if kind == 1:
        return rng.geometric(1 / max(1.0, seq_length / 8), number)
    if kind == 2:
        return np.full(number, rng.integers(0, seq_length + 2))
    if kind == 3:
        return np.maximum(0, seq_length // 2 + rng.integers(-2, 3, number))
    if kind == 4:
        return np.maximum(0, seq_length // 3 + rng.integers(-2, 3, number))
    return np.ceil(rng.lognormal(np.log(max(2, seq_length / 4)), 1.1, number)).astype(np.int64)


def assert_whole(packing, lengths, seq_length):
    """Every chunk is in exactly one sequence, and every sequence fits."""
    seen = Counter()
    for sequence in range(len(packing)):
        chunks = packing[sequence]
        assert chunks.dtype == np.int64 and len(chunks) > 0
        assert chunks[:, 2].sum() <= seq_length
        seen.update(map(tuple, chunks.tolist()))
    expected = Counter()
    for document, length in enumerate(lengths):
        for offset in range(0, int(length), seq_length):
            expected[document, offset, min(seq_length, int(length) - offset)] += 1
    assert seen == expected
