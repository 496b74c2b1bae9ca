"""A GPTModel whose rows are split over 2 and 4 ranks has the losses and gradients of one rank."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("deepspeed")

from helpers.datasets import ROOT

pytestmark = pytest.mark.slow  # 15 s of processor time for each number of ranks; attention itself is tested quickly


@pytest.fixture(scope="module", params=[2, 4])
def results(request, tmp_path_factory):
    """What each rank found in each case."""
    folder = tmp_path_factory.mktemp("ranks")
    program = ROOT / "tests/helpers/programs/context_parallel_model.py"
    done = subprocess.run([sys.executable, program, str(request.param), folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [result for path in sorted(folder.glob("*.json")) for result in json.loads(path.read_text())]


def test_losses_are_those_of_one_rank(results):
    for way, tolerance in (("ulysses", 0), ("gather", 1e-5)):
        loss = max(result["loss"] for result in results if result["way"] == way)
        print(f"{way}: losses of tokens differ by {loss:.1e}")
        assert loss <= tolerance


def test_gradients_are_those_of_one_rank(results):
    gradient = max(result["gradient"] for result in results)
    print(f"gradients differ by {gradient:.1e} of the largest")
    assert gradient < 1e-5


def test_control_megatron_s_own_path_has_other_losses(results):
    assert min(result["loss_of_upstream"] for result in results) > 1e-2


def test_control_the_gradient_of_a_rank_s_own_share_is_another(results):
    assert min(result["gradient_of_own_share"] for result in results) > 0.1
