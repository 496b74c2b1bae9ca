"""The benchmark of waiting ranks runs, loses no more time than promised, and has the numbers of the report."""

import json
import subprocess
import sys

import numpy as np
import pytest
from helpers.datasets import DATA, ROOT

from benchmarks.balance import SIMULATED, measure, plan
from megatron_bfp.inspection.report import make_report
from megatron_bfp.inspection.waiting import HIDDEN_SIZE, Ranks

COMMAND = [sys.executable, str(ROOT / "benchmarks/balance.py")]
MEETINGS = ("once_per_step", "every_micro_step")
PROMISED = {
    ("web", 8192): {"balanced": (4.6, 5.3), "over_batches": (0.3, 0.5)},
    ("long", 32768): {"balanced": (11, 11), "over_batches": (1.0, 1.4)},
    ("long", 131072): {"balanced": (17, 27), "over_batches": (1.6, 3.2)},
}
"""Time lost in %, 64 ranks and 4 micro-batches: if they meet once per step, and in every micro-step."""


@pytest.mark.parametrize(("corpus", "seq_length"), PROMISED)
def test_no_more_time_is_lost_than_promised(corpus, seq_length):
    lengths = SIMULATED[corpus](1_500_000)
    lost = measure(plan(lengths, seq_length, False), seq_length, Ranks(64, 4), HIDDEN_SIZE, 4, 1234)
    for order, promised in PROMISED[corpus, seq_length].items():
        for meeting, percent in zip(MEETINGS, promised):
            assert 100 * lost[order][meeting] <= 1.1 * percent, (order, meeting, lost)
            assert lost["random"][meeting] > 1.5 * lost[order][meeting]


def test_the_numbers_are_those_of_the_report_and_of_the_tables(tmp_path):
    path = DATA / "code_lengths.npy"
    arguments = ["--lengths", path, "--seq-length", 8192, 32768, "--ranks", "8x2", "4x1", "--output", tmp_path / "out"]
    done = subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out").read_text())
    expected, other = [], []
    for seq_length in (8192, 32768):
        for seed, numbers in ((1234, expected), (7, other)):
            report = make_report(np.load(path), seq_length, ranks=[Ranks(8, 2), Ranks(4, 1)], seed=seed)
            for row in report.waiting:
                numbers += [{name: vars(lost) for name, lost in vars(row.best_fit).items()}]
                numbers += [{name: vars(lost) for name, lost in vars(row.even).items()}]
    seen = [{order: {meeting: row[order][meeting] for meeting in MEETINGS} for order in expected[0]} for row in rows]
    assert seen == expected != other
    assert [row["even_sequences"] for row in rows] == [False, True] * 4
    for row in rows:
        table = " / ".join(f"{100 * row['random'][meeting]:.1f}" for meeting in MEETINGS)
        pipelines = f"{100 * row['random']['pipelines']:.1f}"
        lines = [line.split("  ") for line in done.stdout.splitlines() if line.startswith(row["lengths"])]
        lines = [[cell.strip() for cell in line if cell] for line in lines]
        packing = "even" if row["even_sequences"] else "best fit"
        named = [line for line in lines if line[1:4] == [f"{row['seq_length']:,}", row["ranks"], packing]]
        assert [line[4] for line in named] == [table, pipelines]


def test_bad_options_are_one_line(tmp_path):
    np.save(tmp_path / "empty.npy", np.zeros(3, dtype=np.int32))
    for arguments in (
        ["--ranks", "64"],
        ["--hidden-size", "0"],
        ["--pipeline-stages", "-1"],
        ["--lengths", str(tmp_path / "empty.npy")],
        ["--lengths", str(tmp_path / "none.npy")],
    ):
        done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60)
        lines = [line for line in done.stderr.splitlines() if not line.endswith("...")]
        assert done.returncode == 2 and len(lines) == 1, done.stderr
