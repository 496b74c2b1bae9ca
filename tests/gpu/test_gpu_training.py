"""The example trainer on a GPU, started with the real launcher: fused attention trains as the reference does, fast."""

import re

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")
pytest.importorskip("tokenizers")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

from helpers.launching import STEP, launch, make_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def run(corpus, *options, **keywords):
    """Losses, and the output."""
    status, output = launch(corpus, "--bf16", "--zero-stage", 1, *options, ranks=1, on_gpu=True, **keywords)
    assert status == 0, output[-5000:]
    return [float(loss) for _, loss, *_ in STEP.findall(output)], output


def test_fused_attention_trains_as_the_reference(corpus):
    fused, output = run(corpus)
    kernel = re.search(r"^attention kernel: (\S+)", output, re.MULTILINE).group(1)
    reference, _ = run(corpus, "--attention-kernel", "sdpa")
    print(f"\n{kernel}: losses {fused}; sdpa: {reference}")
    assert kernel != "sdpa"
    assert output.count("| slowest/mean 1.00 |") == len(fused)
    assert fused == pytest.approx(reference, abs=0.02)


@pytest.mark.parametrize("recompute", [[], ["--recompute-granularity", "full"]], ids=["plain", "recomputation"])
def test_a_billion_parameters_train(corpus, recompute):
    shape = ("--num-layers", 16, "--hidden-size", 2048, "--num-attention-heads", 16, "--seq-length", 2048)
    losses, output = run(corpus, *shape, "--micro-batch-size", 4, "--lr", "3e-4", *recompute, train_iters=16)
    parameters = re.search(r"parameters: (\S+)", output).group(1)
    steps = [line.split("consumed samples")[1] for line in output.splitlines() if line.startswith("iteration ")]
    print(f"\n{parameters} parameters on {torch.cuda.get_device_name()}: consumed samples{steps[-1]}")
    assert losses[-1] < losses[0] - 1
    assert float(re.search(r"mfu ([0-9.]+)", steps[-1]).group(1)) > 0.1
