"""Attention split over 2 and 4 ranks, by both ways, equals attention of one rank; only what is needed is sent."""

import json
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from helpers.context_parallel_kernels import check_kernels
from helpers.datasets import ROOT

from megatron_bfp import OptionError
from megatron_bfp.attention.boundaries import Boundaries
from megatron_bfp.attention.context_parallel import GatherPlan, Shards, ulysses
from megatron_bfp.attention.kernels import sdpa_per_document

CASES = 24


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def results(request, tmp_path_factory):
    """What each rank found in each case, by way and dtype."""
    folder = tmp_path_factory.mktemp("ranks")
    program = ROOT / "tests/helpers/programs/context_parallel_cases.py"
    done = subprocess.run([sys.executable, program, str(request.param), folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [result for path in sorted(folder.glob("*.json")) for result in json.loads(path.read_text())]


def of(results, **wanted):
    chosen = [result for result in results if all(result[name] == value for name, value in wanted.items())]
    assert chosen
    return chosen


def test_cases_are_of_every_kind(results):
    assert {result["case"] for result in results} == set(range(CASES))
    assert {result["rows"] for result in results} == {1, 2, 3, 4}
    assert {(8, 8), (8, 2), (8, 1), (12, 3)} <= {tuple(result["heads"]) for result in of(results, way="ulysses")}
    lengths = {length / result["row_length"] for result in results for length in result["lengths"]}
    assert max(lengths) == 1 and any(result["lengths"] == [1] for result in results)


def test_by_heads_outputs_are_bitwise_those_of_one_rank(results):
    assert all(result["is_bitwise"] for result in of(results, way="ulysses"))


@pytest.mark.parametrize("way", ["ulysses", "gather"])
@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-6), ("bfloat16", 0.02)])
def test_outputs_and_gradients_are_those_of_one_rank(results, way, dtype, tolerance):
    chosen = of(results, way=way, dtype=dtype)
    largest = {name: max(result[name] for result in chosen) for name in ("output", "gradient")}
    print(f"{way}, {dtype}: outputs differ by {largest['output']:.1e}, gradients by {largest['gradient']:.1e}")
    assert largest["output"] <= tolerance and largest["gradient"] <= 10 * tolerance


def test_control_another_rank_s_shard_is_another_output(results):
    assert min(result["other_shards"] for result in results) > 0.1


def test_control_megatron_s_own_path_is_right_for_rows_of_one_document_only(results):
    """It takes documents to be cut by zigzag, not rows."""
    cases = {}
    for result in of(results, way="upstream", dtype="float32"):
        cases.setdefault((result["case"], result["lengths"] == [result["row_length"]]), []).append(result["output"])
    for (case, is_whole), outputs in cases.items():
        assert max(outputs) <= 1e-6 if is_whole else max(outputs) > 1e-2, case
    assert any(is_whole for _, is_whole in cases) and len(cases) > 10


@pytest.mark.slow
def test_what_gpus_are_tested_with_runs_on_the_cpu_too(tmp_path):
    """tests/gpu/test_gpu_context_parallel.py, with the one kernel that needs no GPU."""
    check_kernels(tmp_path, "cpu", ["sdpa"])


@pytest.mark.parametrize("is_zigzag", [True, False])
def test_ranks_hold_each_position_once(is_zigzag):
    shards = Shards(num_ranks=4, num_rows=3, row_length=16, is_zigzag=is_zigzag)
    held = torch.cat([shards.positions(rank) for rank in range(4)])
    assert sorted(held.tolist()) == list(range(48)) and shards.positions_per_rank == 12


def test_zigzag_is_megatron_s():
    assert Shards(2, 1, 8).positions(0).tolist() == [0, 1, 6, 7]
    assert Shards(2, 1, 8).positions(1).tolist() == [2, 3, 4, 5]
    assert Shards(2, 2, 8, is_zigzag=False).positions(1).tolist() == [4, 5, 6, 7, 12, 13, 14, 15]


@pytest.mark.parametrize("row_length, is_zigzag", [(10, True), (9, False)])
def test_rows_that_cannot_be_split_are_refused(row_length, is_zigzag):
    with pytest.raises(OptionError, match=f"rows of {row_length} positions .* multiple of"):
        Shards(4, 1, row_length, is_zigzag)


def test_heads_that_cannot_be_divided_are_refused():
    tensor = torch.zeros(4, 6, 8)
    with pytest.raises(OptionError, match="6 attention heads cannot be divided among 4"):
        ulysses(tensor, tensor, tensor, None, Shards(4, 1, 16), None, sdpa_per_document, 1.0, 0.0)


def plan_of(offsets, rank, num_ranks=2, is_zigzag=False):
    row_length = offsets[-1]
    boundaries = Boundaries.of_rows(torch.tensor([offsets + [row_length] * (row_length + 1 - len(offsets))]))
    return GatherPlan.of(boundaries, Shards(num_ranks, 1, row_length, is_zigzag), rank, torch.device("cpu"))


def test_only_what_documents_need_is_sent():
    for rank in (0, 1):  # a boundary at the edge of the shards: nothing
        plan = plan_of([0, 4, 8], rank)
        assert plan.send_counts[1 - rank] == 0 and plan.receive_counts == [4 * (rank == 0), 4 * (rank == 1)]
    later = plan_of([0, 3, 8], 1)  # a document of the positions 3 to 7: the second rank needs position 3 too
    assert later.receive_counts == [1, 4] and later.boundaries.offsets == [0, 4]
    assert later.boundaries.keys.offsets == [0, 5]
    assert plan_of([0, 3, 8], 0).send_counts == [4, 1]  # to itself what it has, to the other one position
    assert plan_of([0, 8], 1).receive_counts == [4, 4]  # the control: one document needs all


def test_a_plan_is_made_once_for_all_layers():
    boundaries = Boundaries.of_rows(torch.tensor([[0, 3, 8, 8, 8, 8, 8, 8, 8]]))
    shards, device = Shards(2, 1, 8), torch.device("cpu")
    assert GatherPlan.of(boundaries, shards, 0, device) is GatherPlan.of(boundaries, shards, 0, device)
    assert GatherPlan.of(boundaries, shards, 0, device) is not GatherPlan.of(boundaries, shards, 1, device)
