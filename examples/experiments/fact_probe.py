"""Do models remember fewer facts if training cut the documents that state them? The paper's closed-book questions, with
facts whose number of occurrences is known.

    python examples/fact_probe.py --output facts --jobs 2

Each document has a subject as its first word, and states its value once, in its second half:

    s17 w3 w0 w2 w1 w1 fact v9 w2 <eod>

A subject's value is always the same. It has 4, 8, 16, 32 or 64 documents, either all short or all long: near the
sequence length. If a cut comes between subject and value, the document teaches nothing. Concatenation does this to most
long documents and to few short ones, packing to none. After one epoch, models are asked for the values without the
documents: by the subject, a few new words, and ``fact``.

The endpoint, decided before the runs: the share of facts of long documents that are answered right at the end of the
training, over all numbers of occurrences, and its difference between methods with the same seed. The shares for each
number of occurrences, and those of short documents, are reported beside it.
"""

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from megatron_bfp.arguments import checked_count
from megatron_bfp.commands.shared import Parser
from megatron_bfp.console import run
from megatron_bfp.files import write_whole
from megatron_bfp.tables import format_table

from .comparisons import Endpoint, comparison_part, draw_intervals
from .data_methods import (
    METHODS,
    Comparison,
    Methods,
    add_run_options,
    by_method,
    check_run_options,
    check_settings,
    chosen_methods,
    method_runs,
    seeds_of,
)
from .intervals import over_seeds
from .synthetic_data import EOD, write_documents, write_tokenizer
from .training_runs import TrainingRun, say, train_all

