"""Do models follow their context if documents were cut in training? A probe of the mechanism that the paper describes.

    python examples/context_probe.py --output probe --jobs 2

Each document defines values of some names at its beginning, and uses each name once later, between meaningless words:

    n7=v3 n2=v5 n5=v0 n1=v3 w1 w3 n2 n2=v5 w0 w0 w2 n7 n7=v3 ...

Names have other values in every document, so what follows a name can only be known from its definition. A document has
0.5 to 0.9 of the sequence length, and comes with a shorter one of words only, which fills the sequence. Concatenation
cuts most documents, and uses lose their definitions; packing cuts none. Small transformers are trained for one epoch on
either, and must predict the values in whole documents that they have not seen.

The endpoint, decided before the runs: the share of values predicted right, as the mean over the 20 checkpoints of the
training (the area under its curve), and its difference between methods with the same seed. Steps until 80 % are right
are reported beside it. The area was chosen because every run has one. A run that never reaches 80 % has no number of
steps, only a lower bound, and a mean with such bounds flatters the method that learns last. The area also needs no end
of the training that is late enough for all methods, yet early enough to show a difference.
"""

import argparse
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from megatron_bfp.arguments import checked_count
from megatron_bfp.commands.shared import Parser
from megatron_bfp.console import run
from megatron_bfp.files import write_whole
from megatron_bfp.progress import terminal_progress
from megatron_bfp.tables import format_table

