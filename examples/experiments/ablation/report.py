"""The ablation's results as Markdown, next to the paper's numbers.

The endpoints were decided before the runs. The primary one is the loss on held-out documents, as the difference of
perplexity between runs with the same seed. The secondary one is the same on *far* tokens, whose evidence lies further
back than a cut would have left it (``HeldOut.far``).
"""

from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any, NamedTuple

import numpy as np

from megatron_bfp.tables import format_table

from ..comparisons import Endpoint, comparison_part, draw_intervals
from ..data_methods import METHODS, Comparison, Methods
from ..intervals import Interval, over_seeds
from .held_out import Groups, HeldOut

WIDTH = 1.5
"""Percent of perplexity: the interval over seeds should be narrower, from its low to its high end."""
PAPER_PERPLEXITY = {"concat": "9.64", "concat_masked": "9.53", "pack": "9.53"}
"""Appendix C.3: 2,048 tokens, text, 13B parameters."""
PAPER_UNDEFINED = {"concat": "5.10, 9.52", "concat_masked": "-", "pack": "2.41, 3.97"}
"""Percent, section "Program Synthesis": 2,048 tokens, code, 7B parameters; HumanEval and MBPP."""


class Result(NamedTuple):
    """The measurements of a model."""

    losses: np.ndarray
    """Of each token of the held-out documents, nats, float64 [tokens]; NaN where there is no target."""
    parses: np.ndarray
    """Completions of which at least one line parses, float64 [prompts]."""
    undefined: np.ndarray
    """Those of them with an undefined name, float64 [prompts]."""
    completions: int
    """Number of completions, over all prompts."""

    @classmethod
    def of(cls, losses: np.ndarray, content: Mapping[str, Sequence[Any]]) -> "Result":
        """From the losses of tokens, and the analysis of completions in a run's ``result.json``."""
        parses = [sum(flags) for flags in content["parses"]]
        undefined = [sum(map(bool, names)) for names in content["undefined"]]
        completions = sum(map(len, content["parses"]))
        return cls(losses, np.array(parses, float), np.array(undefined, float), completions)


def mean_loss(held_out: HeldOut, tokens: np.ndarray) -> Callable[[Result, np.ndarray], np.ndarray]:
    """A statistic: the mean loss over some of the tokens, nats, float64 [samples].

    Args:
        tokens: which ones, bool [tokens]. Those that are no target are left out.
    """

    def statistic(result: Result, counts: np.ndarray) -> np.ndarray:
        sums, targets = held_out.sums(np.where(tokens, result.losses, np.nan))
        counted = counts @ targets
        return (counts @ sums) / np.where(counted, counted, np.nan)  # a sample may have no document with such tokens

    return statistic


def undefined_share(result: Result, counts: np.ndarray) -> np.ndarray:
    """Percent of the completions that parse, float64 [samples]; NaN if none does."""
    parsing = counts @ result.parses
    return 100 * (counts @ result.undefined) / np.where(parsing, parsing, np.nan)


def as_percent(difference: float) -> float:
    """A difference of losses, as percent of the perplexity."""
    return 100 * float(np.expm1(difference))


def loss_endpoint(name: str, held_out: HeldOut, tokens: np.ndarray) -> Endpoint:
    """The mean loss over some tokens, compared as percent of the perplexity."""
    return Endpoint(name, mean_loss(held_out, tokens), held_out.num_documents, WIDTH, "%", as_percent)


def report(
    results: Mapping[str, Sequence[Result]],
    reference: Result,
    held_out: HeldOut,
    methods: Methods = METHODS,
    comparisons: Sequence[Comparison] = (),
) -> str:
    """All tables, each with verdicts.

    Args:
        results: for each method, its runs in the order of their seeds.
        reference: completions of the held-out files themselves; it has no losses.
    """
    parts = [
        perplexity_part("perplexity", held_out.targets, results, held_out, methods, comparisons),
        perplexity_part("perplexity of far tokens", held_out.far, results, held_out, methods, comparisons),
        *(groups_part(groups, results, held_out, methods, comparisons) for groups in held_out.groups()),
        undefined_part(results, reference, methods, comparisons),
    ]
    return "\n\n".join(parts)


def perplexity_part(
    name: str,
    tokens: np.ndarray,
    results: Mapping[str, Sequence[Result]],
    held_out: HeldOut,
    methods: Methods,
    comparisons: Sequence[Comparison],
) -> str:
    """Levels and differences of the perplexity of some tokens."""
    endpoint = loss_endpoint(name, held_out, tokens)
    rows = []
    for method, (title, _) in methods.items():
        rows.append([title, perplexity(endpoint, results[method]).text(2), PAPER_PERPLEXITY.get(method, "-")])
    table = format_table(["", name, "paper, all tokens"], rows, markdown=True, width=None)
    seeds = len(next(iter(results.values())))
    counted = f"{held_out.num_documents:,} held-out documents, {int(tokens.sum()):,} targets, {seeds} seeds; "
    counted += "95 % intervals."
    return "\n\n".join([table, counted, comparison_part(endpoint, results, methods, comparisons)])