SEQ_LENGTH = 32
BATCH = 2
OCCURRENCES = (4, 8, 16, 32, 64)
"""Documents that state a fact."""
KINDS = ("short", "long")
VALUES, WORDS = 16, 4
LONG = (3 * SEQ_LENGTH // 4, SEQ_LENGTH - 4)
"""Shortest and longest of the long documents, tokens; the short ones fill their sequences."""
QUESTION_WORDS = 8
"""Words between the subject and ``fact`` in a question."""
QUESTIONS = 8
"""About each fact, with different words."""


class Facts(NamedTuple):
    """Subjects and what is stated of them. A subject's token is its position here."""

    values: np.ndarray
    """Of each subject, int64 [facts], from 0 on."""
    occurrences: np.ndarray
    """Documents of each subject, int64 [facts]."""
    is_long: np.ndarray
    """Whether they are long, bool [facts]."""

    @property
    def fact_token(self) -> int:
        """The token before a value."""
        return len(self.values)

    @property
    def first_word(self) -> int:
        """The first of the meaningless words' tokens."""
        return self.fact_token + 1 + VALUES

    @property
    def vocabulary(self) -> list[str]:
        """All words, in the order of their tokens; EOD comes after them."""
        subjects = [f"s{subject}" for subject in range(len(self.values))]
        return [*subjects, "fact", *(f"v{value}" for value in range(VALUES)), *(f"w{word}" for word in range(WORDS))]


def make_facts(subjects: int, seed: int) -> Facts:
    """Facts with random values.

    Args:
        subjects: for each number of occurrences and each kind of documents.
    """
    occurrences = np.tile(np.repeat(OCCURRENCES, subjects), len(KINDS))
    is_long = np.repeat([False, True], len(OCCURRENCES) * subjects)
    return Facts(np.random.default_rng(seed).integers(0, VALUES, len(occurrences)), occurrences, is_long)


def make_documents(facts: Facts, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The documents of all facts, in random order. There are as many short ones as long ones, and each fills the
    sequence of a long one.

    Returns:
        Tokens of all documents, one after another; lengths, int64 [documents]; where the value is in each document,
        int64 [documents].
    """
    generator = np.random.default_rng(seed)
    subjects = np.repeat(np.arange(len(facts.values)), facts.occurrences)
    is_long = facts.is_long[subjects]
    long_lengths = generator.integers(LONG[0], LONG[1] + 1, int(is_long.sum()))
    lengths = np.empty(len(subjects), dtype=np.int64)
    lengths[is_long], lengths[~is_long] = long_lengths, SEQ_LENGTH - long_lengths
    order = generator.permutation(len(subjects))
    subjects, lengths = subjects[order], lengths[order]
    stated = generator.integers(np.maximum(2, lengths // 2), lengths - 1)  # the last token is EOD
    starts = np.cumsum(lengths) - lengths
    tokens = generator.integers(facts.first_word, facts.first_word + WORDS, int(lengths.sum()))
    tokens[starts] = subjects
    tokens[starts + stated - 1] = facts.fact_token
    tokens[starts + stated] = facts.fact_token + 1 + facts.values[subjects]
    tokens[starts + lengths - 1] = len(facts.vocabulary)
    return tokens, lengths, stated


def share_lost(lengths: np.ndarray, stated: np.ndarray, is_long: bool) -> float:
    """The share of the long or of the short documents that are cut between subject and value if they are concatenated
    in this order. A value is still a target where the sequence ends before it."""
    starts = np.cumsum(lengths) - lengths
    of_kind = (lengths >= LONG[0]) == is_long
    lost = starts // SEQ_LENGTH != (starts + stated - 1) // SEQ_LENGTH
    return float(lost[of_kind].mean())


def questions(facts: Facts, seed: int) -> np.ndarray:
    """Questions about all facts, int64 [QUESTIONS, facts, tokens]: the next token should be the value."""
    generator = np.random.default_rng(seed)
    shape = QUESTIONS, len(facts.values), 2 + QUESTION_WORDS
    tokens = generator.integers(facts.first_word, facts.first_word + WORDS, shape)
    tokens[..., 0] = np.arange(len(facts.values))
    tokens[..., -1] = facts.fact_token
    return tokens


def fact_runs(folder: str, facts: Facts, seeds: Sequence[int], methods: Methods = METHODS) -> list[TrainingRun]:
    """The runs, ordered by seed and then by method. Writes their data.

    Raises:
        OptionError: the folder has runs with other settings.
    """
    os.makedirs(folder, exist_ok=True)
    prefix, tokenizer = os.path.join(folder, "data"), os.path.join(folder, "tokenizer.json")
    if not os.path.exists(tokenizer):
        tokens, lengths, stated = make_documents(facts, seed=2)
        write_documents(prefix, tokens, lengths)
        lost = [f"{100 * share_lost(lengths, stated, kind == 'long'):.0f} % of the {kind} documents" for kind in KINDS]
        say(f"concatenation parts subject and value in {' and '.join(lost)}")
        write_tokenizer(tokenizer, facts.vocabulary)
    steps = (int(facts.occurrences[facts.is_long].sum()) - 1) // BATCH  # concatenation needs one token more
    options = {"num-layers": 2, "hidden-size": 64, "ffn-hidden-size": 192, "num-attention-heads": 4}
    options |= {"seq-length": SEQ_LENGTH, "micro-batch-size": BATCH, "train-iters": steps, "num-workers": 0}
    options |= {"init-method-std": 0.1, "lr": 2e-3, "min-lr": 2e-4, "lr-warmup-iters": steps // 20, "log-interval": 20}
    check_settings(folder, (options, VALUES, WORDS, LONG, QUESTION_WORDS, QUESTIONS, OCCURRENCES))
    options |= {"data-path": prefix, "split": 1, "tokenizer-model": tokenizer, "eod-token": EOD}
    return method_runs(folder, methods, seeds, options)


class Result(NamedTuple):
    """The answers of a model."""

    right: np.ndarray
    """Percent of a fact's questions whose likeliest answer is the value, float64 [facts]."""
    probability: np.ndarray
    """Mean probability of the value, percent, float64 [facts]."""


def measure(training: TrainingRun, facts: Facts) -> Result:
    """Ask a trained model, or read its answers if it was asked before."""
    path = os.path.join(training.folder, "result.json")
    if not os.path.exists(path):
        is_right, probability = answers(training, facts)
        content = {"right": (100 * is_right.mean(0)).tolist(), "probability": (100 * probability.mean(0)).tolist()}
        write_whole(path, json.dumps(content).encode())
    with open(path, encoding="utf-8") as file:
        content = json.load(file)
    return Result(np.array(content["right"]), np.array(content["probability"]))


def answers(training: TrainingRun, facts: Facts) -> tuple[np.ndarray, np.ndarray]:
    """What a trained model answers.

    Returns:
        Whether the value is the likeliest token, bool [QUESTIONS, facts]; its probability, float64 of the same shape.
    """
    import torch

    from .trained_model import load_model

    trained = load_model(training.trainer_options(), training.checkpoint())
    values = facts.fact_token + 1 + facts.values
    is_right, probability = [], []
    for asked in questions(facts, seed=3):
        logits = trained.logits(torch.from_numpy(asked), [asked.shape[1]] * len(asked))[:, -1]
        predicted = logits.double().softmax(-1).cpu().numpy()
        is_right.append(predicted.argmax(-1) == values)
        probability.append(predicted[np.arange(len(values)), values])
    return np.stack(is_right), np.stack(probability)


def endpoint_of(name: str, of_facts: np.ndarray) -> Endpoint:
    """The share answered right of some facts.

    Args:
        of_facts: which ones, bool [facts].
    """

    def share(result: Result, counts: np.ndarray) -> np.ndarray:
        return counts @ result.right[of_facts] / counts.sum(axis=1)

    return Endpoint(name, share, int(of_facts.sum()), width=10.0, unit="points")


def report(
    results: Mapping[str, Sequence[Result]], facts: Facts, methods: Methods, comparisons: Sequence[Comparison]
) -> str:
    """The endpoint, the same for short documents, and the shares by the number of occurrences."""
    parts = [
        comparison_part(endpoint_of("the share right of long documents", facts.is_long), results, methods, comparisons),
        comparison_part(
            endpoint_of("the share right of short documents", ~facts.is_long), results, methods, comparisons
        ),
    ]
    for kind in KINDS:
        rows = []
        for method, (title, _) in methods.items():
            endpoints = [endpoint_of("", _group(facts, kind, number)) for number in OCCURRENCES]
            endpoints.append(endpoint_of("", facts.is_long == (kind == "long")))
            intervals = [over_seeds([endpoint.of(result) for result in results[method]]) for endpoint in endpoints]
            rows.append([title, *(interval.text(1) for interval in intervals)])
        header = [f"facts of {kind} documents, right, %", *(f"{number} documents" for number in OCCURRENCES), "all"]
        parts.append(format_table(header, rows, markdown=True, width=None))
    seeds = len(next(iter(results.values())))
    parts.append(f"{len(facts.values):,} facts, {QUESTIONS} questions each; chance is {100 / VALUES:.1f} %. ")
    parts[-1] += f"{seeds} seeds; 95 % intervals."
    return "\n\n".join(parts)


def _group(facts: Facts, kind: str, occurrences: int) -> np.ndarray:
    return (facts.is_long == (kind == "long")) & (facts.occurrences == occurrences)


def draw(path: str, results: Mapping[str, Sequence[Result]], facts: Facts, methods: Methods) -> None:
    """Draw the share of facts answered right by the number of occurrences, with intervals over seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    for axes, kind in zip(figure.subplots(1, 2, sharey=True), KINDS):
        for number, (method, (title, _)) in enumerate(methods.items()):
            endpoints = [endpoint_of("", _group(facts, kind, count)) for count in OCCURRENCES]
            shown = [over_seeds([endpoint.of(result) for result in results[method]]) for endpoint in endpoints]
            x = np.array(OCCURRENCES) * 1.04 ** (number - (len(methods) - 1) / 2)
            draw_intervals(axes, x, shown, f"C{number}", title, "o-")
        axes.axhline(100 / VALUES, color="0.6", linestyle=":", label="chance")
        axes.set_xscale("log", base=2)
        axes.set_xticks(OCCURRENCES, [str(count) for count in OCCURRENCES])
        axes.set_ylim(0, 102)
        axes.set_xlabel("documents with the fact")
        axes.set_title(f"facts of {kind} documents, right (%)")
        axes.grid(color="0.92")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Train, ask, report, draw.

    Raises:
        BFPError: bad options, or a trainer failed.
    """
    options = _parse()
    facts = make_facts(options.subjects, seed=1)
    methods, comparisons = chosen_methods(options.packing_options)
    runs = fact_runs(os.path.join(options.output, f"subjects{options.subjects}"), facts, seeds_of(options), methods)
    for training in train_all(runs, options.jobs, lambda training: measure(training, facts)):
        say(
            f"{training.name}: {measure(training, facts).right[facts.is_long].mean():.1f} % of the long facts are right"
        )
    results = by_method(methods, [measure(training, facts) for training in runs])
    text = report(results, facts, methods, comparisons)
    figure = os.path.join(options.output, "fact_probe.png")
    draw(figure, results, facts, methods)
    write_whole(os.path.join(options.output, "fact_probe.md"), (text + "\n").encode())
    print(text, f"Figure: {figure}", sep="\n\n", flush=True)


def _parse() -> argparse.Namespace:
    parser = Parser(prog="fact_probe", description="Do models remember facts, with and without cut documents?")
    parser.add_argument(
        "--output", required=True, metavar="FOLDER", help="for data, models, table and figure (required)"
    )
    parser.add_argument(
        "--subjects",
        type=int,
        default=32,
        metavar="N",
        help="facts for each number of occurrences and kind of documents (default: %(default)s)",
    )
    add_run_options(parser, seeds=8)
    options = parser.parse_args()
    checked_count("--subjects", options.subjects)
    check_run_options(options)
    return options


def console() -> int:
    """Run the command; returns its exit status."""
    return run(main, "fact_probe")
