"""How long ranks wait for each other, simulated on the plan of a corpus.

With attention inside documents, the time of a sequence grows with its work, the sum of its squared chunk lengths. In
each step all ranks wait for the slowest. What they lose is the time of the slowest rank over the mean of all ranks,
minus 1: 0 is no loss, 1 is as much time lost as used.

The time of a sequence of L tokens, relative to one without attention, is ``1 + C * work / (L * hidden_size)``. C, the
attention coefficient, follows from the operations of a transformer layer of hidden size h. Its matrix products take
24 h^2 FLOPs per token (12 h^2 weights, of which attention's projections are 4 h^2 and the MLP 8 h^2). Causal attention
takes 4 h for each of the n^2 / 2 pairs of a document of n tokens, so 2 h * work for a sequence. The ratio is::

    2 h * work / (24 h^2 * L)  =  1/12 * work / (L * h)

C is 1/12 = 0.083 if attention runs as fast as matrix products do. It is larger if attention is slower. Its backward
pass computes the scores again (3.5 times the forward pass for both, instead of 3): 0.097. The rest is the efficiency
of the kernel. Layer times of a LLaMA 7B on an H100 (``benchmarks/attention.py``, L = 32,768) give C = 0.17 with
flash-attn 2 and 0.09 with flash-attn 4.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..samples.balance import balanced_order, dealt_order
from ..samples.order import sequences_of_samples

ATTENTION_COEFFICIENT = 0.16
"""C: flash-attn 2 on an H100."""
HIDDEN_SIZE = 4096
"""Of a model with 7 billion parameters."""
BALANCED_TOGETHER = 8
"""Global batches that ``--balance-batches 8`` balances together."""
STEPS = 64
"""Global batches that are simulated: 8 times as many as are balanced together."""
MOST_SEQUENCES = 1 << 16
"""Sequences of the largest global batch that is simulated, for the memory's sake."""


@dataclass(frozen=True)
class Ranks:
    """The ranks of a run, with a micro-batch size of 1."""

    data_parallel_size: int
    micro_batches: int
    """Of each rank, per step."""

    def __str__(self) -> str:
        return f"{self.data_parallel_size}x{self.micro_batches}"

    @property
    def global_batch_size(self) -> int:
        """Sequences per step."""
        return self.data_parallel_size * self.micro_batches


@dataclass(frozen=True)
class TimeLost:
    """Share of the computing time that the mean rank waits, on top of that time: 0.1 is 10 %."""

    once_per_step: float
    """If ranks meet once per step, as with plain data parallelism."""
    every_micro_step: float
    """If they meet in every micro-step, as with ZeRO 3 and FSDP."""


@dataclass(frozen=True)
class WaitingOfPlan:
    """Time lost with one plan, by the order of samples."""

    random: TimeLost
    """``--balance-batches 0``."""
    balanced: TimeLost
    """``--balance-batches 1``: inside each global batch."""
    over_batches: TimeLost
    """``--balance-batches 8``."""


class WorkOfPlan:
    """The work of each sequence of a plan, as counts of sequences that have the same work.

    Args:
        sequences: int64 [runs], how many.
        work: int64 [runs], of each of them, tokens squared.
    """

    def __init__(self, sequences: np.ndarray, work: np.ndarray) -> None:
        self._ends, self._work = np.cumsum(sequences), work

    def of_samples(self, num_samples: int, seed: int) -> np.ndarray:
        """The work of the first samples of a run, over as many epochs as they need.

        Returns:
            int64 [num_samples].
        """
        sequences = sequences_of_samples(np.arange(num_samples), int(self._ends[-1]), seed, "simulated ranks")
        return self._work[np.searchsorted(self._ends, sequences, side="right")]


def waiting_of_plan(plan: WorkOfPlan, seq_length: int, hidden_size: int, ranks: Ranks, seed: int) -> WaitingOfPlan:
    """Time lost in the first ``STEPS`` steps of a run. Cost: two sorts of their samples.

    Args:
        plan: must have sequences.
        seed: chooses the order.
    """
    orders = costs_by_order(plan, seq_length, hidden_size, ranks, seed)
    return WaitingOfPlan(*(time_lost(costs) for _, costs in orders))


def costs_by_order(
    plan: WorkOfPlan, seq_length: int, hidden_size: int, ranks: Ranks, seed: int
) -> Iterator[tuple[int, np.ndarray]]:
    """What each rank computes in each micro-step, in random order and balanced.

    Yields:
        The value of ``--balance-batches``: 0, 1 and ``BALANCED_TOGETHER``; and float64 [step, micro-step, rank], the
        time of each sequence.
    """
    work = plan.of_samples(STEPS * ranks.global_batch_size, seed)
    for num_batches in (0, 1, BALANCED_TOGETHER):
        ordered = _ordered(work, num_batches, ranks)
        costs = 1 + ATTENTION_COEFFICIENT * ordered / (seq_length * hidden_size)
        yield num_batches, costs.reshape(STEPS, ranks.micro_batches, ranks.data_parallel_size)


def _ordered(work: np.ndarray, num_batches: int, ranks: Ranks) -> np.ndarray:
    """The work of samples in the order of ``--balance-batches``, which is ``num_batches``."""
    if num_batches == 0:
        return work
    size = num_batches * ranks.global_batch_size
    blocks = work.reshape(-1, size)
    if num_batches == 1:
        return np.stack([block[balanced_order(block)] for block in blocks])
    tile = ranks.data_parallel_size
    return np.stack([block[dealt_order(block, num_batches, tile, seed=size * n)] for n, block in enumerate(blocks)])


def time_lost(costs: np.ndarray) -> TimeLost:
    """The time that is lost over some steps, whose lengths are added up.

    Args:
        costs: float64 [step, micro-step, rank].
    """
    of_ranks = costs.sum(axis=1)
    return TimeLost(_lost(of_ranks), _lost(costs))


def time_lost_in_pipelines(costs: np.ndarray, num_stages: int) -> float:
    """The share of time that is lost by ranks that are pipelines of equal stages and meet once per step.

    A micro-batch takes 1 / ``num_stages`` of its time in each stage, and stages take micro-batches in order: a flow
    shop. A pipeline of equal stages is done after the sum of its micro-batches, and as often as there are other stages
    the longest of them. What is lost is counted from the same pipelines with micro-batches of the mean time, so the
    bubble that every pipeline has is not part of it.

    Args:
        costs: float64 [step, micro-step, rank].
    """
    slowest = costs.sum(axis=1) + (num_stages - 1) * costs.max(axis=1)
    num_micro_steps = costs.shape[1]
    even = costs.mean(axis=(1, 2)) * (num_micro_steps + num_stages - 1)
    return float(slowest.max(axis=1).sum() / even.sum() - 1)


def _lost(times: np.ndarray) -> float:
    """The sum of the slowest rank's times over that of the means, minus 1; ranks are the last axis."""
    return float(times.max(axis=-1).sum() / times.mean(axis=-1).sum() - 1)
