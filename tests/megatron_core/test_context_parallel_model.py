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
    assert {result["way"] for result in results} == {"ulysses", "gather"}
    for result in results:
        assert result["loss"] <= (0 if result["way"] == "ulysses" else 1e-5), result


def test_gradients_are_those_of_one_rank(results):
    assert max(result["gradient"] for result in results) < 1e-5


def test_control_attention_inside_shards_has_other_losses(results):
    assert min(result["loss_inside_shards"] for result in results) > 1e-2


def test_control_the_gradient_of_a_rank_s_own_share_is_another(results):
    assert min(result["gradient_of_own_share"] for result in results) > 0.1
