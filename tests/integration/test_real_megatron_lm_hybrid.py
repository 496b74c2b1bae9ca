"""Megatron-LM's own pretrain_hybrid.py with ``--data-impl bfp`` and context parallelism, from a real checkout, on the
CPU: state space layers by a scan that is written out, in place of mamba_ssm's kernels.

MEGATRON_LM_PATH=CHECKOUT bash tests/run.sh --integration
"""

import os

import pytest
from helpers.datasets import ROOT
from helpers.launching import ENVIRONMENT, make_corpus
from helpers.real_megatron.lm import NEEDS_CHECKOUT, ON_CPU, STEP, launch

pytestmark = [pytest.mark.integration, NEEDS_CHECKOUT]
PATTERN = "M-M*"
HYBRID = f"""--hybrid-layer-pattern {PATTERN} --spec hybrid_spec hybrid --mamba-num-groups 2 --mamba-state-dim 16
    --mamba-head-dim 16 --train-iters 3 --eval-iters 0 --init-method-std 0.2""".split()
LAYOUTS = {
    "cp 2": (2, ["--context-parallel-size", 2]),
    "cp 4": (4, ["--context-parallel-size", 4]),
}
HOOKS = ["HybridModel.forward", "pre_conv_ssm", "post_conv_ssm"]


@pytest.fixture(scope="module")
def checkout(megatron_lm):
    return megatron_lm


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def run(checkout, corpus):
    """Losses and gradient norms of three steps, and the output; each run is made once."""
    on_cpu = os.pathsep.join([str(ROOT / "tests/integration/mixers_on_cpu"), ENVIRONMENT["PYTHONPATH"]])
    kept = {}

    def run_once(*options, ranks=1, what="batches"):
        if (options, what) not in kept:
            script = [ON_CPU / "watched.py", what, checkout / "pretrain_hybrid.py", "--data-impl", "bfp"]
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(ENVIRONMENT, "PYTHONPATH", on_cpu)
                _, output = launch(checkout, corpus, script, *HYBRID, *options, ranks=ranks, without=("--num-layers",))
            steps = [(float(loss), float(norm)) for _, _, loss, norm in STEP.findall(output)]
            kept[options, what] = [step[0] for step in steps], [step[1] for step in steps], output
        return kept[options, what]

    return run_once


@pytest.mark.parametrize("micro_batch_size", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_gradients_of_hybrid_models_are_those_of_one_rank(run, layout, micro_batch_size):
    ranks, options = LAYOUTS[layout]
    size = ["--micro-batch-size", micro_batch_size]
    losses, norms, output = run(*size)
    assert len(losses) == 3, output[-5000:]
    of_split, norms_of_split, output = run(*options, *size, ranks=ranks)
    assert of_split == pytest.approx(losses, abs=1e-5), output[-5000:]
    assert norms_of_split == pytest.approx(norms, abs=2e-3)  # as it is printed
    assert "1 x DocumentAttention by sdpa" in output and "2 x MambaMixer" in output


@pytest.mark.parametrize("function", HOOKS)
def test_each_hook_on_hybrid_models_is_needed(run, function):
    """The control: without it a run stops, or has other losses."""
    losses, _, _ = run("--micro-batch-size", 2)
    of_split, _, _ = run("--context-parallel-size", 2, "--micro-batch-size", 2, ranks=2, what=f"without={function}")
    assert of_split != pytest.approx(losses, abs=1e-5)
