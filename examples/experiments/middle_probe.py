"""Does training with ``--fim-rate`` teach models to fill gaps? A probe on documents whose middles can be computed.

    python examples/middle_probe.py --output middle

Each document counts upwards, modulo 23, by a step that its last word names:

    7 10 13 16 19 22 2 5 +3

The middle of ``7 ... 2 5 +3`` is ``10 13 16 19 22``. Where it begins is known from the prefix, by how much it counts
and where it ends from the suffix; the prefix alone does not tell. Small transformers are trained on the same documents
with and without fill-in-the-middle, and fill gaps in documents that they have not seen: for each step, documents with
an eighth of the beginnings are held out.
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

from .intervals import checked_seeds, over_items, over_seeds, verdict
from .synthetic_data import EOD, write_documents, write_tokenizer
from .training_runs import TrainingRun, say, train_all

SEQ_LENGTH = 64
BATCH = 32
MODULUS = 23
STEPS = (1, 2, 3, 5)
SHORTEST, LONGEST = 8, 16
"""Numbers in a document: fewer than ``MODULUS``, so none comes twice and it is clear where a middle ends."""
VOCABULARY = [str(number) for number in range(MODULUS)] + [f"+{step}" for step in STEPS]
PREFIX, MIDDLE, SUFFIX = (len(VOCABULARY) + i for i in range(3))
VOCABULARY += ["<fim_prefix>", "<fim_middle>", "<fim_suffix>"]
EOD_ID = len(VOCABULARY)
DOCUMENTS = 20_000
GAPS = 512
"""Held-out documents with a gap."""

METHODS = {"without": "no fill-in-the-middle", "fim": "fill-in-the-middle, rate 0.5"}
MEASURES = {"both": "middles right, given prefix and suffix", "prefix": "middles right, given the prefix alone"}


class Gaps(NamedTuple):
    """Documents, and where their middles are."""

    documents: list[list[int]]
    """Without EOD."""
    begins: list[int]
    ends: list[int]
    """At least one number is before the middle, and one after it."""


def make_documents(count: int, seed: int, held_out: bool) -> list[list[int]]:
    """Documents without EOD: all beginnings and steps, or only those that the others leave out."""
    generator = np.random.default_rng(seed)
    kinds = [
        (first, kind)
        for first in range(MODULUS)
        for kind in range(len(STEPS))
        if ((first + 3 * kind) % 8 == 0) == held_out
    ]
    chosen = generator.integers(0, len(kinds), count)
    lengths = generator.integers(SHORTEST, LONGEST + 1, count)
    documents = []
    for (first, kind), length in zip([kinds[number] for number in chosen], lengths.tolist()):
        numbers = [(first + STEPS[kind] * i) % MODULUS for i in range(length)]
        documents.append([*numbers, MODULUS + kind])
    return documents


def make_gaps(count: int, seed: int) -> Gaps:
    """Held-out documents, each with a middle of at least one number."""
    generator = np.random.default_rng(seed)
    documents = make_documents(count, seed, held_out=True)
    splits = [np.sort(generator.choice(len(document) - 2, 2, replace=False)) + 1 for document in documents]
    return Gaps(documents, [int(begin) for begin, _ in splits], [int(end) for _, end in splits])


def probe_runs(folder: str, steps: int, seeds: int) -> list[TrainingRun]:
    """The runs, ordered by seed and then by method. Writes their data."""
    os.makedirs(folder, exist_ok=True)
    prefix, tokenizer = os.path.join(folder, "data"), os.path.join(folder, "tokenizer.json")
    if not os.path.exists(tokenizer):
        documents = [[*document, EOD_ID] for document in make_documents(DOCUMENTS, seed=1, held_out=False)]
        write_documents(prefix, np.concatenate(documents), np.array([len(document) for document in documents]))
        write_tokenizer(tokenizer, VOCABULARY)
    options = {"num-layers": 2, "hidden-size": 64, "ffn-hidden-size": 192, "num-attention-heads": 4}
    options |= {"seq-length": SEQ_LENGTH, "micro-batch-size": BATCH, "train-iters": steps, "num-workers": 0}
    options |= {"init-method-std": 0.1, "lr": 5e-3, "min-lr": 5e-4, "lr-warmup-iters": steps // 20, "log-interval": 10}
    options |= {"save-interval": steps, "data-path": prefix, "split": 1, "tokenizer-model": tokenizer}
    options |= {"eod-token": EOD, "data-impl": "bfp"}
    of_method = {"without": {}, "fim": {"fim-rate": 0.5}}
    runs = []
    for seed in range(1, seeds + 1):
        for name, own_options in of_method.items():
            own = os.path.join(folder, f"{name}_seed{seed}")
            of_run = {"seed": seed, "data-cache-path": os.path.join(own, "cache")}
            runs.append(TrainingRun(f"{METHODS[name]}, seed {seed}", own, {**options, **own_options, **of_run}))
    return runs


def measure(training: TrainingRun) -> dict[str, np.ndarray]:
    """Which middles a run's model fills exactly, for each of ``MEASURES``: percent, float64 [documents]."""
    path = os.path.join(training.folder, "result.json")
    if not os.path.exists(path):
        gaps = make_gaps(GAPS, seed=2)
        is_right = {name: filled_right(training, gaps, with_suffix=name == "both") for name in MEASURES}
        content = {name: (100.0 * values).tolist() for name, values in is_right.items()}
        write_whole(path, json.dumps(content).encode())
    with open(path, encoding="utf-8") as file:
        return {name: np.array(values) for name, values in json.load(file).items()}


