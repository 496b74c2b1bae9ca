"""Even sequences: about as few as best-fit decreasing makes, but with about equally many documents.

Best-fit decreasing leaves tiny documents to the end, so a few sequences hold nothing else: at L = 8,192, one web
sequence in a hundred holds 6 to 12 times as many documents as the mean. Here long chunks are dealt out first, each to
the sequence with the most space (``dealing``), until only about three chunks per sequence are left. These are short,
and fill the gaps by best fit (``gaps``).

When to stop dealing is a matter of a few per cent of the chunks, and the best moment depends on the corpus. So a few
rules are tried, until one gives sequences that are even enough and not more than allowed; else the most even one is
taken. All decisions are made with integers, so the plan is the same on every machine.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .best_fit import Run, count_remainder_sequences, plan_runs
from .bounds import lower_bound_of_remainders
from .dealing import Dealing, SortedChunks
from .gaps import Gaps, TooManySequences, fill_gaps, with_moves_of

TOLERANCE = 5000
"""A plan may have one sequence more in so many than best-fit decreasing (0.02 %), and one."""


class Rule(NamedTuple):
    """How to plan."""

    late_tenths: int
    """Dealing ends when so many tenths of a chunk per sequence are left."""
    room_tenths: int
    """A gap is filled, or left with room for so many tenths of the later chunks; 0 for plain best fit."""


RULES = (Rule(30, 0), Rule(25, 0), Rule(25, 7), Rule(35, 7), Rule(35, 5), Rule(30, 5), Rule(50, 0))
RULES_IF_FEW = (Rule(30, 5), Rule(35, 5), Rule(25, 6), Rule(25, 7), Rule(35, 7), Rule(40, 7), Rule(30, 0), Rule(25, 0))
"""In the order in which they are tried; the second ones if sequences hold less than 12 chunks on average."""

EVEN_ENOUGH, MANY, EVEN_ENOUGH_IF_FEW = 29, 8, 65
"""A plan is even enough if four times its unevenness is at most 29 times the mean number of chunks: 99 of 100 sequences
hold at most 1.45 times the mean, and no sequence more than 2.4 times. If the mean is below 8, an unevenness of 65 is
even enough: 13 chunks in 99 of 100 sequences, and at most 21."""


class Plan(NamedTuple):
    """What a rule gives."""

    runs: list[Run]
    dealing: Dealing
    unevenness: int

    @property
    def num_sequences(self) -> int:
        """Number of sequences."""
        return count_remainder_sequences(self.runs)


def plan_even_runs(remainders: np.ndarray, seq_length: int, max_documents_per_sequence: int | None = None) -> list[Run]:
    """Pack remainder chunks so that sequences hold about equally many.

    Cost: as for ``plan_runs``, it grows with L, not with the number of documents; about three times as long. Guarantee:
    at most 1 sequence and 0.02 % more than ``plan_runs`` gives.

    Args:
        remainders: int64 [L], number of chunks of each length below L.
        seq_length: L, tokens per sequence.
        max_documents_per_sequence: at most so many chunks per sequence; None for no limit.

    Returns:
        As ``plan_runs``.
    """
    planner = Planner(remainders, seq_length, max_documents_per_sequence)
    bound = lower_bound_of_remainders(remainders, seq_length, max_documents_per_sequence)
    plan = planner.most_even(bound) if bound else None
    if plan is not None and planner.is_even(plan):
        return with_moves_of(plan.dealing, plan.runs)
    best_fit = plan_runs(remainders, seq_length, max_documents_per_sequence)
    if plan is None:
        plan = planner.fewest(bound, count_remainder_sequences(best_fit))
    if (
        plan is None
        or plan.num_sequences >= count_remainder_sequences(best_fit)
        and unevenness(best_fit) <= plan.unevenness
    ):
        return best_fit
    return with_moves_of(plan.dealing, plan.runs)


class Planner:
    """Tries rules on the chunks of a corpus."""

    def __init__(self, remainders: np.ndarray, seq_length: int, cap: int | None) -> None:
        self._chunks, self._seq_length, self._cap = SortedChunks(remainders), seq_length, cap

    def most_even(self, num_sequences: int) -> Plan | None:
        """The first plan that is even, else the most even one; None if all have too many sequences.

        Args:
            num_sequences: a plan may have 1 and 0.02 % more.
        """
        few = self._chunks.number < 12 * num_sequences
        best = None
        for plan in self._plans(RULES_IF_FEW if few else RULES, num_sequences):
            if best is None or plan.unevenness < best.unevenness:
                best = plan
            if self.is_even(plan):
                return plan
        return best

    def fewest(self, bound: int, best_fit: int) -> Plan | None:
        """The most even plan with the fewest sequences, between a lower bound and best fit's number of them.

        With a limit on documents, best fit needs far more sequences than the bound.
        """
        for share in (64, 32, 16, 8, 4, 2, 1):
            num_sequences = bound + (best_fit - bound) // share
            plan = self.most_even(num_sequences) if num_sequences > bound else None
            if plan is not None:
                return plan
        return None

    def is_even(self, plan: Plan) -> bool:
        """Whether a plan is even enough to take it."""
        if self._chunks.number < MANY * plan.num_sequences:
            return plan.unevenness <= EVEN_ENOUGH_IF_FEW
        return 4 * plan.unevenness * plan.num_sequences <= EVEN_ENOUGH * self._chunks.number

    def _plans(self, rules: tuple[Rule, ...], num_sequences: int) -> Iterator[Plan]:
        """A few plans by the first rule, and one by each of the others.

        If filling the gaps opens sequences, these collect the last tiny documents. Then it is better to deal to so many
        at once. That may open a few again, so the last resort is to deal to as many as are allowed.
        """
        most = num_sequences + 1 + num_sequences // TOLERANCE
        first = self._plan(rules[0], num_sequences, most)
        if first is not None:
            yield first
        tries = [(rules[0], first.num_sequences)] if first is not None and first.num_sequences < most else []
        for rule, dealt_to in tries + [(rule, most) for rule in rules]:
            plan = self._plan(rule, dealt_to, most)
            if plan is not None:
                yield plan

    def _plan(self, rule: Rule, num_sequences: int, most_sequences: int) -> Plan | None:
        end = self._chunks.number - rule.late_tenths * num_sequences // 10
        if end <= 0:
            return None
        dealing = Dealing(self._chunks, self._seq_length, num_sequences, self._cap)
        dealing.deal(end)
        gaps = Gaps(self._seq_length, self._cap, num_sequences, most_sequences)
        try:
            runs = fill_gaps(dealing, self._chunks, gaps, rule.room_tenths)
        except TooManySequences:
            return None
        if any(run.chunks == 0 for run in runs):
            return None
        return Plan(runs, dealing, unevenness(runs))


def unevenness(runs: list[Run]) -> int:
    """Five times the chunks that 99 of 100 sequences do not exceed, or three times the most chunks, if that is more."""
    numbers = np.array([(run.chunks, run.num_sequences) for run in runs])
    chunks, num_sequences = numbers[numbers[:, 0].argsort()].T
    up_to = np.cumsum(num_sequences)
    percentile = chunks[(100 * up_to).searchsorted(99 * up_to[-1])]
    return max(5 * int(percentile), 3 * int(chunks[-1]))