def groups_part(
    groups: Groups,
    results: Mapping[str, Sequence[Result]],
    held_out: HeldOut,
    methods: Methods,
    comparisons: Sequence[Comparison],
) -> str:
    """Perplexity in each group of the tokens and its differences, over seeds."""
    levels, differences = [], []
    for label, tokens in groups.tokens.items():
        endpoint = loss_endpoint(label, held_out, tokens)
        perplexities = [perplexity(endpoint, results[method]) for method in methods]
        between = [over_seeds(endpoint.differences(results[ours], results[theirs])) for ours, theirs in comparisons]
        levels.append([label, f"{int(tokens.sum()):,}", *(interval.text(2) for interval in perplexities)])
        differences.append([label, *(interval.text(2) for interval in between)])
    titles = [f"{methods[ours].title} minus {methods[theirs].title}, %" for ours, theirs in comparisons]
    headers = [groups.title, "targets", *(method.title for method in methods.values())], [groups.title, *titles]
    tables = zip(headers, (levels, differences), strict=True)
    return "\n\n".join(format_table(header, rows, markdown=True, width=None) for header, rows in tables)


def perplexity(endpoint: Endpoint, results: Sequence[Result]) -> Interval:
    """The perplexity of some tokens, over seeds."""
    return over_seeds([float(np.exp(endpoint.of(result))) for result in results])


def draw(
    path: str,
    results: Mapping[str, Sequence[Result]],
    held_out: HeldOut,
    methods: Methods,
    comparisons: Sequence[Comparison],
) -> None:
    """Draw perplexity by group and its differences, with their intervals over seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 8), layout="constrained")
    rows = figure.subplots(2, 3, sharex="col", sharey="row")
    for (above, below), groups in zip(rows.T, held_out.groups(), strict=True):
        endpoints = [loss_endpoint(label, held_out, tokens) for label, tokens in groups.tokens.items()]
        x = np.arange(len(endpoints))
        for number, (method, (title, _)) in enumerate(methods.items()):
            levels = [perplexity(endpoint, results[method]) for endpoint in endpoints]
            draw_intervals(above, x + _shift(number, methods), levels, f"C{number}", title)
        for number, (ours, theirs) in enumerate(comparisons):
            between = [over_seeds(endpoint.differences(results[ours], results[theirs])) for endpoint in endpoints]
            label = f"{methods[ours].title} minus {methods[theirs].title}"
            draw_intervals(below, x + _shift(number, comparisons), between, f"C{number}", label)
        above.set_yscale("log")
        above.yaxis.set_major_formatter("{x:g}")
        above.yaxis.set_minor_formatter("{x:g}")
        below.axhline(0, color="0.6", linewidth=0.8)
        below.set_xticks(x, list(groups.tokens))
        for axes in (above, below):
            axes.grid(color="0.92", axis="y")
        below.tick_params("x", rotation=35)
        below.set_xlabel(groups.title)
    shown = ("perplexity", "upper", 4), ("difference of perplexity (%)", "lower", 2)
    for axes, (label, side, columns) in zip(rows[:, 0], shown, strict=True):
        axes.set_ylabel(label)
        figure.legend(*axes.get_legend_handles_labels(), loc=f"outside {side} center", ncols=columns)
    figure.savefig(path, dpi=130)


def _shift(number: int, shown: Sized) -> float:
    """Where the bar of one of them is beside the others."""
    return 0.6 / len(shown) * (number - (len(shown) - 1) / 2)


def undefined_part(
    results: Mapping[str, Sequence[Result]], reference: Result, methods: Methods, comparisons: Sequence[Comparison]
) -> str:
    """The share of completions with undefined names."""
    prompts = len(reference.parses)
    endpoint = Endpoint("the share of undefined names", undefined_share, prompts, 2.0, "points")
    rows = []
    for method, (name, _) in methods.items():
        parsing = np.mean([_parsing_share(result) for result in results[method]])
        shares = over_seeds([endpoint.of(result) for result in results[method]])
        rows.append([name, f"{parsing:.1f}", shares.text(1), PAPER_UNDEFINED.get(method, "-")])
    rows.append(["the held-out files", f"{_parsing_share(reference):.1f}", f"{endpoint.of(reference):.1f}", "-"])
    header = ["", "parse, %", "of these with undefined names, %", "paper, %"]
    table = format_table(header, rows, markdown=True, width=None)
    completions = next(iter(results.values()))[0].completions
    counted = f"{prompts:,} prompts, {completions:,} completions per seed; 95 % intervals."
    return "\n\n".join([table, counted, comparison_part(endpoint, results, methods, comparisons)])


def _parsing_share(result: Result) -> float:
    """Percent of all completions."""
    return 100 * float(result.parses.sum()) / result.completions
