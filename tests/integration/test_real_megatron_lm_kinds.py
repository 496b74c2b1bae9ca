"""Each kind of model that Megatron-LM publishes a configuration of, reduced, from a real checkout, on the CPU.

MEGATRON_LM_PATH=CHECKOUT bash tests/run.sh --integration
"""

import os
from pathlib import Path

import pytest
from helpers.datasets import ROOT
from helpers.launching import ENVIRONMENT, make_corpus
from helpers.real_megatron.lm import CHECKOUT, NEEDS_CHECKOUT, ON_CPU, losses, train, watched
from helpers.real_megatron.published import published, reduced

pytestmark = [pytest.mark.integration, NEEDS_CHECKOUT]
KINDS = {
    "GPT-3": "examples/gpt3/train_gpt3_175b_distributed.sh",
    "LLaMA": "examples/llama/train_llama3_8b_h100_fp8.sh",
    "Mixtral": "tests/functional_tests/test_cases/mixtral/mixtral_8x7b_alltoall_tp2pp4ep4_release/model_config.yaml",
    "DeepSeek-V3": (
        "tests/functional_tests/test_cases/mixtral/deepseekv3_proxy_flex_tp1pp4emp16etp1cp1_release/model_config.yaml"
    ),
    "gpt-oss": "examples/gptoss/02_train.sh",
}
"""Name -> its configuration in the checkout."""
HYBRID = "tests/functional_tests/test_cases/hybrid/hybrid_mr_mcore_te_tp1_pp1_cp1_dgx_a100_1N8G/model_config.yaml"
OF_LLAMA = (
    "--swiglu",
    "--normalization",
    "--disable-bias-linear",
    "--group-query-attention",
    "--num-query-groups",
    "--position-embedding-type",
    "--untie-embeddings-and-output-weights",
)
"""What the model of other tests has, and not each kind."""
HAS = {
    "GPT-3": "learned positions",
    "LLaMA": "2 x DocumentAttention by sdpa; rotary positions",
    "DeepSeek-V3": "1 x MultiTokenPredictionLayer",
}
"""What the first step shows of some."""


@pytest.fixture(scope="module")
def checkout(megatron_lm):
    return megatron_lm


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def losses_of(steps, output):
    """Mean losses of next tokens: of the step, of the documents alone, and of rows as if each were one document; and
    the summed losses of later tokens of all three."""
    batches = watched(output)
    assert len(batches) == 4
    targets = sum(batch["targets"] for batch in batches)
    alone, as_one = (
        [sum(values) for values in zip(*(batch[name] for batch in batches))] for name in ("alone", "as_one")
    )
    of_next = losses(steps)[0], alone[0] / targets, as_one[0] / targets
    return of_next, (sum(batch["later"] for batch in batches), alone[1], as_one[1])


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_loss_is_that_of_the_documents_alone(checkout, corpus, kind, dispatcher):
    options = reduced(published(Path(CHECKOUT, KINDS[kind])))
    if "--num-experts" not in options and dispatcher == "allgather":
        pytest.skip("no experts")
    if "--num-experts" in options:
        options += ["--moe-token-dispatcher-type", dispatcher]
    script = [ON_CPU / "documents_alone.py", checkout / "pretrain_gpt.py", "--data-impl", "bfp"]
    steps, output = train(checkout, corpus, script, *options, "--train-iters", 1, without=OF_LLAMA)
    (of_step, alone, as_one), later = losses_of(steps, output)
    print(f"{kind}: documents alone {abs(of_step - alone):.1e}, control {abs(as_one - alone):.1e}; later {later}")
    assert of_step == pytest.approx(alone, abs=1e-5)
    assert abs(as_one - alone) > 1e-3  # the control: attention that crosses documents has another loss
    assert HAS.get(kind, "") in output
    assert any(later) == ("--mtp-num-layers" in options)
    if any(later):
        assert later[0] == pytest.approx(later[1], rel=1e-6) and abs(later[2] - later[1]) > 1e-4 * later[1]


DELTA_NET = """G-G* --swiglu --linear-key-head-dim 16 --linear-value-head-dim 16 --linear-num-key-heads 2
    --linear-num-value-heads 4""".split()
MIXERS = {
    "MambaMixer": ["M-M*", "--mamba-num-groups", 1, "--mamba-state-dim", 16, "--mamba-head-dim", 32],
    "GatedDeltaNet": DELTA_NET,
    "GatedDeltaNet, deterministic": [*DELTA_NET, "--deterministic-mode"],
}
"""Class of layers -> a pattern that has them, and options."""


@pytest.mark.parametrize("mixer", MIXERS)
def test_the_state_of_hybrid_layers_begins_anew_in_each_document(checkout, corpus, monkeypatch, mixer):
    """By scans that are written out, in place of the kernels of mamba_ssm and flash-linear-attention."""
    on_cpu = os.pathsep.join([str(ROOT / "tests/integration/mixers_on_cpu"), ENVIRONMENT["PYTHONPATH"]])
    monkeypatch.setitem(ENVIRONMENT, "PYTHONPATH", on_cpu)
    options = [*reduced(published(Path(CHECKOUT, HYBRID))), "--hybrid-layer-pattern", *MIXERS[mixer]]
    options += ["--spec", "hybrid_spec", "hybrid", "--train-iters", 1]
    script = [ON_CPU / "documents_alone.py", checkout / "pretrain_hybrid.py", "--data-impl", "bfp"]
    steps, output = train(checkout, corpus, script, *options, without=(*OF_LLAMA, "--num-layers"))
    (of_step, alone, as_one), _ = losses_of(steps, output)
    print(f"hybrid, {mixer}: documents alone {abs(of_step - alone):.1e}, control {abs(as_one - alone):.1e}")
    assert of_step == pytest.approx(alone, abs=1e-5)
    assert abs(as_one - alone) > 1e-3
    assert "1 x DocumentAttention by sdpa" in output and f"2 x {mixer.split(',')[0]}" in output
