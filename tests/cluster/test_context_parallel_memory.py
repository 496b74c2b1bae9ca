"""Activations of a rank with context parallelism, measured, against one rank that holds whole rows and the estimate."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("megatron.core.models.gpt")
pytest.importorskip("deepspeed")

from cluster.memory import activations, model_of
from cluster.recipe import read_recipe
from helpers.datasets import ROOT
from helpers.launching import ENVIRONMENT
from helpers.programs.context_parallel_memory import CASES, LENGTH, SHAPE, VOCAB
from helpers.recipes import RECIPES

pytestmark = pytest.mark.slow  # 30 s of processor time, most of it for the imports

SIZES = (1, 2, 4)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Of each context-parallel size and each case, the bytes of the rank that keeps most."""
    most = {}
    for size in SIZES:
        folder = tmp_path_factory.mktemp("ranks")
        command = [sys.executable, ROOT / "tests/helpers/programs/context_parallel_memory.py", str(size), folder]
        done = subprocess.run(
            command, capture_output=True, text=True, env=ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": ""}, timeout=280
        )
        assert done.returncode == 0, done.stderr[-3000:]
        ranks = [json.loads(path.read_text()) for path in folder.glob("*.json")]
        assert len(ranks) == size
        most[size] = {case: max(rank[case] for rank in ranks) for case in CASES}
    print(f"\n{'MB of the rank that keeps most':<46}" + "".join(f"{f'CP {size}':>8}" for size in SIZES))
    for case in CASES:
        print(f"{case:<46}" + "".join(f"{most[size][case] / 1e6:8.1f}" for size in SIZES))
    return most


@pytest.mark.parametrize("size", SIZES[1:])
def test_each_rank_keeps_its_share(measured, size):
    for case, options in CASES.items():
        share = measured[size][case] * size / measured[1][case]
        if options["heads"] == 12 or options["recompute_granularity"]:
            assert 0.9 < share < 1.02, case  # four ranks repeat three groups of keys
        elif len(options["lengths"]) > 1:  # keys are gathered, of some documents
            assert share < 1.1, case
        else:  # the control: a rank needs the keys of a whole row
            assert share > 1.1, case


def mask_bytes(options, size):
    """What the CPU's kernel keeps beside, of a document whose keys are gathered: scores to add, of each query and each
    key that its piece needs, on average half of the row."""
    is_gathered = size > 1 and options["heads"] == 15 and options["recompute_granularity"] is None
    return SHAPE["num_layers"] * 4 * LENGTH // size * LENGTH * (2 * size + 1) // (4 * size) if is_gathered else 0


@pytest.mark.parametrize("size", SIZES)
def test_the_estimate_is_what_a_rank_keeps(measured, size, tmp_path):
    (tmp_path / "recipe.sh").write_text(f'source "{RECIPES / "tiny.sh"}"\nvocab_size={VOCAB}\n')
    for case, options in CASES.items():
        if len(options["lengths"]) > 1 or options["recompute_granularity"]:
            continue  # the estimate is that of the largest number of keys, and counts a layer that is recomputed
        words = [f"--{name.replace('_', '-')}={value}" for name, value in SHAPE.items()]
        words += [f"--num-attention-heads={options['heads']}", f"--context-parallel-size={size}"]
        words += ["--micro-batch-size=1", "--make-vocab-size-divisible-by=8"]
        words += ["--group-query-attention", f"--num-query-groups={options['groups']}"] if options["groups"] else []
        model = model_of(read_recipe(str(tmp_path / "recipe.sh"), words))
        expected = activations(model) + mask_bytes(options, size)
        print(f"CP {size}, {case}: measured {measured[size][case] / 1e6:.1f} MB, estimated {expected / 1e6:.1f}")
        is_grouped = bool(options["groups"])  # the estimate counts groups of keys as if they were heads
        assert 0.97 * measured[size][case] < expected < (1.08 if is_grouped else 1.03) * measured[size][case], case
