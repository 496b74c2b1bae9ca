"""The benchmark of packing runs, and its plain Python contenders are the paper's algorithms."""

import json
import subprocess
import sys

import numpy as np
from helpers.datasets import DATA, ROOT
from helpers.oracle import best_fit_decreasing, chunk_lengths

from benchmarks.packing import first_fit_decreasing, optimized_best_fit_decreasing


def first_fit(lengths, seq_length):
    """First-fit decreasing without a tree."""
    spaces = []
    for length in sorted(chunk_lengths(lengths, seq_length), reverse=True):
        fitting = [i for i, space in enumerate(spaces) if space >= length]
        if fitting:
            spaces[fitting[0]] -= length
        else:
            spaces.append(seq_length - length)
    return len(spaces)


def test_the_contenders_are_what_they_are_called():
    rng = np.random.default_rng(1)
    for _ in range(200):
        seq_length = int(rng.integers(1, 60))
        lengths = rng.integers(0, 2 * seq_length, int(rng.integers(1, 80)))
        assert optimized_best_fit_decreasing(lengths, seq_length) == len(best_fit_decreasing(lengths, seq_length))
        assert first_fit_decreasing(lengths, seq_length) == first_fit(lengths, seq_length)


def test_the_tables_and_the_json_tell_the_same(tmp_path):
    command = [
        sys.executable,
        str(ROOT / "benchmarks/packing.py"),
        "--repeats",
        "1",
        "--seq-length",
        "2048",
        "8192",
    ]
    for arguments in (["--documents", "2e3", "1e4"], ["--lengths", str(DATA / "code_lengths.npy")]):
        done = subprocess.run(
            [*command, *arguments, "--output", str(tmp_path / "out.json")], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        rows = json.loads((tmp_path / "out.json").read_text())
        assert len(rows) == (4 if "2e3" in arguments else 2)
        for row in rows:
            assert set(row["measured"]) == {"ours", "argsort", "ffd", "obfd"}
            assert f"{row['sequences']:,}" in done.stdout
            assert row["lower_bound"] <= row["sequences"] <= 1.001 * row["lower_bound"] + 1


def test_bad_options_are_one_line(tmp_path):
    (tmp_path / "bad.npy").write_bytes(b"x")
    for arguments in (["--documents", "many"], ["--lengths", str(tmp_path / "bad.npy")], ["--repeats", "0"]):
        command = [sys.executable, str(ROOT / "benchmarks/packing.py"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
