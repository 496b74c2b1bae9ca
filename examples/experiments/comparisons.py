"""Differences between methods, in pairs of runs with the same seed: their table, verdicts and curves."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from megatron_bfp.tables import format_table

from .data_methods import Comparison, Methods
from .intervals import MOST_SEEDS, Interval, over_items, over_seeds, seeds_needed, verdict

Statistic = Callable[[Any, np.ndarray], np.ndarray]
"""From a run's result, and how often each item is in a sample (int64 [samples, items]), float64 [samples]."""


class Endpoint(NamedTuple):
    """What an experiment compares. It is decided before the runs."""

    name: str
    statistic: Statistic
    items: int
    """Documents or prompts that it is measured on."""
    width: float
    """Of the interval over seeds that the experiment aims at, in the unit of the differences."""
    unit: str
    shown: Callable[[float], float] = float
    """From a difference of the statistic to what is shown, in ``unit``."""

    def of(self, result: Any) -> float:
        """The statistic of a run, each item once."""
        return float(self.statistic(result, np.ones((1, self.items)))[0])

    def differences(self, results: Sequence[Any], baseline: Sequence[Any]) -> list[float]:
        """How far each run is above the baseline's with the same seed."""
        return [self.shown(self.of(ours) - self.of(theirs)) for ours, theirs in zip(results, baseline, strict=True)]

    def over_items(self, results: Sequence[Any], baseline: Sequence[Any], value: float) -> Interval:
        """The interval of the mean difference over documents or prompts, for these runs."""

        def resampled(counts: np.ndarray) -> np.ndarray:
            pairs = zip(results, baseline, strict=True)
            return np.mean([self.statistic(ours, counts) - self.statistic(theirs, counts) for ours, theirs in pairs], 0)

        low, high = over_items(resampled, self.items, value)[1:]
        return Interval(value, self.shown(low), self.shown(high))


def comparison_part(
    endpoint: Endpoint, results: Mapping[str, Sequence[Any]], methods: Methods, comparisons: Sequence[Comparison]
) -> str:
    """A row and a verdict for each comparison. The last columns are for planning: how much the differences spread, and
    how many seeds make the interval as narrow as the endpoint asks for."""
    rows, said = [], []
    for method, baseline in comparisons:
        names = methods[method].title, methods[baseline].title
        differences = endpoint.differences(results[method], results[baseline])
        seeds = over_seeds(differences)
        items = endpoint.over_items(results[method], results[baseline], seeds.mean)
        needed = seeds_needed(differences, endpoint.width)
        spread = f"{np.std(differences, ddof=1):.2f}"
        rows.append([" minus ".join(names), seeds.text(2), items.text(2), spread, str(needed or f"above {MOST_SEEDS}")])
        said.append(verdict(*names, endpoint.name, (seeds, items)))
    header = [f"difference of {endpoint.name}, {endpoint.unit}", "over seeds", "over documents"]
    header += ["standard deviation", f"seeds for a width of {endpoint.width:g}"]
    return f"{format_table(header, rows, markdown=True, width=None)}\n\n{' '.join(said)}"


def draw_intervals(
    axes: Any, x: Sequence[float] | np.ndarray, intervals: Sequence[Interval], color: str, label: str, fmt: str = "o"
) -> None:
    """Draw means as points, with bars for their 95 % intervals."""
    means = np.array([interval.mean for interval in intervals])
    errors = np.abs(np.array([[interval.low, interval.high] for interval in intervals]).T - means)
    axes.errorbar(x, means, errors, fmt=fmt, color=color, capsize=3, markersize=4, label=label)


def draw_curves(axes: Any, x: Sequence[float], of_runs: Sequence[Sequence[float]], color: str, label: str) -> None:
    """Draw the mean of the runs, its 95 % interval as a band, and a thin line per run."""
    intervals = [over_seeds(values) for values in zip(*of_runs, strict=True)]
    for run in of_runs:
        axes.plot(x, run, color=color, linewidth=0.5, alpha=0.4)
    axes.plot(x, [interval.mean for interval in intervals], color=color, linewidth=1.8, label=label)
    low, high = ([interval[end] for interval in intervals] for end in (1, 2))
    axes.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0)