from .comparisons import Endpoint, comparison_part, draw_curves
from .data_methods import (
    BASELINE,
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

SEQ_LENGTH = 128
BATCH = 32
PAIRS = 8
"""Names per document, each defined and used once."""
NAMES, VALUES, WORDS = 16, 8, 4
VOCABULARY = [f"n{name}" for name in range(NAMES)]
VOCABULARY += [f"n{name}=v{value}" for name in range(NAMES) for value in range(VALUES)]
FIRST_WORD = len(VOCABULARY)
VOCABULARY += [f"w{word}" for word in range(WORDS)]
EOD_ID = len(VOCABULARY)
HELD_OUT = 256
"""Documents that models are measured on."""
ROWS = 64
"""Documents per forward pass of the measurement."""
POINTS = 20
"""Checkpoints at which models are measured, evenly spaced."""
LEARNED = 80.0
"""Percent of the values right, with which a model has learned the task."""


class Documents(NamedTuple):
    """Documents with definitions and uses."""

    tokens: np.ndarray
    """int64 [documents, L]: a document with its EOD, then its short document: words and another EOD."""
    lengths: np.ndarray
    """Of the documents, int64 [documents]."""
    definitions: np.ndarray
    """Where each name is defined, int64 [documents, PAIRS]."""
    uses: np.ndarray
    """Where each name is used, int64 [documents, PAIRS] in the same order; its value follows it."""


def make_documents(count: int, seed: int) -> Documents:
    """Documents of 0.5 to 0.9 L tokens, uniformly distributed."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(FIRST_WORD, EOD_ID, (count, SEQ_LENGTH))
    lengths = generator.integers(SEQ_LENGTH // 2, SEQ_LENGTH * 9 // 10 + 1, count)
    rows = np.arange(count)
    names = generator.random((count, NAMES)).argsort(axis=1)[:, :PAIRS]
    defined = NAMES + VALUES * names + generator.integers(0, VALUES, (count, PAIRS))
    definitions = np.broadcast_to(np.arange(PAIRS), (count, PAIRS))
    # a use takes two positions; without the second ones, uses are PAIRS different positions of the body
    bodies = lengths - 1 - 2 * PAIRS
    keys = np.where(np.arange(SEQ_LENGTH) < bodies[:, None], generator.random((count, SEQ_LENGTH)), 2.0)
    in_order = np.sort(keys.argsort(axis=1)[:, :PAIRS], axis=1) + np.arange(PAIRS) + PAIRS
    uses = generator.permuted(in_order, axis=1)
    tokens[rows[:, None], definitions] = tokens[rows[:, None], uses + 1] = defined
    tokens[rows[:, None], uses] = names
    tokens[rows, lengths - 1] = tokens[:, -1] = EOD_ID
    return Documents(tokens, lengths, definitions, uses)


def share_cut(documents: Documents, seed: int) -> float:
    """The share of uses whose definition is in another sequence, if the documents are shuffled and concatenated."""
    generator = np.random.default_rng(seed)
    count = len(documents.lengths)
    lengths = np.stack([documents.lengths, SEQ_LENGTH - documents.lengths], axis=1).reshape(-1)
    order = generator.permutation(2 * count)
    starts = np.empty(2 * count, dtype=np.int64)
    starts[order] = np.cumsum(lengths[order]) - lengths[order]
    starts = starts[::2, None]
    return float(((starts + documents.definitions) // SEQ_LENGTH != (starts + documents.uses) // SEQ_LENGTH).mean())


def probe_runs(folder: str, steps: int, seeds: Sequence[int], methods: Methods = METHODS) -> list[TrainingRun]:
    """The runs, ordered by seed and then by method. Writes their data.

    Raises:
        OptionError: the folder has runs with other settings.
    """
    os.makedirs(folder, exist_ok=True)
    prefix, tokenizer = os.path.join(folder, "data"), os.path.join(folder, "tokenizer.json")
    if not os.path.exists(tokenizer):
        documents = make_documents(steps * BATCH + 1, seed=1)  # concatenation needs one token more
        lengths = np.stack([documents.lengths, SEQ_LENGTH - documents.lengths], axis=1)
        write_documents(prefix, documents.tokens.reshape(-1), lengths.reshape(-1))
        say(f"concatenation parts {100 * share_cut(documents, seed=1):.0f} % of the uses from their definitions")
        write_tokenizer(tokenizer, VOCABULARY)
    options = {"num-layers": 2, "hidden-size": 64, "ffn-hidden-size": 192, "num-attention-heads": 4}
    options |= {"seq-length": SEQ_LENGTH, "micro-batch-size": BATCH, "train-iters": steps, "num-workers": 0}
    options |= {"init-method-std": 0.1, "lr": 5e-3, "min-lr": 5e-4, "lr-warmup-iters": steps // 20, "log-interval": 10}
    options |= {"save-interval": max(1, steps // POINTS)}
    check_settings(folder, (options, NAMES, VALUES, WORDS, PAIRS, HELD_OUT))
    options |= {"data-path": prefix, "split": 1, "tokenizer-model": tokenizer, "eod-token": EOD}
    return method_runs(folder, methods, seeds, options)


class Result(NamedTuple):
    """The measurements of a run: for each checkpoint's iteration, float64 [documents]."""

    right: dict[int, np.ndarray]
    """Percent of a document's values that are the most likely token."""
    probability: dict[int, np.ndarray]
    """Mean probability of a document's values, percent: the share that sampling would get right."""


MEASURES = {"right": "share of values predicted right", "probability": "probability of the values"}


def measure(training: TrainingRun) -> Result:
    """Measure a run's checkpoints, or read the result if they were measured before."""
    path = os.path.join(training.folder, "result.json")
    if not os.path.exists(path):
        documents = make_documents(HELD_OUT, seed=2)
        content: dict[str, dict[int, list[float]]] = {name: {} for name in MEASURES}
        iterations = measured_iterations(training)
        for iteration in terminal_progress(iterations, len(iterations), f"{training.name}: measuring"):
            for name, values in zip(MEASURES, predicted_values(training, iteration, documents)):
                content[name][iteration] = (100 * values.mean(axis=1)).tolist()
        write_whole(path, json.dumps(content).encode())
    with open(path, encoding="utf-8") as file:
        content = json.load(file)
    return Result(*({int(i): np.array(values) for i, values in content[name].items()} for name in MEASURES))


def measured_iterations(training: TrainingRun) -> list[int]:
    """The iterations that have a checkpoint."""
    steps, interval = training.options["train-iters"], training.options["save-interval"]
    return sorted({*range(interval, steps, interval), steps})


def predicted_values(training: TrainingRun, iteration: int, documents: Documents) -> tuple[np.ndarray, np.ndarray]:
    """What a checkpoint's model predicts after each use of a name.

    Returns:
        Whether the most likely token is the value, bool [documents, PAIRS]; the value's probability, float64 of the
        same shape.
    """
    import torch

    from .trained_model import load_model

    trained = load_model(training.trainer_options(), training.checkpoint(iteration))
    is_right, probability = [], []
    for rows in np.array_split(np.arange(len(documents.lengths)), -(-len(documents.lengths) // ROWS)):
        logits = trained.logits(torch.from_numpy(documents.tokens[rows]), documents.lengths[rows].tolist())
        predicted = np.take_along_axis(logits.double().softmax(-1).cpu().numpy(), documents.uses[rows][..., None], 1)
        values = np.take_along_axis(documents.tokens[rows], documents.uses[rows] + 1, 1)
        is_right.append(predicted.argmax(-1) == values)
        probability.append(np.take_along_axis(predicted, values[..., None], 2)[..., 0])
    return np.concatenate(is_right), np.concatenate(probability)


def area(result: Result, counts: np.ndarray) -> np.ndarray:
    """The endpoint: percent of the values right, as the mean over the checkpoints, float64 [samples].

    Args:
        counts: how often each document is in a sample, int64 [samples, documents].
    """
    by_document = np.mean([*result.right.values()], axis=0)
    return counts @ by_document / counts.sum(axis=1)


def steps_until_learned(result: Result) -> float:
    """The first step after which ``LEARNED`` percent are right, interpolated between checkpoints; infinite if there is
    none."""
    shares = {0: 0.0} | {iteration: float(values.mean()) for iteration, values in sorted(result.right.items())}
    before = 0
    for iteration, share in shares.items():
        if share >= LEARNED:
            return before + (iteration - before) * (LEARNED - shares[before]) / (share - shares[before])
        before = iteration
    return math.inf


def report(results: Mapping[str, Sequence[Result]], methods: Methods, comparisons: Sequence[Comparison]) -> str:
    """The endpoint with its differences and verdicts, and the curves in numbers.

    Args:
        results: for each method, its runs in the order of their seeds.
    """
    seeds, steps = len(results[BASELINE]), max(results[BASELINE][0].right)
    rows = []
    for method, (name, _) in methods.items():
        areas = over_seeds([float(area(result, np.ones((1, HELD_OUT)))[0]) for result in results[method]])
        rows.append([name, areas.text(1), _learning(results[method], steps)])
    header = ["", "endpoint: values right, mean over the training, %", f"steps until {LEARNED:.0f} %, median"]
    counted = f"{HELD_OUT:,} held-out documents, {PAIRS} uses each; chance is {100 / VALUES:.1f} %. {seeds} seeds, "
    counted += f"{steps:,} steps; 95 % intervals."
    endpoint = Endpoint("the endpoint", area, HELD_OUT, width=10.0, unit="points")
    return "\n\n".join(
        [
            format_table(header, rows, markdown=True, width=None),
            comparison_part(endpoint, results, methods, comparisons),
            *(_curve(results, methods, measured, title) for measured, title in MEASURES.items()),
            counted,
        ]
    )


def _learning(results: Sequence[Result], steps: int) -> str:
    """The median and the range of the steps until the task is learned."""
    numbers = sorted(map(steps_until_learned, results))
    low, high, middle = numbers[0], numbers[-1], float(np.median(numbers))
    texts = [f"{number:.0f}" if math.isfinite(number) else f"above {steps}" for number in (middle, low, high)]
    return f"{texts[0]} ({texts[1]} to {texts[2]})"


def _curve(results: Mapping[str, Sequence[Result]], methods: Methods, measured: str, title: str) -> str:
    """The table of one measure, after a fifth, two fifths, ... of the training."""
    iterations = sorted(results[BASELINE][0].right)
    shown = sorted({iterations[max(0, len(iterations) * part // 5 - 1)] for part in range(1, 6)})
    rows = []
    for method, (name, _) in methods.items():
        of_runs = [getattr(result, measured) for result in results[method]]
        rows.append([name, *(over_seeds([float(run[i].mean()) for run in of_runs]).text(1) for i in shown)])
    header = [f"{title}, %", *(f"{iteration:,} steps" for iteration in shown)]
    return format_table(header, rows, markdown=True, width=None)


def draw(path: str, results: Mapping[str, Sequence[Result]], methods: Methods) -> None:
    """Draw both measures over the training: the mean of the runs with its interval, and a thin line per run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    for axes, (measured, label) in zip(figure.subplots(1, 2, sharey=True), MEASURES.items()):
        for number, (method, (title, _)) in enumerate(methods.items()):
            iterations = sorted(results[method][0].right)
            of_runs = [[getattr(result, measured)[i].mean() for i in iterations] for result in results[method]]
            draw_curves(axes, iterations, of_runs, f"C{number}", title)
        axes.axhline(100 / VALUES, color="0.6", linestyle=":", label="chance")
        axes.set_xlabel("step")
        axes.set_ylim(0, 102)
        axes.set_title(f"{label} (%)")
        axes.grid(color="0.92")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Train, measure, report, draw.

    Raises:
        BFPError: bad options, or a trainer failed.
    """
    options = _parse()
    folder = os.path.join(options.output, f"steps{options.steps}")
    methods, comparisons = chosen_methods(options.packing_options)
    runs = probe_runs(folder, options.steps, seeds_of(options), methods)
    for training in train_all(runs, options.jobs, measure):
        say(f"{training.name}: {measure(training).right[options.steps].mean():.1f} % of the values are right")
    results = by_method(methods, [measure(training) for training in runs])
    text = report(results, methods, comparisons)
    figure = os.path.join(options.output, "context_probe.png")
    draw(figure, results, methods)
    write_whole(os.path.join(options.output, "context_probe.md"), (text + "\n").encode())
    print(text, f"Figure: {figure}", sep="\n\n", flush=True)


def _parse() -> argparse.Namespace:
    parser = Parser(prog="context_probe", description="Do models follow their context, with and without cut documents?")
    parser.add_argument(
        "--output", required=True, metavar="FOLDER", help="for data, models, table and figure (required)"
    )
    parser.add_argument("--steps", type=int, default=500, metavar="N", help="of training (default: %(default)s)")
    add_run_options(parser, seeds=8)
    options = parser.parse_args()
    checked_count("--steps", options.steps)
    check_run_options(options)
    return options


def console() -> int:
    """Run the command; returns its exit status."""
    return run(main, "context_probe")
