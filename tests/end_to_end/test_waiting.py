"""The time that ranks wait for the slowest, as the trainer logs it: it falls with balanced batches as the works say."""

import json

import numpy as np
import pytest

pytest.importorskip("deepspeed")
pytest.importorskip("tokenizers")

from helpers.datasets import documents_of, write
from helpers.launching import make_corpus, train
from helpers.megatron_helpers import build, config

from megatron_bfp import BalancedDataset

RANKS, MICRO_BATCHES, STEPS, SEQ_LENGTH = 4, 4, 8, 2048
BATCH = RANKS * MICRO_BATCHES
MODEL = ("--num-layers", 1, "--hidden-size", 64, "--ffn-hidden-size", 64, "--num-attention-heads", 32)
"""Attention takes most of the time: with heads of 2, its exponentials do."""
SIZES = ("--seq-length", SEQ_LENGTH, "--micro-batch-size", 1, "--global-batch-size", BATCH)
SIZES += ("--split", "1,0,0", "--zero-stage", 1)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    """Documents of any length, so that some sequences have one and others fifty."""
    rng = np.random.default_rng(0)
    lengths = np.concatenate([rng.lognormal(4.0, 0.5, 1500), rng.integers(800, 2048, 70)]).astype(int)
    documents = [[1 + token % 500 for token in document] for document in documents_of(lengths.tolist())]
    return write(tmp_path_factory.mktemp("data") / "data", documents).prefix


def measured(corpus, prefix, log, *options):
    """Slowest over mean of each step, as it was logged."""
    train(
        corpus,
        *("--data-path", prefix, *MODEL, *SIZES, "--json-log", log, *options),
        ranks=RANKS,
        train_iters=STEPS,
        launcher="ranks",
    )
    return np.array([json.loads(line)["slowest_over_mean"] for line in log.read_text().splitlines()])


def works(prefix, balanced):
    """float64 [steps, ranks, micro-batches], in L squared."""
    dataset = build([STEPS * BATCH, 0, 0], config(([prefix], None), SEQ_LENGTH))[0]
    sample_of = BalancedDataset(dataset, BATCH).sample_of if balanced else int
    works = dataset.work_of(np.array([sample_of(slot) for slot in range(STEPS * BATCH)]))
    return works.reshape(STEPS, MICRO_BATCHES, RANKS).transpose(0, 2, 1) / SEQ_LENGTH**2


def simulated(works, coefficient):
    """Slowest over mean of each step, if a sample costs 1 + coefficient * work."""
    costs = (1 + coefficient * works).sum(axis=2)
    return costs.max(axis=1) / costs.mean(axis=1)


@pytest.mark.slow
def test_ranks_wait_less_with_balanced_batches_as_simulated(corpus, prefix, tmp_path):
    plain = measured(corpus, prefix, tmp_path / "plain", "--balance-batches", 0)[1:]  # the first step also warms up
    balanced = measured(corpus, prefix, tmp_path / "balanced")[1:]
    before, after = (works(prefix, is_balanced)[1:] for is_balanced in (False, True))
    coefficients = np.geomspace(0.1, 1000, 500)
    errors = [np.abs(simulated(before, coefficient) - plain).sum() for coefficient in coefficients]
    fitted = coefficients[int(np.argmin(errors))]
    expected = simulated(before, fitted), simulated(after, fitted)
    print(f"cost of a sample 1 + {fitted:.2f} work / L^2")
    for name, seen, simulation in zip(("in random order", "balanced"), (plain, balanced), expected):
        print(f"{name}: slowest over mean {seen.mean():.3f}, simulated {simulation.mean():.3f}; {seen} {simulation}")
