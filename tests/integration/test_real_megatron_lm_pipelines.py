"""Pipelines of joined rows and schedule plans in Megatron-LM's own pretrain_gpt.py, from a real checkout, on the CPU.

MEGATRON_LM_PATH=CHECKOUT bash tests/run.sh --integration
"""

import pytest
from helpers.launching import make_corpus
from helpers.real_megatron.lm import NEEDS_CHECKOUT, ON_CPU, STEP, launch, losses, train, watched

pytestmark = [pytest.mark.integration, NEEDS_CHECKOUT]
TWO_STAGES = ["--data-impl", "bfp", "--pipeline-model-parallel-size", 2, "--train-iters", 3]


@pytest.fixture(scope="module")
def checkout(megatron_lm):
    return megatron_lm


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def shapes(output):
    return {tuple(line["shape"]) for line in watched(output) if line["what"] == "shape"}


def exchanges(output):
    return sum(line["what"] == "exchange of shapes" for line in watched(output))


def run(checkout, corpus, what, *options, launch=train):
    script = [ON_CPU / "watched.py", what, checkout / "pretrain_gpt.py"]
    return launch(checkout, corpus, script, *TWO_STAGES, *options, ranks=2)


def test_experts_by_allgather_train_alike_whatever_the_micro_batch(checkout, corpus):
    """Without an exchange of shapes, which this dispatcher does not allow."""
    experts = ["--num-experts", 4, "--moe-router-topk", 2, "--moe-token-dispatcher-type", "allgather"]
    one, of_one = run(checkout, corpus, "shapes", *experts, "--micro-batch-size", 1)
    two, of_two = run(checkout, corpus, "shapes", *experts, "--eval-micro-batch-size", 4)
    assert losses(two) == pytest.approx(losses(one), abs=1e-5) and len(two) == 3
    assert shapes(of_one) == {(128, 1, 64)}
    assert shapes(of_two) == {(256, 1, 64), (512, 1, 64)}  # of training and evaluation
    assert exchanges(of_one) == exchanges(of_two) == 0


def test_virtual_stages_train_alike_whatever_the_micro_batch(checkout, corpus):
    virtual = ["--num-layers", 4, "--num-virtual-stages-per-pipeline-rank", 2]
    one, _ = run(checkout, corpus, "shapes", *virtual, "--micro-batch-size", 1)
    two, output = run(checkout, corpus, "shapes", *virtual)
    assert losses(two) == pytest.approx(losses(one), abs=1e-5) and len(two) == 3
    assert shapes(output) == {(256, 1, 64)} and exchanges(output) == 0


def test_an_exchange_of_shapes_would_be_seen(checkout, corpus):
    _, output = run(checkout, corpus, "exchange", "--train-iters", 1)
    assert exchanges(output) > 0


def test_without_the_hook_stages_expect_other_shapes(checkout, corpus):
    status, output = run(checkout, corpus, "without=get_forward_backward_func", launch=launch)
    assert status != 0 and not STEP.findall(output)


OVERLAP = """--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall
    --bf16"""


def overlapping(checkout, corpus, what, spec, *options, launch=train):
    script = [ON_CPU / "watched.py", what, checkout / "pretrain_gpt.py", "--data-impl", "bfp"]
    options = ["--spec", "layer_spec", spec, *OVERLAP.split(), "--train-iters", 3, *options]
    return launch(checkout, corpus, script, *options, ranks=2)


@pytest.mark.parametrize("spec, kind", [("like_transformer_engine", "TEDot"), ("packed", "Document")])
def test_fault_A01_a_plan_of_the_forward_pass_gets_the_boundaries(checkout, corpus, spec, kind):
    """Losses are those without overlap, with boundaries of joined rows and of rows."""
    plain, _ = overlapping(checkout, corpus, "batches", spec)
    overlapped, output = overlapping(checkout, corpus, "batches", spec, "--overlap-moe-expert-parallel-comm")
    assert len(overlapped) == 3 and losses(overlapped) == pytest.approx(losses(plain), abs=1e-5)
    assert f"attention inside documents, as the first step showed: 2 x {kind}" in output


@pytest.mark.parametrize("spec", ["like_transformer_engine", "packed"])
def test_fault_A01_a_plan_that_loses_boundaries_stops_in_the_first_step(checkout, corpus, spec):
    """Without the hook; the attention of one spec goes on without boundaries, that of the other stops by itself."""
    overlap = "--overlap-moe-expert-parallel-comm"
    script = "without=get_forward_backward_func", spec, overlap, "--micro-batch-size", 1
    status, output = overlapping(checkout, corpus, *script, launch=launch)
    assert status != 0 and "got no document boundaries" in output and "before the first update" in output
    assert not STEP.findall(output) and "as the first step showed" not in output
