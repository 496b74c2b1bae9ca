"""Time that ranks lose by waiting for the slowest one: in random order, balanced, and over several global batches.

    python benchmarks/balance.py
    python benchmarks/balance.py --lengths PREFIX --seq-length 8192 --ranks 64x4 16x16 --output balance.json

Nothing is timed: the time of each sequence follows from its work (see megatron_bfp/inspection/waiting.py), and samples
come in the order of a run. The plans are real ones, of simulated lengths and of those in tests/data or in files that
are given. With one seed, the numbers are those of `megatron-bfp report`.
"""

import json
import os
import sys
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir))

from benchmarks.packing import given_lengths, simulated_lengths
from megatron_bfp.arguments import checked_count, checked_seq_length
from megatron_bfp.commands.report import ranks_of
from megatron_bfp.commands.shared import SEED, Parser
from megatron_bfp.console import run
from megatron_bfp.errors import InputError
from megatron_bfp.inspection.report import plan_sequences
from megatron_bfp.inspection.waiting import (
    BALANCED_TOGETHER,
    HIDDEN_SIZE,
    Ranks,
    WorkOfPlan,
    costs_by_order,
    time_lost,
    time_lost_in_pipelines,
)
from megatron_bfp.packing.census import take_census
from megatron_bfp.tables import format_table

DATA = os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, "tests", "data")
REAL = ("text_lengths.npy", "code_lengths.npy")
RANKS = (Ranks(64, 4), Ranks(16, 16), Ranks(512, 1))
LONG_SHARE = 0.024
"""Of the documents of "long", 55 % of the tokens."""


def long_lengths(documents: int) -> np.ndarray:
    """Simulated lengths of a corpus of web pages and long documents, such as books, papers and code.

    Returns:
        int32 [documents], tokens: lognormal(5.84, 0.98), and 2.4 % of them lognormal(9.5, 1.2).
    """
    generator = np.random.default_rng(2025)
    is_long = generator.random(documents) < LONG_SHARE
    lengths = np.where(is_long, generator.lognormal(9.5, 1.2, documents), generator.lognormal(5.84, 0.98, documents))
    return np.ceil(lengths).astype(np.int32)


SIMULATED: dict[str, Callable[[int], np.ndarray]] = {"web": simulated_lengths, "long": long_lengths}


def plan(lengths: np.ndarray, seq_length: int, even: bool) -> WorkOfPlan:
    """Pack a corpus.

    Args:
        even: with even sequences.

    Raises:
        InputError: there are no tokens.
    """
    census = take_census(lengths, seq_length)
    if not census.num_tokens:
        raise InputError("--lengths: there are no tokens")
    planned = plan_sequences(census, seq_length, even=even)
    return WorkOfPlan(planned.counts, planned.work)


def measure(
    work: WorkOfPlan, seq_length: int, ranks: Ranks, hidden_size: int, num_stages: int, seed: int
) -> dict[str, Any]:
    """Time lost with one plan, by the order of samples.

    Args:
        num_stages: of each pipeline, where ranks are pipelines.

    Returns:
        "random", "balanced" and "over_batches": each with "once_per_step", "every_micro_step" and "pipelines"; 0.1 is
        10 %.
    """
    lost = {}
    orders = costs_by_order(work, seq_length, hidden_size, ranks, seed)
    for name, (_, costs) in zip(("random", "balanced", "over_batches"), orders, strict=True):
        lost[name] = vars(time_lost(costs)) | {"pipelines": time_lost_in_pipelines(costs, num_stages)}
    return lost


def main() -> None:
    """Parse the command line, simulate, print.

    Raises:
        BFPError: bad options or input.
    """
    options = _parser().parse_args()
    for name in ("hidden_size", "pipeline_stages", "documents"):
        checked_count(f"--{name.replace('_', '-')}", getattr(options, name))
    rows = []
    for name, lengths in _corpora(options.lengths, options.documents):
        for seq_length in options.seq_length:
            checked_seq_length("--seq-length", seq_length)
            print(f"{name} at seq_length {seq_length} ...", file=sys.stderr, flush=True)
            plans = [(even, plan(lengths, seq_length, even)) for even in (False, True)]
            for ranks, (even, work) in product(options.ranks, plans):
                row = {"lengths": name, "seq_length": seq_length, "ranks": str(ranks), "even_sequences": even}
                settings = (options.hidden_size, options.pipeline_stages, options.seed)
                rows.append(row | measure(work, seq_length, ranks, *settings))
    _print(rows, options.pipeline_stages)
    if options.output:
        with open(options.output, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=2)


def _parser() -> Parser:
    parser = Parser(prog="benchmarks/balance.py", description="Time that ranks lose by waiting for the slowest one.")
    add = parser.add_argument
    add(
        "--lengths",
        nargs="+",
        metavar="FILE",
        help="a dataset's PREFIX or .idx, or lengths as .npy (default: two simulated corpora and those in tests/data)",
    )
    add("--documents", type=int, default=1_500_000, metavar="N", help="of simulated corpora (default: %(default)s)")
    lengths = [8192, 32768, 131072]
    add("--seq-length", nargs="+", type=int, default=lengths, metavar="L", help="(default: 8192 32768 131072)")
    ranks = "data-parallel size x micro-batches of one sequence, per step (default: 64x4 16x16 512x1)"
    add("--ranks", nargs="+", type=ranks_of, default=RANKS, metavar="DxM", help=ranks)
    add("--hidden-size", type=int, default=HIDDEN_SIZE, metavar="H", help="of the model (default: %(default)s)")
    add("--pipeline-stages", type=int, default=4, metavar="P", help="of each pipeline (default: %(default)s)")
    add("--seed", type=int, default=SEED, metavar="SEED", help="orders sequences (default: %(default)s)")
    add("--output", metavar="FILE", help="also write the figures as JSON")
    return parser


def _corpora(paths: list[str] | None, documents: int) -> list[tuple[str, np.ndarray]]:
    """Names and lengths."""
    if paths:
        return [(os.path.basename(path), given_lengths(path)) for path in paths]
    simulated = [(name, simulate(documents)) for name, simulate in SIMULATED.items()]
    return simulated + [(name.removesuffix("_lengths.npy"), given_lengths(os.path.join(DATA, name))) for name in REAL]


def _print(rows: list[dict[str, Any]], num_stages: int) -> None:
    header = ["lengths", "L", "ranks", "packing", "random", "balanced", f"{BALANCED_TOGETHER} batches"]
    print("\nTime lost (%) if ranks meet once per step (DDP) / in every micro-step (ZeRO 3)")
    print(format_table(header, [_cells(row, "once_per_step", "every_micro_step") for row in rows]))
    print(f"\nTime lost (%) if ranks are pipelines of {num_stages} stages that meet once per step")
    print(format_table(header, [_cells(row, "pipelines") for row in rows]))
    print("web: lognormal(5.84, 0.98); long: 2.4 % of its documents lognormal(9.5, 1.2), the others as web", flush=True)


def _cells(row: dict[str, Any], *meetings: str) -> list[str]:
    lost = (row[order] for order in ("random", "balanced", "over_batches"))
    packing = "even" if row["even_sequences"] else "best fit"
    cells = [row["lengths"], f"{row['seq_length']:,}", row["ranks"], packing]
    return cells + [" / ".join(f"{100 * each[meeting]:.1f}" for meeting in meetings) for each in lost]


if __name__ == "__main__":
    sys.exit(run(main, "benchmarks/balance.py"))
