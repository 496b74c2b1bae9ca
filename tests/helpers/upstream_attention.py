"""Attention as Megatron-LM computes it with context parallelism by itself: wrong for rows of several documents."""

from itertools import pairwise

import torch
from torch import distributed

from megatron_bfp.attention.boundaries import Boundaries
from megatron_bfp.attention.context_parallel import exchange


def as_upstream(query, key, value, boundaries, shards, group, attend, softmax_scale, dropout):
    """Whole rows are cut by zigzag, but attention takes each document to be cut so; arguments as ``ulysses``.

    It divides the boundaries by the number of ranks, and takes what it then finds between two of them on each rank for
    the first and second half of that rank's pieces of a document. That is right if each row is one document.
    """
    ranks, number = shards.num_ranks, len(query)
    order, lengths = [], []
    for start, end in pairwise(offset // ranks for offset in boundaries.offsets):
        middle = (start + end) // 2
        order += [torch.arange(start, middle) + rank * number for rank in range(ranks)]
        order += [torch.arange(middle, end) + rank * number for rank in reversed(range(ranks))]
        lengths += [ranks * (end - start)] if end > start else []
    order = torch.cat(order)
    whole = [exchange(tensor.repeat(ranks, 1, 1), group)[order] for tensor in (query, key, value)]
    attended = attend(*whole, Boundaries.of_lengths(lengths, query.device), softmax_scale, dropout)
    return attended[order.argsort()].unflatten(0, (ranks, number))[distributed.get_rank(group)]
