"""Do models follow their context if documents were cut in training? A probe of the mechanism that the paper describes.

    python examples/context_probe.py --output probe --jobs 2

Each document defines values of some names at its beginning, and uses each name once later, between meaningless words:

    n7=v3 n2=v5 n5=v0 n1=v3 w1 w3 n2 n2=v5 w0 w0 w2 n7 n7=v3 ...

Names have other values in every document, so what follows a name can only be known from its definition. A document has
0.5 to 0.9 of the sequence length, and comes with a shorter one of words only, which fills the sequence. Concatenation
cuts most documents, and uses lose their definitions; packing cuts none. Small transformers are trained for one epoch on
either, and must predict the values in whole documents that they have not seen.
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
from megatron_bfp.progress import terminal_progress
from megatron_bfp.tables import format_table

from .data_methods import BASELINE, METHODS
from .intervals import checked_seeds, over_items, over_seeds, verdict
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
HELD_OUT = 512
"""Documents that models are measured on."""
ROWS = 64
"""Documents per forward pass of the measurement."""
POINTS = 20
"""Checkpoints at which models are measured."""


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


def probe_runs(folder: str, steps: int, seeds: int) -> list[TrainingRun]:
    """The runs, ordered by seed and then by method. Writes their data."""
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
    options |= {"save-interval": max(1, steps // POINTS), "data-path": prefix, "split": 1}
    options |= {"tokenizer-model": tokenizer, "eod-token": EOD}
    runs = []
    for seed in range(1, seeds + 1):
        for name, method in METHODS.items():
            own = os.path.join(folder, f"{name}_seed{seed}")
            of_run = {"seed": seed, "data-cache-path": os.path.join(own, "cache")}
            runs.append(TrainingRun(f"{name}, seed {seed}", own, {**options, **method.options, **of_run}))
    return runs


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


def report(results: Mapping[str, Sequence[Result]]) -> str:
    """A table for each measure, with a verdict.

    Args:
        results: for each of ``METHODS``, its runs in the order of their seeds.
    """
    seeds = len(results[BASELINE])
    counts = f"{HELD_OUT:,} held-out documents, {PAIRS} uses each; chance is {100 / VALUES:.1f} %. {seeds} seeds; "
    return "\n\n".join([*(_part(results, name, title) for name, title in MEASURES.items()), counts + "95 % intervals."])


def _part(results: Mapping[str, Sequence[Result]], measured: str, title: str) -> str:
    """The table of one measure, after a tenth, a fifth, a half and all of the training."""
    of_method = {method: [getattr(result, measured) for result in runs] for method, runs in results.items()}
    iterations = sorted(of_method[BASELINE][0])
    shown = sorted({iterations[max(0, len(iterations) * part // 20 - 1)] for part in (2, 4, 10, 20)})
    rows, said = [], []
    for method, (name, _) in METHODS.items():
        row = [name]
        row += [over_seeds([float(run[i].mean()) for run in of_method[method]]).text(1) for i in shown]
        if method == BASELINE:
            rows.append([*row, "-", "-"])
            continue
        pairs = [ours[shown[-1]] - theirs[shown[-1]] for ours, theirs in zip(of_method[method], of_method[BASELINE])]
        seeds, mean = over_seeds([float(pair.mean()) for pair in pairs]), np.mean(pairs, axis=0)
        intervals = (seeds, over_items(lambda counts: counts @ mean / len(mean), len(mean), seeds.mean))
        rows.append([*row, *(interval.text(1) for interval in intervals)])
        said.append(verdict(name, METHODS[BASELINE].title, f"the {title} at the end", intervals))
    header = [f"{title}, %", *(f"{iteration:,} steps" for iteration in shown)]
    header += ["difference at the end, points, over seeds", "over documents"]
    return f"{format_table(header, rows, markdown=True, width=None)}\n\n{' '.join(said)}"


def draw(path: str, results: Mapping[str, Sequence[Result]]) -> None:
    """Draw both measures over the training, a line per run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    for axes, (measured, label) in zip(figure.subplots(1, 2, sharey=True), MEASURES.items()):
        for number, (method, (title, _)) in enumerate(METHODS.items()):
            for seed, result in enumerate(results[method]):
                means = {iteration: values.mean() for iteration, values in sorted(getattr(result, measured).items())}
                axes.plot(*zip(*means.items()), color=f"C{number}", linewidth=1.2, label=None if seed else title)
        axes.axhline(100 / VALUES, color="0.6", linestyle=":", label="chance")
        axes.set_xlabel("step")
        axes.set_title(f"{label} (%)")
        axes.grid(color="0.92")
    axes.legend()
    figure.savefig(path, dpi=130)


def main() -> None:
    """Train, measure, report, draw.

    Raises:
        BFPError: bad options, or a trainer failed.
    """
    options = _parse()
    folder = os.path.join(options.output, f"steps{options.steps}")
    runs = probe_runs(folder, options.steps, options.seeds)
    for training in train_all(runs, options.jobs):
        say(f"{training.name}: {measure(training).right[options.steps].mean():.1f} % of the values are right")
    results = [measure(training) for training in runs]
    by_method = {method: results[number :: len(METHODS)] for number, method in enumerate(METHODS)}
    text = report(by_method)
    figure = os.path.join(options.output, "context_probe.png")
    draw(figure, by_method)
    write_whole(os.path.join(options.output, "context_probe.md"), (text + "\n").encode())
    print(text, f"Figure: {figure}", sep="\n\n", flush=True)


def _parse() -> argparse.Namespace:
    parser = Parser(prog="context_probe", description="Do models follow their context, with and without cut documents?")
    parser.add_argument(
        "--output", required=True, metavar="FOLDER", help="for data, models, table and figure (required)"
    )
    parser.add_argument("--steps", type=int, default=1000, metavar="N", help="of training (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="runs per method (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="trainings at a time (default: %(default)s)")
    options = parser.parse_args()
    checked_count("--steps", options.steps)
    checked_count("--jobs", options.jobs)
    checked_seeds(options.seeds)
    return options


def console() -> int:
    """Run the command; returns its exit status."""
    return run(main, "context_probe")
