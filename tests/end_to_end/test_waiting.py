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
    """What a work costs is fitted to the random order, so the balanced one is a prediction."""
    plain = measured(corpus, prefix, tmp_path / "plain", "--balance-batches", 0)[1:]  # the first step warms up, too
    balanced = measured(corpus, prefix, tmp_path / "balanced")[1:]
    before, after = (works(prefix, is_balanced)[1:] for is_balanced in (False, True))
    coefficients = np.geomspace(0.1, 100, 500).tolist()
    fitted = min(coefficients, key=lambda coefficient: np.abs(simulated(before, coefficient) - plain).sum())
    expected_plain, expected = simulated(before, fitted), simulated(after, fitted)
    print(f"a sample costs 1 + {fitted:.2f} work / L^2; slowest over mean of the steps, and simulated:")
    print(f"in random order {plain.mean():.3f}, {expected_plain.mean():.3f}: {plain.round(3)}")
    print(f"balanced {balanced.mean():.3f}, {expected.mean():.3f}: {balanced.round(3)}")
    assert fitted > 1  # attention dominates where a sequence is one document
    assert np.corrcoef(plain, expected_plain)[0, 1] > 0.9
    assert balanced.mean() == pytest.approx(expected.mean(), abs=0.05)
    assert balanced.mean() - 1 < 0.5 * (plain.mean() - 1)
    assert plain.mean() != pytest.approx(expected.mean(), abs=0.1)  # as if nothing had been balanced
