"""The flight recorder's variables are those that the installed torch reads, and its tool reads the files they name."""

import os
import pickle
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from helpers.recipes import LAUNCH

NAMES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_DUMP_TEMP_FILE")
RECORD = """
import sys, torch
from torch import distributed
from torch._C._distributed_c10d import _dump_fr_trace
distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
for _ in range(5):
    distributed.all_reduce(torch.zeros(4))
sys.stdout.buffer.write(_dump_fr_trace())
"""


def variables(**given):
    """The flight recorder's variables after environment.sh, for a run whose OUTPUT is a folder."""
    script = f'source "{LAUNCH}/functions.sh"; source "{LAUNCH}/environment.sh"; env -0'
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True, env=os.environ | given)
    seen = dict(line.split("=", 1) for line in done.stdout.split("\0")[:-1])
    return {name: seen[name] for name in NAMES}


def test_a_run_writes_beside_its_output_and_variables_that_are_set_win():
    values = variables(OUTPUT="/runs/a")
    assert values == dict(zip(NAMES, ("2000", "1", "/runs/a/flight_recorder/rank_"), strict=True))
    assert variables(TORCH_FR_BUFFER_SIZE="5")["TORCH_FR_BUFFER_SIZE"] == "5"


def test_the_installed_torch_knows_these_names():
    """Its libraries hold the names that they ask the environment for."""
    folder = os.path.join(os.path.dirname(torch.__file__), "lib")
    with open(os.path.join(folder, "libtorch_cpu.so"), "rb") as file:
        content = file.read()
    assert b"TORCH_FR_BUFFER_SIZE\0" in content and b"TORCH_FR_DUMP_TEMP_FILE\0" in content
    header = os.path.join(folder, "../include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp")
    with open(header, encoding="utf-8") as file:
        assert '"TORCH_NCCL_DUMP_ON_TIMEOUT"' in file.read()


@pytest.mark.slow
def test_torchs_tool_names_the_rank_that_did_not_join(tmp_path):
    """The records of a rank, and the same without the last collective as those of another."""
    environment = os.environ | variables(OUTPUT=str(tmp_path), TORCH_FR_BUFFER_SIZE="3")
    done = subprocess.run([sys.executable, "-c", RECORD], capture_output=True, env=environment, check=True, timeout=100)
    records = pickle.loads(done.stdout)
    assert len(records["entries"]) == 3  # the last ones, as the variable says
    prefix = environment["TORCH_FR_DUMP_TEMP_FILE"]
    os.makedirs(os.path.dirname(prefix))
    records["pg_config"] = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    for entry in records["entries"]:
        entry |= {"profiling_name": "nccl:all_reduce", "state": "completed"}
    for rank, entries in enumerate((records["entries"], records["entries"][:-1])):
        with open(f"{prefix}{rank}", "wb") as file:
            pickle.dump(records | {"entries": entries}, file)
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", f"{tmp_path}/flight_recorder"]
    done = subprocess.run([*command, "--prefix", "rank_"], capture_output=True, text=True, timeout=100)
    assert "missing ranks: {1}" in done.stdout + done.stderr
