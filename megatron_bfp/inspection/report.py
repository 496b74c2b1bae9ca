"""What packing a corpus saves and costs at one sequence length, beside concatenation.

Everything is counted from the lengths of the documents; only the time that ranks wait is simulated. Concatenation joins
documents in the order of ``lengths`` and cuts every L tokens, so the order in which Megatron would join them
(``megatron_order``) gives Megatron's cuts. Packing cuts a document of n tokens ceil(n / L) - 1 times, wherever it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..packing.bounds import lower_bound
from ..packing.census import LONGEST_DOCUMENT, Census, blocks_of, num_blocks, take_census
from ..packing.even import plan
from ..packing.positions import TargetLengths
from ..progress import Progress, without_progress
from .waiting import HIDDEN_SIZE, Ranks, WaitingOfPlan, WorkOfPlan, waiting_of_plan

PERCENT = (0, *range(5, 100, 5), 98, 99, 99.5, 99.8, 99.9, 99.95, 99.98, 99.99, 100)
"""Where a distribution over sequences is given."""


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
    """Packing under one cap, best-fit decreasing or with even sequences."""

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
class DistributionPoint:
    """What so many percent of the sequences have at most."""

    percent: float
    documents: int
    """Per sequence, best-fit decreasing."""
    documents_even: int
    """With even sequences."""
    work: float
    """Sum of the squared chunk lengths of a sequence over L squared."""
    work_even: float


@dataclass(frozen=True)
class Waiting:
    """Time that some ranks lose by waiting for each other."""

    data_parallel_size: int
    micro_batches: int
    """Of each rank, per step, with one sequence each."""
    best_fit: WaitingOfPlan
    even: WaitingOfPlan


@dataclass(frozen=True)
class Report:
    """All figures of one corpus at one sequence length."""

    seq_length: int
    documents: int
    empty_documents: int
    one_token_documents: int
    """With targets only, they are in no sequence."""
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
    """Best-fit decreasing, by cap; without a cap first."""
    even: Compactness
    """With even sequences and without a cap."""
    targets_only: Compactness
    """All tokens but the last of each document, best-fit decreasing, without a cap."""
    distribution: list[DistributionPoint]
    """Without a cap; empty if there are no sequences."""
    waiting: list[Waiting]
    """Without a cap; empty if there are no sequences."""


def make_report(
    lengths: Any,
    seq_length: int,
    caps: Sequence[int | None] = (None,),
    progress: Progress = without_progress,
    *,
    ranks: Sequence[Ranks] = (),
    hidden_size: int = HIDDEN_SIZE,
    seed: int = 0,
) -> Report:
    """Count everything, and simulate how long ranks wait.

    Args:
        lengths: integers [documents], tokens, in the order in which concatenation joins them; anything with a length
            whose slices are numpy arrays.
        caps: values of ``max_documents_per_sequence`` to compare, None first.
        ranks: the ranks to simulate.
        hidden_size: of the model that they train.
        seed: chooses the order of sequences in the simulation.
    """
    census = take_census(lengths, seq_length, progress)
    edges = sorted({1 << bit for bit in range(LONGEST_DOCUMENT.bit_length())} | {seq_length})
    classes = [row for row in count_cuts(lengths, seq_length, edges, progress) if row.documents]
    long = [row for row in classes if row.shortest > seq_length]
    best_fit, even = (plan_sequences(census, seq_length, even=even) for even in (False, True))
    census_of_targets = take_census(TargetLengths(lengths), seq_length, progress)
    return Report(
        seq_length=seq_length,
        documents=census.num_documents,
        empty_documents=census.num_empty,
        one_token_documents=census_of_targets.num_empty - census.num_empty,
        tokens=census.num_tokens,
        long_documents=sum(row.documents for row in long),
        long_tokens=sum(row.tokens for row in long),
        concatenated_sequences=-(-census.num_tokens // seq_length),
        length_classes=classes,
        packings=[measure_packing(census, seq_length, cap, None if cap else best_fit) for cap in caps],
        even=measure_packing(census, seq_length, None, even),
        targets_only=measure_packing(census_of_targets, seq_length, None),
        distribution=_distribution(best_fit, even, seq_length),
        waiting=[_waiting(best_fit, even, seq_length, hidden_size, each, seed) for each in ranks if census.num_tokens],
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
    lengths: Any,
    seq_length: int,
    edges: Sequence[int],
    progress: Progress = without_progress,
    targets_only: bool = False,
) -> list[LengthClass]:
    """Documents and cuts by length, for concatenation in the order of ``lengths`` and for packing.

    Args:
        edges: the longest length of each class but the last, ascending. Empty documents are in no class.
        targets_only: pack all tokens but the last of each document.
    """
    ends_of_classes = np.asarray(edges, dtype=np.int64)
    totals = np.zeros((len(edges) + 1, 6), dtype=np.int64)
    position = 0
    for _, block in progress(blocks_of(lengths), num_blocks(lengths), f"counting cuts at {seq_length}"):
        block = block[block > 0].astype(np.int64)
        ends = position + np.cumsum(block)
        concatenation = (ends - 1) // seq_length - (ends - block) // seq_length
        packing = np.maximum(block - 1 - targets_only, 0) // seq_length
        classes = np.searchsorted(ends_of_classes, block)
        counts = (np.ones_like(block), block, concatenation > 0, concatenation, packing > 0, packing)
        for column, count in enumerate(counts):
            # weights are float64: exact below 2**53, far above the sum of a block
            totals[:, column] += np.bincount(classes, count, len(totals)).astype(np.int64)
        position += int(block.sum())
    shortest, longest = [1, *(ends_of_classes + 1).tolist()], [*ends_of_classes.tolist(), LONGEST_DOCUMENT]
    return [LengthClass(*row) for row in zip(shortest, longest, *totals.T.tolist(), strict=True)]


class PlannedSequences(NamedTuple):
    """The sequences of a plan, as counts of those that hold equal lengths."""

    counts: np.ndarray
    """int64 [n]: how many sequences."""
    chunks: np.ndarray
    """int64 [n]: chunks in each of them."""
    work: np.ndarray
    """int64 [n]: the work of each of them, tokens squared."""


def plan_sequences(
    census: Census, seq_length: int, max_documents_per_sequence: int | None = None, even: bool = False
) -> PlannedSequences:
    """Pack a corpus, as far as its numbers go."""
    runs = plan(census.remainders, seq_length, max_documents_per_sequence, even)
    rows = [(census.num_full_chunks, 1, seq_length**2), *((run.num_sequences, run.chunks, run.work) for run in runs)]
    return PlannedSequences(*np.array(rows, dtype=np.int64).T)


def measure_packing(
    census: Census,
    seq_length: int,
    max_documents_per_sequence: int | None,
    planned: PlannedSequences | None = None,
) -> Compactness:
    """The figures of a packing.

    Args:
        planned: its sequences; None to pack them best-fit decreasing.
    """
    if planned is None:
        planned = plan_sequences(census, seq_length, max_documents_per_sequence)
    sequences = int(planned.counts.sum())
    return Compactness(
        max_documents_per_sequence,
        sequences,
        sequences * seq_length - census.num_tokens,
        lower_bound(census, seq_length, max_documents_per_sequence),
        spread(planned.chunks, planned.counts),
        spread(planned.work / seq_length**2, planned.counts),
    )


def spread(values: np.ndarray, counts: np.ndarray) -> Spread:
    """Median, p99 and maximum of ``values``, each of which occurs ``counts`` times."""
    return Spread(*percentiles(values, counts, (50, 99, 100))) if counts.sum() else Spread(0, 0, 0)


def percentiles(values: np.ndarray, counts: np.ndarray, percent: Sequence[float]) -> list:
    """Nearest-rank percentiles of ``values``, each of which occurs ``counts`` times; there must be some.

    Args:
        percent: multiples of 0.01.
    """
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(counts[order])
    ranks = [max(1, -(-int(reached[-1]) * round(100 * share) // 10_000)) for share in percent]
    return values[order][np.searchsorted(reached, ranks)].tolist()


def _distribution(best_fit: PlannedSequences, even: PlannedSequences, seq_length: int) -> list[DistributionPoint]:
    if not best_fit.counts.sum():
        return []
    documents = [percentiles(plan.chunks, plan.counts, PERCENT) for plan in (best_fit, even)]
    work = [percentiles(plan.work / seq_length**2, plan.counts, PERCENT) for plan in (best_fit, even)]
    return [DistributionPoint(*row) for row in zip(PERCENT, *documents, *work)]


def _waiting(
    best_fit: PlannedSequences, even: PlannedSequences, seq_length: int, hidden_size: int, ranks: Ranks, seed: int
) -> Waiting:
    of_plans = (
        waiting_of_plan(WorkOfPlan(plan.counts, plan.work), seq_length, hidden_size, ranks, seed)
        for plan in (best_fit, even)
    )
    return Waiting(ranks.data_parallel_size, ranks.micro_batches, *of_plans)
