"""A lower bound on the number of sequences, whatever packs the documents: Martello and Toth's L2 for bin packing.

Cost: one pass over the histogram of lengths. The gap to it shows how far a packing can be from the optimum; 0 means the
packing is optimal.
"""

import numpy as np

from .census import Census


def lower_bound(census: Census, seq_length: int, max_documents_per_sequence: int | None = None) -> int:
    """At least so many sequences are needed by any packing that cuts only what is longer than ``seq_length``."""
    return census.num_full_chunks + lower_bound_of_remainders(census.remainders, seq_length, max_documents_per_sequence)


def lower_bound_of_remainders(
    counts: np.ndarray, seq_length: int, max_documents_per_sequence: int | None = None
) -> int:
    """At least so many sequences are needed by the remainder chunks.

    Args:
        counts: int64 [L], number of remainder chunks of each length.

    Source: "Lower bounds and reduction procedures for the bin packing problem" (Discrete Applied Mathematics, 1990).
    For each threshold a from 0 to L / 2: chunks longer than L / 2 need a sequence each; those longer than L - a leave
    no room for chunks of a or more; what room the others leave is taken from the chunks of a to L / 2, and the rest of
    these needs sequences of its own. The bound of a = 0 is ceil(tokens / L). A cap gives ceil(chunks / cap) as well.
    """
    number, tokens = np.cumsum(counts), np.cumsum(counts * np.arange(seq_length))  # of chunks up to each length
    half = seq_length // 2
    threshold = np.arange(half + 1)
    medium_end = np.minimum(seq_length - threshold, seq_length - 1)
    room = (number[medium_end] - number[half]) * seq_length - (tokens[medium_end] - tokens[half])
    small = tokens[half] - tokens[np.maximum(threshold - 1, 0)]
    bounds = number[-1] - number[half] + np.maximum(0, -((room - small) // seq_length))
    bound = int(bounds.max())
    if max_documents_per_sequence is not None:
        bound = max(bound, -(-int(number[-1]) // max_documents_per_sequence))
    return bound
