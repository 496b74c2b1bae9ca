"""The ablation's results as Markdown, next to the paper's numbers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from megatron_bfp.tables import format_table

from .data_methods import BASELINE, METHODS
from .intervals import Interval, over_items, over_seeds, verdict

PAPER_PERPLEXITY = {"concat": "9.64", "concat_masked": "9.53", "pack": "9.53"}
"""Appendix C.3: 2,048 tokens, text, 13B parameters."""
PAPER_UNDEFINED = {"concat": "5.10, 9.52", "concat_masked": "-", "pack": "2.41, 3.97"}
"""Percent, section "Program Synthesis": 2,048 tokens, code, 7B parameters; HumanEval and MBPP."""


class Result(NamedTuple):
    """The measurements of a model."""

    losses: np.ndarray
    """Sum over the targets of each held-out document, nats, float64 [documents]."""
    targets: np.ndarray
    """float64 [documents]."""
    parses: np.ndarray
    """Completions of which at least one line parses, float64 [prompts]."""
    undefined: np.ndarray
    """Those of them with an undefined name, float64 [prompts]."""
    completions: int
    """Number of completions, over all prompts."""

    @classmethod
    def of(cls, content: Mapping[str, Sequence[Any]]) -> "Result":
        """The result in a run's ``result.json``."""
        parses = [sum(flags) for flags in content["parses"]]
        undefined = [sum(map(bool, names)) for names in content["undefined"]]
        arrays = (np.array(row, float) for row in (content["losses"], content["targets"], parses, undefined))
        return cls(*arrays, sum(map(len, content["parses"])))


def mean_loss(result: Result, counts: np.ndarray) -> np.ndarray:
    """Over all targets, nats, float64 [samples].

    Args:
        counts: how often each document is in a sample, int64 [samples, documents].
    """
    return (counts @ result.losses) / (counts @ result.targets)


def undefined_share(result: Result, counts: np.ndarray) -> np.ndarray:
    """Percent of the completions that parse, float64 [samples]; NaN if none does."""
    parsing = counts @ result.parses
    return 100 * (counts @ result.undefined) / np.where(parsing, parsing, np.nan)


Statistic = Callable[[Result, np.ndarray], np.ndarray]


def of_all(statistic: Statistic, result: Result, items: int) -> float:
    """A statistic over all documents or prompts, each once."""
    return float(statistic(result, np.ones((1, items)))[0])


def difference(
    statistic: Statistic, results: Sequence[Result], baseline: Sequence[Result], items: int
) -> tuple[Interval, Interval]:
    """How far a method's statistic is above the baseline's: intervals over the seeds, and over documents or prompts."""
    pairs = list(zip(results, baseline, strict=True))
    seeds = over_seeds([of_all(statistic, ours, items) - of_all(statistic, theirs, items) for ours, theirs in pairs])

    def resampled(counts: np.ndarray) -> np.ndarray:
        return np.mean([statistic(ours, counts) - statistic(theirs, counts) for ours, theirs in pairs], axis=0)

    return seeds, over_items(resampled, items, seeds.mean)


def report(results: Mapping[str, Sequence[Result]], reference: Result) -> str:
    """Both tables, each with a verdict.

    Args:
        results: for each of ``METHODS``, its runs in the order of their seeds.
        reference: of the held-out files themselves.
    """
    return "\n\n".join([perplexity_part(results), undefined_part(results, reference)])


def perplexity_part(results: Mapping[str, Sequence[Result]]) -> str:
    """The table of perplexities."""
    first = results[BASELINE][0]
    rows, said = [], []
    for method, (name, _) in METHODS.items():
        losses = [of_all(mean_loss, result, len(first.losses)) for result in results[method]]
        mean = over_seeds(np.exp(losses).tolist())
        row = [name, mean.text(2), "-", "-", PAPER_PERPLEXITY[method]]
        if method != BASELINE:
            intervals = difference(mean_loss, results[method], results[BASELINE], len(first.losses))
            row[2:4] = [_as_percent(interval).text(2) for interval in intervals]
            said.append(verdict(name, METHODS[BASELINE].title, "perplexity", intervals))
        rows.append(row)
    masked_alone = difference(mean_loss, results["pack"], results["concat_masked"], len(first.losses))
    said.append(verdict(METHODS["pack"].title, METHODS["concat_masked"].title, "perplexity", masked_alone))
    header = ["", "perplexity", "difference, %, over seeds", "difference, %, over documents", "paper"]
    table = format_table(header, rows, markdown=True, width=None)
    counted = f"{len(first.losses):,} held-out documents, {int(first.targets.sum()):,} targets, "
    return f"{table}\n\n{counted}{len(results[BASELINE])} seeds; 95 % intervals. {' '.join(said)}"


def _as_percent(interval: Interval) -> Interval:
    """A difference of losses, as percent of the perplexity."""
    return Interval(*(100 * float(np.expm1(value)) for value in interval))


def undefined_part(results: Mapping[str, Sequence[Result]], reference: Result) -> str:
    """The table of undefined names."""
    prompts = len(reference.parses)
    rows, said = [], []
    for method, (name, _) in METHODS.items():
        parsing = np.mean([_parsing_share(result) for result in results[method]])
        shares = [of_all(undefined_share, result, prompts) for result in results[method]]
        row = [name, f"{parsing:.1f}", over_seeds(shares).text(1), "-", "-", PAPER_UNDEFINED[method]]
        if method != BASELINE:
            intervals = difference(undefined_share, results[method], results[BASELINE], prompts)
            row[3:5] = [interval.text(1) for interval in intervals]
            said.append(verdict(name, METHODS[BASELINE].title, "the share of undefined names", intervals))
        rows.append(row)
    share = of_all(undefined_share, reference, prompts)
    rows.append(["the held-out files", f"{_parsing_share(reference):.1f}", f"{share:.1f}", "-", "-", "-"])
    header = ["", "parse, %", "of these with undefined names, %", "difference, points, over seeds"]
    table = format_table([*header, "difference, points, over prompts", "paper, %"], rows, markdown=True, width=None)
    completions = results[BASELINE][0].completions
    counted = f"{prompts:,} prompts, {completions:,} completions per seed; 95 % intervals."
    return f"{table}\n\n{counted} {' '.join(said)}"


def _parsing_share(result: Result) -> float:
    """Percent of all completions."""
    return 100 * float(result.parses.sum()) / result.completions
