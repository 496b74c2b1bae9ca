"""examples/truncation_process.py: the formula against all outcomes counted one by one, the samples, the figure."""

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
from experiments.truncation_process import loss_a, loss_b, sequences
from helpers.datasets import ROOT
from helpers.launching import ENVIRONMENT


def loss_by_counting(p, m):
    """Model B's expected loss, over all sequences x_0 to x_{m-1} and both hidden tokens."""

    def likelihood(tokens, hidden):
        return math.prod(p if token == hidden else 1 - p for token in tokens)

    total = 0.0
    for tokens in itertools.product((0, 1), repeat=m):
        joint = [likelihood(tokens, hidden) / 2 for hidden in (0, 1)]
        predicted_0 = (joint[0] * p + joint[1] * (1 - p)) / sum(joint)
        true_0 = p if tokens[0] == 0 else 1 - p
        of_tokens = likelihood(tokens[1:], tokens[0]) / 2
        total -= of_tokens * (true_0 * math.log(predicted_0) + (1 - true_0) * math.log(1 - predicted_0))
    return total


@pytest.mark.parametrize("p", [0.51, 0.6, 0.75, 0.9, 0.999])
def test_the_formula_is_the_expectation(p):
    for m in range(1, 10):
        assert loss_b(p, m) == pytest.approx(loss_by_counting(p, m), rel=1e-9)
        assert loss_b(p, m) > loss_a(p)
    assert loss_b(p, 5000) >= loss_a(p) * (1 - 1e-9) and (p < 0.55 or loss_b(p, 5000) < loss_a(p) * 1.0001)


def test_samples_follow_the_process():
    samples = sequences(0.8, 200_000, 4, seed=3)
    assert samples.shape == (200_000, 4) and set(np.unique(samples)) == {0, 1}
    assert samples[:, 0].mean() == pytest.approx(0.5, abs=0.005)
    assert (samples[:, 1:] == samples[:, :1]).mean(axis=0) == pytest.approx(0.8, abs=0.005)


def run(*options):
    command = [sys.executable, str(ROOT / "examples" / "truncation_process.py"), *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=ENVIRONMENT)


def test_table_and_figure(tmp_path):
    done = run("--output", tmp_path, "--probabilities", 0.75)
    assert done.returncode == 0, done.stderr
    assert "0.75   1  0.5623  0.5977        6.29" in done.stdout
    assert (tmp_path / "truncation_process.png").read_bytes().startswith(b"\x89PNG")
    wrong = run("--output", tmp_path, "--probabilities", 0.5)
    assert wrong.returncode == 2 and len(wrong.stderr.splitlines()) == 1


@pytest.mark.slow
def test_trained_models_are_compared_with_the_formula(tmp_path):
    """A minute of training: model A knows all there is, model B is near where it has seen some tokens."""
    done = run("--output", tmp_path, "--probabilities", 0.75, "--train", "--steps", 150)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in (tmp_path / "truncation_process.txt").read_text().splitlines()]
    compared = {int(row[1]): [float(row[4]), float(row[7])] for row in rows if len(row) == 8 and row[0] == "0.75"}
    assert sorted(compared) == [1, 2, 4, 8, 16, 32]
    assert all(abs(of_a) < 2 for of_a, _ in compared.values())
    assert all(abs(compared[m][1]) < 3 for m in (8, 16, 32))
