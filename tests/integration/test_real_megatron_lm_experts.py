"""Experts of joined rows in Megatron-LM's own pretrain_gpt.py, from a real checkout, on the CPU: balance inside each
sequence, and plans of multi-token prediction.

MEGATRON_LM_PATH=CHECKOUT bash tests/run.sh --integration
"""

import re

import pytest
from helpers.launching import make_corpus
from helpers.real_megatron.lm import NEEDS_CHECKOUT, ON_CPU, launch, train

pytestmark = [pytest.mark.integration, NEEDS_CHECKOUT]
EXPERTS = """--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --train-iters 3 --eval-iters 0
    --init-method-std 0.2""".split()
BY_SEQUENCE = [*EXPERTS, "--moe-router-load-balancing-type", "seq_aux_loss", "--moe-aux-loss-coeff", 1]
IN_TWO = ["--context-parallel-size", 2]
TENSORS = ["--tensor-model-parallel-size", 2, "--sequence-parallel"]
LAYOUTS = {
    "context parallelism": (2, IN_TWO),
    "sequence parallelism": (2, TENSORS),
    "both": (4, [*IN_TWO, *TENSORS]),
}
FIGURES = ("lm loss", "seq_load_balancing_loss", "mtp_1 loss", "grad norm")


@pytest.fixture(scope="module")
def checkout(megatron_lm):
    return megatron_lm


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def run(checkout, corpus):
    """What each step prints: {name: a figure for each step}; each run is made once."""
    kept = {}

    def run_once(*options, ranks=1, what="batches"):
        if (options, what) not in kept:
            script = [ON_CPU / "watched.py", what, checkout / "pretrain_gpt.py", "--data-impl", "bfp"]
            _, output = train(checkout, corpus, script, *options, ranks=ranks)
            steps = [line for line in output.splitlines() if re.search(r" iteration +\d+/", line)]
            assert len(steps) == 3
            kept[options, what] = {
                name: [float(re.search(rf" {name}: (\S+)", step)[1]) for step in steps]
                for name in FIGURES
                if f" {name}: " in steps[0]
            }
        return kept[options, what]

    return run_once


def alike(figures, others):
    """Whether losses agree in all digits but the last, and gradients as they are printed."""
    assert figures.keys() == others.keys()
    return all(
        figures[name] == pytest.approx(others[name], abs=2e-3 if name == "grad norm" else 1e-5) for name in figures
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_are_balanced_in_each_sequence(run, layout):
    """As in micro-batches of one sequence on one rank. The control: as joined rows, other losses.

    If a rank has whole rows, Megatron-LM separates them itself.
    """
    ranks, options = LAYOUTS[layout]
    options = [*BY_SEQUENCE, *options, "--micro-batch-size", 4 if ranks == 2 else 2]
    expected = run(*BY_SEQUENCE, "--micro-batch-size", 1)
    assert "seq_load_balancing_loss" in expected and alike(run(*BY_SEQUENCE, "--micro-batch-size", 2), expected)
    assert alike(run(*options, ranks=ranks), expected)
    as_one = run(*options, ranks=ranks, what="without=_apply_seq_aux_loss")
    assert abs(as_one["seq_load_balancing_loss"][0] - expected["seq_load_balancing_loss"][0]) > 1e-3


OVERLAP = "--overlap-moe-expert-parallel-comm"
LATER = [*BY_SEQUENCE, "--expert-model-parallel-size", 2, "--mtp-num-layers", 1, "--bf16", "--lr", 0, "--min-lr", 0]
"""Weights stay, because in bf16 a plan adds up the gradients of the embedding in another order."""


@pytest.mark.parametrize("spec", ["like_transformer_engine", "packed"])
def test_a_plan_of_later_tokens_has_the_losses_of_an_ordinary_step(run, spec):
    """With boundaries of joined rows and of rows, and experts that are balanced in each sequence."""
    options = [*LATER, "--spec", "layer_spec", spec]
    expected = run(*options, ranks=2)
    assert alike(run(*options, OVERLAP, ranks=2), expected)
    assert {"mtp_1 loss", "seq_load_balancing_loss"} < expected.keys()


def test_the_hooks_on_plans_are_needed(run, checkout, corpus):
    """The controls: Megatron-LM asserts that there are no boundaries, and balances joined rows as one sequence."""
    options = [*LATER, "--spec", "layer_spec", "packed"]
    script = [ON_CPU / "watched.py", "without=build_mtp_layer_callables", checkout / "pretrain_gpt.py"]
    status, output = launch(checkout, corpus, script, "--data-impl", "bfp", *options, OVERLAP, ranks=2)
    assert status != 0 and "sequence packing is not yet supported" in output
    balance, expected = "seq_load_balancing_loss", run(*options, ranks=2)
    as_one = run(*options, OVERLAP, ranks=2, what="without=_apply_seq_aux_loss")
    assert abs(as_one[balance][0] - expected[balance][0]) > 1e-3
