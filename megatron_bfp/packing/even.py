"""Even sequences: about as few as best-fit decreasing makes, but without the few that hold hundreds of tiny documents.

Cost: as for best-fit decreasing, the number of steps grows with the sequence length L, not with the number of
documents. Guarantee: at most 1 sequence and 0.02 % more than best-fit decreasing makes.

Best-fit decreasing leaves tiny documents to the end, so a few sequences hold nothing else: at L = 8,192, one sequence
of web text in a hundred holds 6 to 12 times as many documents as the mean. Here chunks are first dealt out, longest
first, each to the sequence with the most space (``dealing``), until about three per sequence are left. Those are tiny,
and fill the gaps by best fit (``gaps``).

Exactly when dealing should end depends on the corpus, in a way that nobody can foresee: a few chunks more or less
decide whether the last gaps can be filled. So a few rules are tried, until a plan is even and has few enough sequences.
All decisions compare integers, so the plan is the same on every machine.
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

DEAL_ALL = Rule(0, 0)
"""The last one tried: right if there is much space anyway, because many chunks are longer than half a sequence."""

EVEN_ENOUGH = 149, 20
"""A plan is even enough if its unevenness is at most 149 / 20 times the mean number of chunks: 99 of 100 sequences hold
at most 1.49 times the mean, and none holds more than 2.48 times."""

MANY, EVEN_ENOUGH_IF_FEWER = 8, 65
"""If the mean is below 8, an unevenness of 65 is even enough: 13 chunks in 99 of 100 sequences, and at most 21."""


class Plan(NamedTuple):
    """What a rule gives."""

    runs: list[Run]
    dealing: Dealing
    unevenness: int

    @property
    def num_sequences(self) -> int:
        """Number of sequences."""
        return count_remainder_sequences(self.runs)

    def is_no_better_than(self, runs: list[Run]) -> bool:
        """Whether it has at least as many sequences, and these are at least as uneven."""
        return self.num_sequences >= count_remainder_sequences(runs) and self.unevenness >= unevenness(runs)


def plan_even_runs(remainders: np.ndarray, seq_length: int, max_documents_per_sequence: int | None = None) -> list[Run]:
    """Pack remainder chunks so that sequences hold about equally many.

    Cost: grows with L, not with the number of documents; 3 to 9 times that of ``plan_runs``. Guarantee: at most
    1 sequence and 0.02 % more than ``plan_runs`` makes, or fewer. If chunks are so long that nothing can be evened out,
    the plan is that of ``plan_runs``.

    Args:
        remainders: int64 [L], number of chunks of each length below L.
        seq_length: L, tokens per sequence.
        max_documents_per_sequence: at most so many chunks per sequence; None for no limit.

    Returns:
        As ``plan_runs``.
    """
    bound = lower_bound_of_remainders(remainders, seq_length, max_documents_per_sequence)
    planner = Planner(remainders, seq_length, max_documents_per_sequence)
    plan = planner.most_even(bound) if bound else None
    if plan is None or not planner.is_even(plan):
        best_fit = plan_runs(remainders, seq_length, max_documents_per_sequence)
        plan = plan or planner.fewest(bound, count_remainder_sequences(best_fit))
        if plan is None or plan.is_no_better_than(best_fit):
            return best_fit
    return with_moves_of(plan.dealing, plan.runs)


def plan(
    remainders: np.ndarray, seq_length: int, max_documents_per_sequence: int | None = None, even: bool = False
) -> list[Run]:
    """The plan of a packing: ``plan_even_runs`` if it is to be even, else ``plan_runs``."""
    planner = plan_even_runs if even else plan_runs
    return planner(remainders, seq_length, max_documents_per_sequence)


class Planner:
    """Tries rules on the chunks of a corpus."""

    def __init__(self, remainders: np.ndarray, seq_length: int, cap: int | None) -> None:
        self._chunks, self._seq_length, self._cap = SortedChunks(remainders), seq_length, cap

    def most_even(self, num_sequences: int) -> Plan | None:
        """The first plan that is even enough, else the most even one; None if all have too many sequences.

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
        """The most even plan with about the fewest sequences, from a lower bound to best fit's number.

        With a limit on documents, best fit makes far more sequences than the bound.
        """
        for num_sequences in sorted({bound + (best_fit - bound) // share for share in (64, 32, 16, 8, 4, 2, 1)}):
            plan = self.most_even(num_sequences) if num_sequences > bound else None
            if plan is not None:
                return plan
        return None

    def is_even(self, plan: Plan) -> bool:
        """Whether a plan is even enough to take it."""
        if self._chunks.number < MANY * plan.num_sequences:
            return plan.unevenness <= EVEN_ENOUGH_IF_FEWER
        numerator, denominator = EVEN_ENOUGH
        return denominator * plan.unevenness * plan.num_sequences <= numerator * self._chunks.number

    def _plans(self, rules: tuple[Rule, ...], num_sequences: int) -> Iterator[Plan]:
        """Plans by the first rule, then one by each rule.

        If filling the gaps opens sequences, these collect the last tiny documents. It is better to deal to so many from
        the beginning. That may open a few again; the last resort is to deal to as many as are allowed.
        """
        most = num_sequences + 1 + num_sequences // TOLERANCE
        tries = [(rules[0], num_sequences), *((rule, most) for rule in rules), (DEAL_ALL, num_sequences)]
        while tries:
            rule, dealt_to = tries.pop(0)
            plan = self._plan(rule, dealt_to, most)
            if plan is None:
                continue
            yield plan
            if dealt_to == num_sequences and num_sequences < plan.num_sequences < most:
                tries.insert(0, (rule, plan.num_sequences))

    def _plan(self, rule: Rule, num_sequences: int, most_sequences: int) -> Plan | None:
        """A plan, or None if the rule leaves no chunks to deal, needs too many sequences or leaves some empty."""
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
        return None if any(run.chunks == 0 for run in runs) else Plan(runs, dealing, unevenness(runs))


def unevenness(runs: list[Run]) -> int:
    """Five times the chunks that 99 of 100 sequences do not exceed, or three times the most chunks, if that is more."""
    numbers = np.array([(run.chunks, run.num_sequences) for run in runs])
    chunks, num_sequences = numbers[numbers[:, 0].argsort()].T
    up_to = np.cumsum(num_sequences)
    percentile = chunks[(100 * up_to).searchsorted(99 * up_to[-1])]
    return max(5 * int(percentile), 3 * int(chunks[-1]))
