"""What packing a corpus saves and costs at one sequence length, beside concatenation.

Everything is counted from the lengths of the documents; nothing is estimated. Concatenation joins documents in the
order of ``lengths`` and cuts every L tokens, so the order in which Megatron would join them (``megatron_order``) gives
Megatron's cuts. Packing cuts a document of n tokens ceil(n / L) - 1 times, wherever it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..packing.best_fit import Run, count_sequences, plan_runs
from ..packing.bounds import lower_bound
from ..packing.census import LONGEST_DOCUMENT, Census, blocks_of, num_blocks, take_census
from ..progress import Progress, without_progress


@dataclass(frozen=True)
class LengthClass:
    """Documents whose lengths are in one range, and how they are cut."""

    shortest: int
    """Tokens."""
    longest: int
    """Tokens, inclusive."""
    documents: int
    tokens: int
    cut_by_concatenation: int
    """Documents that are cut at least once."""
    cuts_of_concatenation: int
    """Places at which they are cut."""
    cut_by_packing: int
    cuts_of_packing: int


@dataclass(frozen=True)
class Spread:
    """Nearest-rank percentiles over all sequences."""

    median: float
    p99: float
    maximum: float


@dataclass(frozen=True)
class Compactness:
    """Best-fit decreasing packing under one cap."""

    max_documents_per_sequence: int | None
    sequences: int
    padding: int
    """Positions without a token."""
    lower_bound: int
    """At least so many sequences are needed by any packing that cuts only what is longer than L."""
    documents_per_sequence: Spread
    attention_work: Spread
    """Sum of the squared chunk lengths of a sequence over L squared: 1 is full causal attention."""


@dataclass(frozen=True)
class Report:
    """All figures of one corpus at one sequence length."""

    seq_length: int
    documents: int
    empty_documents: int
    tokens: int
    long_documents: int
    """Documents of more than L tokens."""
    long_tokens: int
    """Tokens in them."""
    concatenated_sequences: int
    """ceil(tokens / L): no padding but in the last."""
    length_classes: list[LengthClass]
    """By powers of two and L, shortest first; those without documents are left out."""
    packings: list[Compactness]


def make_report(
    lengths: Any, seq_length: int, caps: Sequence[int | None] = (None,), progress: Progress = without_progress
) -> Report:
    """Count everything.

    Args:
        lengths: integers [documents], tokens, in the order in which concatenation joins them; anything with a length
            whose slices are numpy arrays.
        caps: values of ``max_documents_per_sequence`` to compare.
    """
    census = take_census(lengths, seq_length, progress)
    edges = sorted({1 << bit for bit in range(LONGEST_DOCUMENT.bit_length())} | {seq_length})
    classes = [row for row in count_cuts(lengths, seq_length, edges, progress) if row.documents]
    long = [row for row in classes if row.shortest > seq_length]
    return Report(
        seq_length=seq_length,
        documents=census.num_documents,
        empty_documents=census.num_empty,
        tokens=census.num_tokens,
        long_documents=sum(row.documents for row in long),
        long_tokens=sum(row.tokens for row in long),
        concatenated_sequences=-(-census.num_tokens // seq_length),
        length_classes=classes,
        packings=[measure_packing(census, seq_length, cap) for cap in caps],
    )


def megatron_order(lengths: Any, seed: int, progress: Progress = without_progress) -> np.ndarray:
    """The lengths in the order in which megatron-core's GPTDataset joins the documents of one epoch.

    It shuffles document ids with ``numpy.random.RandomState(seed)``, and the shuffle does not depend on the values.

    Args:
        lengths: integers [documents], tokens; anything with a length whose slices are numpy arrays.
        seed: Megatron's ``--seed``.
    """
    blocks = progress(blocks_of(lengths), num_blocks(lengths), "reading lengths")
    shuffled = np.concatenate([np.empty(0, dtype=np.int32), *(block for _, block in blocks)])
    for _ in progress(range(1), 1, f"shuffling {len(shuffled):,} documents"):
        np.random.RandomState(seed).shuffle(shuffled)
    return shuffled


def count_cuts(
    lengths: Any, seq_length: int, edges: Sequence[int], progress: Progress = without_progress
) -> list[LengthClass]:
    """Documents and cuts by length, for concatenation in the order of ``lengths`` and for packing.

    Args:
        edges: the longest length of each class but the last, ascending. Empty documents are in no class.
    """
    ends_of_classes = np.asarray(edges, dtype=np.int64)
    totals = np.zeros((len(edges) + 1, 6), dtype=np.int64)
    position = 0
    for _, block in progress(blocks_of(lengths), num_blocks(lengths), f"counting cuts at {seq_length}"):
        block = block[block > 0].astype(np.int64)
        ends = position + np.cumsum(block)
        concatenation = (ends - 1) // seq_length - (ends - block) // seq_length
        packing = (block - 1) // seq_length
        classes = np.searchsorted(ends_of_classes, block)
        counts = (np.ones_like(block), block, concatenation > 0, concatenation, packing > 0, packing)
        for column, count in enumerate(counts):
            # weights are float64: exact below 2**53, far above the sum of a block
            totals[:, column] += np.bincount(classes, count, len(totals)).astype(np.int64)
        position += int(block.sum())
    shortest, longest = [1, *(ends_of_classes + 1).tolist()], [*ends_of_classes.tolist(), LONGEST_DOCUMENT]
    return [LengthClass(*row) for row in zip(shortest, longest, *totals.T.tolist(), strict=True)]


def measure_packing(census: Census, seq_length: int, max_documents_per_sequence: int | None) -> Compactness:
    """Pack a corpus, as far as its numbers go."""
    runs = plan_runs(census.remainders, seq_length, max_documents_per_sequence)
    sequences = count_sequences(census, runs)
    counts, chunks, work = _describe(census, runs, seq_length)
    return Compactness(
        max_documents_per_sequence,
        sequences,
        sequences * seq_length - census.num_tokens,
        lower_bound(census, seq_length, max_documents_per_sequence),
        spread(chunks, counts),
        spread(work / seq_length**2, counts),
    )


def spread(values: np.ndarray, counts: np.ndarray) -> Spread:
    """Percentiles of ``values``, each of which occurs ``counts`` times."""
    if not counts.sum():
        return Spread(0, 0, 0)
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(counts[order])
    at = [int(np.searchsorted(reached, -(-reached[-1] * percent // 100))) for percent in (50, 99, 100)]
    return Spread(*values[order][at].tolist())


def _describe(census: Census, runs: list[Run], seq_length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each run: its sequences, and the chunks and the work of one of them."""
    rows = [(census.num_full_chunks, 1, seq_length**2), *((run.num_sequences, run.chunks, run.work) for run in runs)]
    counts, chunks, work = np.array(rows, dtype=np.int64).T
    return counts, chunks, work
