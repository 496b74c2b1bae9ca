"""What truncation costs on a process that is simple enough to calculate: formula, figure, and models to check it.

    python examples/truncation_process.py --output truncation                          # table and figure, in a second
    python examples/truncation_process.py --output truncation --train --probabilities 0.6 0.75 0.9

The process (paper, section 2.1): X_0 is 0 or 1, and each later X_n is X_0 with probability p, else 1 - X_0. Model A
learns from whole sequences. Model B learns from sequences that truncation left without X_0: given x_0, x_1, ... it
takes them for X_1, X_2, ... and guesses the token before them. Both know all that can be learned from their data, yet B
is worse.

With ``--train``, the example trainer trains a small transformer on each kind of data, packed, and their losses at some
positions are compared with the formula.
"""

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_bfp.arguments import checked_count
from megatron_bfp.commands.shared import Parser
from megatron_bfp.console import run
from megatron_bfp.errors import OptionError
from megatron_bfp.tables import format_table

from .synthetic_data import EOD, write_documents, write_tokenizer
from .training_runs import TrainingRun, train

POSITIONS = (1, 2, 4, 8, 16, 32)
"""Values of m in the tables."""
SEQUENCE = 33
"""Tokens of a training document of model A, X_0 to X_32."""
DOCUMENTS_PER_SEQUENCE = 16
EVALUATED = 16_384
"""Sequences on which a trained model is measured."""
LINES = ("-", "--", "-.", ":")


def loss_a(p: float) -> float:
    """Expected loss of model A, nats: the entropy of a token given the first one, the same at all positions."""
    return -p * math.log(p) - (1 - p) * math.log(1 - p)


def loss_b(p: float, m: int) -> float:
    """Expected loss of model B at X_m given x_0 to x_{m-1}, nats (paper, appendix A).

    By symmetry x_0 = 0. Of the m tokens seen, k are 0: the first, and a binomial number of the others. B believes that
    the hidden token was 0 with odds (p / q) ** (2 k - m).
    """
    q = 1 - p
    others = np.arange(m)  # how many of x_1 to x_{m-1} are 0
    logs = [math.lgamma(m) - math.lgamma(h + 1) - math.lgamma(m - h) for h in range(m)]
    weights = np.exp(np.array(logs) + others * math.log(p) + (m - 1 - others) * math.log(q))
    hidden_is_0 = (1 + np.tanh((2 * (others + 1) - m) * math.log(p / q) / 2)) / 2  # from the odds, without overflow
    predicted_0 = hidden_is_0 * p + (1 - hidden_is_0) * q
    return float(weights @ (-p * np.log(predicted_0) - q * np.log(1 - predicted_0)))


def sequences(p: float, count: int, length: int, seed: int) -> np.ndarray:
    """Samples of the process, int64 [count, length]."""
    generator = np.random.default_rng(seed)
    first = generator.integers(0, 2, (count, 1))
    differs = generator.random((count, length)) >= p
    differs[:, 0] = False
    return first ^ differs


def draw(path: str, probabilities: Sequence[float], measured: dict[tuple[float, int], float]) -> None:
    """Draw the paper's figure: the relative increase of the loss from A to B by position, for each p.

    Args:
        measured: for (p, m), the increase of trained models, in percent.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    positions = range(1, 65)
    for number, p in enumerate(probabilities):
        increases = [100 * (loss_b(p, m) / loss_a(p) - 1) for m in positions]
        axes.plot(positions, increases, LINES[number % len(LINES)], color=f"C{number}", label=f"p = {p:g}")
        points = [(m, increase) for (of, m), increase in measured.items() if of == p]
        if points:
            axes.plot(*zip(*points), "o", color=f"C{number}", markerfacecolor="white")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda m, _: f"{m:g}")
    axes.set_xlabel("position m of the token that is predicted")
    axes.set_ylabel("increase of the loss by truncation (%)")
    axes.set_title("Formula (lines)" + (" and trained transformers (circles)" if measured else ""))
    axes.grid(color="0.92")
    axes.legend()
    figure.savefig(path, dpi=130)


def formula_rows(probabilities: Sequence[float]) -> list[list[Any]]:
    """Rows of p, m, both losses, and the increase in percent."""
    rows = []
    for p in probabilities:
        for m in POSITIONS:
            a, b = loss_a(p), loss_b(p, m)
            rows.append([f"{p:g}", m, f"{a:.4f}", f"{b:.4f}", f"{100 * (b / a - 1):.2f}"])
    return rows


def write_data(folder: str, p: float, model: str, count: int) -> None:
    """Write a model's training documents and the tokenizer."""
    os.makedirs(folder, exist_ok=True)
    samples = sequences(p, count, SEQUENCE, seed=1)[:, 1 if model == "B" else 0 :]
    lengths = np.full(count, samples.shape[1])
    write_documents(os.path.join(folder, f"data_{model}"), samples.reshape(-1), lengths)
    write_tokenizer(os.path.join(folder, "tokenizer.json"), ["0", "1"])