def filled_right(training: TrainingRun, gaps: Gaps, with_suffix: bool) -> np.ndarray:
    """Fill middles token by token, with the most likely one, and compare.

    Args:
        with_suffix: the model sees ``<prefix> ... <suffix> ... <middle>``, and must also say where the middle ends.
            Otherwise it sees the prefix alone, and is told how long the middle is.

    Returns:
        Whether the middle is right, bool [documents].
    """
    prompts, wanted = [], []
    for document, begin, end in zip(*gaps):
        if with_suffix:
            prompts.append([PREFIX, *document[:begin], SUFFIX, *document[end:], MIDDLE])
            wanted.append([*document[begin:end], EOD_ID])
        else:
            prompts.append(document[:begin])
            wanted.append(document[begin:end])
    filled = _continued(training, prompts, max(map(len, wanted)))
    return np.array([row[: len(middle)] == middle for row, middle in zip(filled, wanted)])


def _continued(training: TrainingRun, prompts: list[list[int]], count: int) -> list[list[int]]:
    """``count`` most likely tokens after each prompt."""
    import torch

    from .trained_model import load_model

    trained = load_model(training.trainer_options(), training.checkpoint())
    tokens = np.zeros((len(prompts), SEQ_LENGTH), dtype=np.int64)
    lengths = np.array([len(prompt) for prompt in prompts])
    for row, prompt in zip(tokens, prompts):
        row[: len(prompt)] = prompt
    rows = np.arange(len(prompts))
    for _ in range(count):
        logits = trained.logits(torch.from_numpy(tokens), lengths.tolist()).cpu().numpy()
        tokens[rows, lengths] = logits[rows, lengths - 1].argmax(-1)
        lengths += 1
    return [row[end - count : end] for row, end in zip(tokens.tolist(), lengths.tolist())]


def report(results: Mapping[str, Sequence[Mapping[str, np.ndarray]]]) -> str:
    """A table, with a verdict.

    Args:
        results: for each of ``METHODS``, its runs in the order of their seeds.
    """
    rows = []
    for method, title in METHODS.items():
        means = [over_seeds([float(result[measured].mean()) for result in results[method]]) for measured in MEASURES]
        rows.append([title, *(mean.text(1) for mean in means)])
    pairs = [ours["both"] - theirs["both"] for ours, theirs in zip(results["fim"], results["without"])]
    seeds, mean = over_seeds([float(pair.mean()) for pair in pairs]), np.mean(pairs, axis=0)
    intervals = (seeds, over_items(lambda counts: counts @ mean / len(mean), len(mean), seeds.mean))
    said = verdict(METHODS["fim"], METHODS["without"], "the share of middles filled right", intervals)
    over = ", ".join(f"{interval.text(1)} over {of}" for interval, of in zip(intervals, ("seeds", "documents")))
    return "\n\n".join(
        [
            format_table(["%", *MEASURES.values()], rows, markdown=True, width=None),
            f"{said} The difference, in points: {over}.",
            f"{len(mean):,} held-out documents with a gap each; {len(pairs)} seeds; 95 % intervals.",
        ]
    )


def main() -> None:
    """Train, measure, report.

    Raises:
        BFPError: bad options, or a trainer failed.
    """
    options = _parse()
    runs = probe_runs(os.path.join(options.output, f"steps{options.steps}"), options.steps, options.seeds)
    for training in train_all(runs, options.jobs):
        say(f"{training.name}: {measure(training)['both'].mean():.1f} % of the middles are right")
    results = [measure(training) for training in runs]
    text = report({method: results[number :: len(METHODS)] for number, method in enumerate(METHODS)})
    write_whole(os.path.join(options.output, "middle_probe.md"), (text + "\n").encode())
    print(text, flush=True)


def _parse() -> argparse.Namespace:
    parser = Parser(prog="middle_probe", description="Does fill-in-the-middle teach models to fill gaps?")
    parser.add_argument("--output", required=True, metavar="FOLDER", help="for data, models and table (required)")
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="of training (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="runs per method (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="trainings at a time (default: %(default)s)")
    options = parser.parse_args()
    checked_count("--steps", options.steps)
    checked_count("--jobs", options.jobs)
    checked_seeds(options.seeds)
    return options


def console() -> int:
    """Run the command; returns its exit status."""
    return run(main, "middle_probe")
