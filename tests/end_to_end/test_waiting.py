"""The time that ranks wait for the slowest, as the trainer logs it: it falls with balanced batches as the works say."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")
pytest.importorskip("tokenizers")

from helpers.datasets import documents_of, write
from helpers.launching import make_corpus, train
from helpers.megatron_helpers import build, config

from megatron_bfp import BalancedDataset
from megatron_bfp.attention.boundaries import Boundaries
from megatron_bfp.attention.context_parallel import GatherPlan, Shards

RANKS, MICRO_BATCHES, STEPS, SEQ_LENGTH = 4, 4, 8, 2048
MODEL = ("--num-layers", 1, "--hidden-size", 64, "--ffn-hidden-size", 64, "--num-attention-heads", 32)
"""Attention takes most of the time: with heads of 2, its exponentials do."""
SIZES = ("--seq-length", SEQ_LENGTH, "--micro-batch-size", 1, "--split", "1,0,0", "--zero-stage", 1)


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


def measured(corpus, prefix, log, *options, ranks=RANKS):
    """Slowest over mean of each step but the first, which warms up, as it was logged."""
    train(
        corpus,
        *("--data-path", prefix, *MODEL, *SIZES, "--json-log", log, *options),
        ranks=ranks,
        train_iters=STEPS,
        launcher="ranks",
    )
    return np.array([json.loads(line)["slowest_over_mean"] for line in log.read_text().splitlines()])[1:]


def works(prefix, balanced, groups):
    """float64 [steps but the first, groups of ranks that share sequences, micro-batches], in L squared."""
    batch = groups * MICRO_BATCHES
    dataset = build([STEPS * batch, 0, 0], config(([prefix], None), SEQ_LENGTH))[0]
    sample_of = BalancedDataset(dataset, batch).sample_of if balanced else int
    works = dataset.work_of(np.array([sample_of(slot) for slot in range(STEPS * batch)]))
    return works.reshape(STEPS, MICRO_BATCHES, groups).transpose(0, 2, 1)[1:] / SEQ_LENGTH**2


def simulated(works, coefficient):
    """Slowest over mean of each step, if a sample costs 1 + coefficient * work."""
    costs = (1 + coefficient * works).sum(axis=2)
    return costs.max(axis=1) / costs.mean(axis=1)


@pytest.mark.slow
@pytest.mark.parametrize("context_parallel, tolerance, share", [(1, 0.05, 0.5), (2, 0.03, 0.7)])
def test_ranks_wait_less_with_balanced_batches_as_simulated(
    corpus, prefix, tmp_path, context_parallel, tolerance, share
):
    """What a work costs is fitted to the random order, so the balanced one is a prediction. Ranks that share sequences
    and exchange heads work alike, so that fewer groups wait less to begin with."""
    groups = RANKS // context_parallel
    options = ("--global-batch-size", groups * MICRO_BATCHES, "--context-parallel-size", context_parallel)
    plain = measured(corpus, prefix, tmp_path / "plain", *options, "--balance-batches", 0)
    balanced = measured(corpus, prefix, tmp_path / "balanced", *options)
    before, after = (works(prefix, is_balanced, groups) for is_balanced in (False, True))
    coefficients = np.geomspace(0.1, 100, 500).tolist()
    fitted = min(coefficients, key=lambda coefficient: np.abs(simulated(before, coefficient) - plain).sum())
    expected_plain, expected = simulated(before, fitted), simulated(after, fitted)
    print(f"a sample costs 1 + {fitted:.2f} work / L^2; slowest over mean of the steps, and simulated:")
    print(f"in random order {plain.mean():.3f}, {expected_plain.mean():.3f}: {plain.round(3)}")
    print(f"balanced {balanced.mean():.3f}, {expected.mean():.3f}: {balanced.round(3)}")
    assert fitted > 1  # attention dominates where a sequence is one document
    assert np.corrcoef(plain, expected_plain)[0, 1] > 0.9
    assert balanced.mean() == pytest.approx(expected.mean(), abs=tolerance)
    assert balanced.mean() - 1 < share * (plain.mean() - 1)
    assert plain.mean() != pytest.approx(expected.mean(), abs=2 * tolerance)  # as if nothing had been balanced


def works_of_gathered_keys(prefix):
    """float64 [steps but the first, 2 ranks, 2 micro-batches], in L squared: products of queries and keys."""
    dataset = build([2 * STEPS, 0, 0], config(([prefix], None), SEQ_LENGTH))[0]

    def work(slot, rank):
        boundaries = Boundaries.of_rows(dataset[slot]["cu_seqlens"][None])
        own = GatherPlan.of(boundaries, Shards(2, 1, SEQ_LENGTH), rank, torch.device("cpu")).boundaries
        queries, keys = np.diff(own.offsets), np.diff(own.keys.offsets)
        return np.where(queries == keys, queries**2 / 2, queries * keys).sum()  # sdpa skips half of a causal square

    works = np.array([[work(slot, rank) for rank in (0, 1)] for slot in range(2 * STEPS)])
    return works.reshape(STEPS, 2, 2).transpose(0, 2, 1)[1:] / SEQ_LENGTH**2


@pytest.mark.slow
def test_ranks_that_gather_keys_wait_for_each_other(corpus, prefix, tmp_path):
    """Two ranks that share sequences: exchanged heads are even work, but their documents need different keys."""
    options = ("--global-batch-size", 2, "--context-parallel-size", 2)
    exchanged = measured(corpus, prefix, tmp_path / "exchanged", *options, ranks=2)
    gathered = measured(corpus, prefix, tmp_path / "gathered", *options, "--cp-comm-type", "all_gather", ranks=2)
    expected = simulated(works_of_gathered_keys(prefix), 4)
    print(f"heads exchanged {exchanged.mean():.3f}: {exchanged.round(3)}")
    print(f"keys gathered {gathered.mean():.3f}, simulated {expected.mean():.3f}: {gathered.round(3)}")
    assert np.corrcoef(gathered, expected)[0, 1] > 0.9
    assert gathered.max() > 1.15 and np.median(exchanged) < 1.05
