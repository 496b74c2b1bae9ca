"""Megatron-LM's own pretrain_gpt.py with ``--data-impl bfp`` and context parallelism, from a real checkout, on the CPU.

MEGATRON_LM_PATH=CHECKOUT bash tests/run.sh --integration
"""

import pytest
from helpers.launching import make_corpus
from helpers.real_megatron.lm import NEEDS_CHECKOUT, losses, train

pytestmark = [pytest.mark.integration, NEEDS_CHECKOUT]
LAYOUTS = {
    "cp 2": (2, ["--context-parallel-size", 2]),
    "cp 2, keys gathered": (2, ["--context-parallel-size", 2, "--cp-comm-type", "all_gather"]),
    "cp 4": (4, ["--context-parallel-size", 4]),
    "cp 2, tp 2": (4, ["--context-parallel-size", 2, "--tensor-model-parallel-size", 2]),
    "cp 2, dp 2": (4, ["--context-parallel-size", 2]),
}


@pytest.fixture(scope="module")
def checkout(megatron_lm):
    return megatron_lm


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def run(checkout, corpus, *options, ranks=1):
    script = ["-m", "megatron_bfp", checkout / "pretrain_gpt.py", "--data-impl", "bfp"]
    return train(checkout, corpus, script, *options, ranks=ranks)


@pytest.fixture(scope="module")
def of_one_rank(checkout, corpus):
    """Losses by micro-batch size."""
    return {size: losses(run(checkout, corpus, "--micro-batch-size", size)[0]) for size in (1, 2)}


@pytest.mark.parametrize("micro_batch_size", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_those_of_one_rank(checkout, corpus, of_one_rank, layout, micro_batch_size):
    ranks, options = LAYOUTS[layout]
    steps, output = run(checkout, corpus, *options, "--micro-batch-size", micro_batch_size, ranks=ranks)
    assert losses(steps) == pytest.approx(of_one_rank[micro_batch_size], abs=1e-5)
    assert "rotary positions run on through the sequence" in output


def test_losses_without_per_token_loss(checkout, corpus, of_one_rank):
    """Each target counts the same inside a micro-batch, whatever rank holds it."""
    script = ["-m", "megatron_bfp", checkout / "pretrain_gpt.py", "--data-impl", "bfp"]
    left_out = {"without": ("--calculate-per-token-loss",)}
    one, _ = train(checkout, corpus, script, **left_out)
    two, _ = train(checkout, corpus, script, "--context-parallel-size", 2, ranks=2, **left_out)
    assert losses(two) == pytest.approx(losses(one), abs=1e-5)
    assert losses(one) != of_one_rank[2]  # the control: a mean of means is another loss