def training_run(folder: str, p: float, model: str, steps: int) -> TrainingRun:
    """A transformer of two layers; a step has 128 documents."""
    options = {"num-layers": 2, "hidden-size": 32, "ffn-hidden-size": 96, "num-attention-heads": 4}
    options |= {"make-vocab-size-divisible-by": 3, "seq-length": SEQUENCE * DOCUMENTS_PER_SEQUENCE}
    options |= {"micro-batch-size": 8, "train-iters": steps, "lr": 5e-3, "lr-warmup-iters": steps // 20}
    options |= {"weight-decay": 0, "num-workers": 0, "split": 1, "log-interval": 100, "loss-spike-factor": 0}
    options |= {"data-path": os.path.join(folder, f"data_{model}"), "eod-token": EOD, "zero-stage": 0}
    options["tokenizer-model"] = os.path.join(folder, "tokenizer.json")
    return TrainingRun(f"p = {p:g}, model {model}", os.path.join(folder, f"model_{model}"), options)


def trained_losses(run: TrainingRun, p: float) -> dict[int, float]:
    """A trained model's expected loss at each of ``POSITIONS``, nats. It is the cross entropy with the true
    distribution of the next token, so the only noise is that of the sampled sequences."""
    import torch

    from .trained_model import load_model

    trained = load_model(run.trainer_options(), run.checkpoint())
    sums = torch.zeros(SEQUENCE - 1, dtype=torch.float64)
    for batch in np.array_split(sequences(p, EVALUATED, SEQUENCE, seed=2), EVALUATED // 256):
        tokens = torch.from_numpy(batch[:, :-1])
        logs = trained.logits(tokens, [SEQUENCE - 1] * len(tokens)).double().log_softmax(-1).cpu()
        first = tokens[:, :1].expand_as(tokens)[..., None]
        losses = -p * logs.gather(-1, first) - (1 - p) * logs.gather(-1, 1 - first)
        sums += losses[..., 0].sum(0)
    return {m: float(sums[m - 1]) / EVALUATED for m in POSITIONS}


def compare(folder: str, probabilities: Sequence[float], steps: int) -> tuple[list[list[Any]], dict]:
    """Train both models for each p, and compare them with the formula.

    Returns:
        Rows of p, m, and for each model the formula's loss, the trained model's and the difference in percent; the
        trained models' increases, for the figure.
    """
    rows, increases = [], {}
    for p in probabilities:
        trained = {}
        for model in "AB":
            run = training_run(os.path.join(folder, f"p{p:g}_steps{steps}"), p, model, steps)
            if not run.is_done():
                write_data(os.path.dirname(run.folder), p, model, count=8 * DOCUMENTS_PER_SEQUENCE * steps)
                train(run)
            trained[model] = trained_losses(run, p)
        for m in POSITIONS:
            row: list[Any] = [f"{p:g}", m]
            for model, formula in (("A", loss_a(p)), ("B", loss_b(p, m))):
                loss = trained[model][m]
                row += [f"{formula:.4f}", f"{loss:.4f}", f"{100 * (loss / formula - 1):+.2f}"]
            rows.append(row)
            increases[p, m] = 100 * (trained["B"][m] / trained["A"][m] - 1)
    return rows, increases


def main() -> None:
    """Calculate, train if asked, print, draw.

    Raises:
        BFPError: bad options, or the trainer failed.
    """
    parser = Parser(prog="truncation_process", description="What truncation costs on a simple process.")
    parser.add_argument(
        "--output", required=True, metavar="FOLDER", help="for the figure, tables and models (required)"
    )
    parser.add_argument(
        "--probabilities",
        nargs="+",
        type=float,
        default=[0.6, 0.75, 0.9],
        metavar="P",
        help="of the process (default: 0.6 0.75 0.9)",
    )
    parser.add_argument(
        "--train", action="store_true", help="train models and compare their losses with the formula's (default: off)"
    )
    parser.add_argument("--steps", type=int, default=2000, metavar="N", help="of training (default: %(default)s)")
    options = parser.parse_args()
    checked_count("--steps", options.steps)
    for p in options.probabilities:
        if not 0.5 < p < 1:
            raise OptionError(f"--probabilities {p:g}: p is above 0.5 and below 1")
    os.makedirs(options.output, exist_ok=True)
    tables = [format_table(["p", "m", "loss A", "loss B", "increase %"], formula_rows(options.probabilities))]
    increases: dict = {}
    if options.train:
        rows, increases = compare(options.output, options.probabilities, options.steps)
        header = ["p", "m", *(f"{model}, {what}" for model in "AB" for what in ("formula", "trained", "diff. %"))]
        tables.append(format_table(header, rows))
    figure = os.path.join(options.output, "truncation_process.png")
    draw(figure, options.probabilities, increases)
    with open(os.path.join(options.output, "truncation_process.txt"), "w", encoding="utf-8") as file:
        file.write("\n\n".join(tables) + "\n")
    print(*tables, f"Figure: {figure}", sep="\n\n", flush=True)


def console() -> int:
    """Run the command; returns its exit status."""
    return run(main, "truncation_process")
