"""Confidence intervals of 95 %: over a few training runs, and over many documents or prompts."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from megatron_bfp.errors import OptionError

STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
STUDENT_T += (2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093)
"""97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom."""
MOST_SEEDS = len(STUDENT_T) + 1
RESAMPLES = 2000


class Interval(NamedTuple):
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float

    def contains(self, value: float) -> bool:
        """Whether a value is inside: the mean does not differ from it significantly."""
        return self.low <= value <= self.high

    def text(self, digits: int) -> str:
        """For a table."""
        return f"{self.mean:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


def checked_seeds(seeds: int) -> int:
    """``--seeds``.

    Raises:
        OptionError: there are no intervals for this number of seeds.
    """
    if not 2 <= seeds <= MOST_SEEDS:
        raise OptionError(f"--seeds {seeds}: an interval needs 2 to {MOST_SEEDS}")
    return seeds


def over_seeds(values: Sequence[float]) -> Interval:
    """The mean of a few runs and its t interval. To compare methods, give differences of runs with the same seed."""
    mean = float(np.mean(values))
    half = STUDENT_T[len(values) - 2] * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def seeds_needed(values: Sequence[float], width: float) -> int | None:
    """How many seeds make the t interval of a mean narrower than ``width``, from high end to low end, if they spread
    like these. None: more than ``MOST_SEEDS``."""
    spread = float(np.std(values, ddof=1))
    widths = {seeds: 2 * STUDENT_T[seeds - 2] * spread / math.sqrt(seeds) for seeds in range(2, MOST_SEEDS + 1)}
    return next((seeds for seeds, reached in widths.items() if reached < width), None)


def over_items(statistic: Callable[[np.ndarray], np.ndarray], items: int, value: float) -> Interval:
    """A bootstrap interval over the documents or prompts of the measurement; the models stay the same.

    Args:
        statistic: of resampled items, given how often each is in a sample, int64 [resamples, items]; returns
            float64 [resamples].
        items: their number.
        value: the statistic of the items themselves.
    """
    generator = np.random.default_rng(0)
    blocks = [generator.multinomial(items, np.full(items, 1 / items), 100) for _ in range(RESAMPLES // 100)]
    low, high = np.nanpercentile(np.concatenate([statistic(block) for block in blocks]), [2.5, 97.5])
    return Interval(value, float(low), float(high))


def verdict(name: str, baseline: str, what: str, intervals: Sequence[Interval]) -> str:
    """One sentence. A difference counts if none of its intervals contains 0."""
    if any(not np.isfinite(interval).all() or interval.contains(0.0) for interval in intervals):
        return f"Between {name} and {baseline}, no difference in {what} shows at this size."
    return f"With {name}, {what} is {'lower' if intervals[0].mean < 0 else 'higher'} than with {baseline}."
