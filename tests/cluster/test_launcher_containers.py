"""What is started on each node: the prologue, the container, SLURM's options, as printed and as run by stand-ins."""

import os
import shlex

import pytest
from helpers.cluster_stand_ins import APPTAINER, PDSH, install, launch, slurm_job
from helpers.datasets import ROOT
from helpers.launching import ENVIRONMENT
from helpers.recipes import LAUNCH, RECIPES, commands, dry_run

WITH_PROLOGUE = str(LAUNCH / "with_prologue.sh")
IMAGE = "nvcr.io#nvidia/pytorch:25.12-py3"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "hosts").write_text("node-1 slots=8\nnode-2 slots=8\n")
    (tmp_path / "prologue.sh").write_text("export FROM_PROLOGUE=$UNSET_VARIABLE$#yes\n")  # as modules do, with -u off
    return tmp_path


def printed(folder, launcher, recipe="tiny", **variables):
    """Exit status and output of a dry run, without the plan."""
    install(folder, {"python": "#!/bin/sh\n"})
    return dry_run(folder, launcher, recipe, PATH=f"{folder}{os.pathsep}{ENVIRONMENT['PATH']}", **variables)


def on_a_node(words):
    """The words of a command as a node gets them: pdsh hands them to a shell there."""
    return shlex.split(words[-1]) if words[0] == "pdsh" else words


def value(words, name):
    return words[words.index(name) + 1]


def test_pyxis_starts_preflight_and_training_in_the_container(folder):
    mounts = "/data,/tokenizers:/tokenizers:ro"
    variables = {
        "CONTAINER_IMAGE": IMAGE,
        "CONTAINER_MOUNTS": mounts,
        "NCCL_IB_HCA": "mlx5_0",
        "PROLOGUE": "prologue.sh",
    }
    status, output = printed(folder, "slurm", **variables, SRUN_ARGS="--mpi=none --no-container-mount-home")
    assert status == 0, output
    check, train = commands(output)
    for words, program in ((check, "python"), (train, "bash")):
        assert words[0] == "srun" and "--mpi=none" in words and "--no-container-mount-home" in words
        assert value(words, "--container-image") == IMAGE and value(words, "--container-workdir") == str(folder)
        seen = value(words, "--container-mounts").split(",")
        expected = [ROOT, folder, folder / "runs/tiny"]
        assert seen == [*(f"{path}:{path}" for path in expected), "/data:/data", "/tokenizers:/tokenizers:ro"]
        names = value(words, "--container-env").split(",")
        assert {"NCCL_IB_HCA", "PYTHONPATH", "OMP_NUM_THREADS", "TORCH_FR_DUMP_TEMP_FILE"} <= set(names)
        assert "NCCL_SOCKET_IFNAME" not in names  # it is not set
        first = words.index(WITH_PROLOGUE)
        assert words[first - 1 : first + 3] == ["bash", WITH_PROLOGUE, str(folder / "prologue.sh"), program]


@pytest.mark.parametrize("launcher", ["slurm", "torchrun_hostfile", "deepspeed_no_ssh"])
def test_apptainer_starts_them_after_the_prologue(folder, launcher):
    variables = {"CONTAINER_IMAGE": "image.sif", "CONTAINER_MOUNTS": "/data", "CONTAINER_RUNTIME": "apptainer"}
    status, output = printed(folder, launcher, "llama_7b_code_2k", **variables, PROLOGUE="prologue.sh", NODES=2)
    assert status == 0, output
    *prologue, check, train = map(on_a_node, commands(output))
    assert prologue[0][0] == "source"  # by the launcher itself, for the plan
    for words in (check, train):
        first = words.index("apptainer")
        assert words[first : first + 3] == ["apptainer", "exec", "--pwd"]
        assert "--container-image" not in words
        end = words.index("image.sif")
        assert words[end - 1] == "--nv" and value(words, "--bind").endswith(",/data:/data")
        assert words[end + 1] in ("python", "bash", "deepspeed")
        if launcher != "deepspeed_no_ssh":  # which runs on every node
            assert words[first - 2 : first] == [WITH_PROLOGUE, str(folder / "prologue.sh")]


def test_without_container_and_prologue_nothing_is_put_before_the_commands(folder):
    for launcher in ("slurm", "torchrun_hostfile", "deepspeed_no_ssh", "deepspeed_hostfile"):
        status, output = printed(folder, launcher)
        assert status == 0 and not {"apptainer", "--container-image", WITH_PROLOGUE} & set(shlex.split(output))


@pytest.mark.parametrize(
    "launcher, variables, reason",
    [
        ("torchrun_hostfile", {"CONTAINER_RUNTIME": "pyxis"}, "CONTAINER_RUNTIME=pyxis: only slurm.sh can use it"),
        ("slurm", {"CONTAINER_RUNTIME": "docker"}, "=docker: give pyxis, apptainer or singularity"),
        ("deepspeed_hostfile", {}, "without PROLOGUE and CONTAINER_IMAGE; use torchrun_hostfile.sh"),
        ("slurm", {"OUTPUT": "/a,b"}, "/a,b: a container cannot mount a path with a comma or a colon"),
        ("slurm", {"PROLOGUE": "missing.sh", "CONTAINER_IMAGE": ""}, "PROLOGUE=missing.sh: cannot be read on "),
        ("slurm", {"PROLOGUE": "bad.sh", "CONTAINER_IMAGE": ""}, "PROLOGUE=bad.sh: ended with status 3 on "),
    ],
)
def test_what_cannot_be_started_is_one_line(folder, launcher, variables, reason):
    (folder / "bad.sh").write_text("(exit 3)\n")
    status, output = printed(folder, launcher, **{"CONTAINER_IMAGE": "i"} | variables)
    (line,) = [line for line in output.splitlines() if ": error: " in line]
    assert status == 2 and reason in line


NOTE = """#!/usr/bin/env bash
case $1 in */plan_run.py) plan=yes ;; esac
echo "${0##*/} ${plan:+plan} NODE_RANK=${NODE_RANK:-$SLURM_NODEID} ${FROM_PROLOGUE-} ${IN_CONTAINER-}" \\
    >>"${0%/*}/started"
"""


@pytest.mark.parametrize("launcher", ["torchrun_hostfile", "slurm"])
def test_each_node_runs_the_prologue_and_then_the_container(folder, launcher):
    """The prologue's arguments are its own, not those of the command."""
    install(folder, {"pdsh": PDSH, "apptainer": APPTAINER, "python": NOTE, "torchrun": NOTE})
    variables = slurm_job(folder) | {"HOSTFILE": "hosts", "PROLOGUE": "prologue.sh", "CONTAINER_IMAGE": "image.sif"}
    variables |= {"CONTAINER_RUNTIME": "apptainer", "DATA_PATH": "data", "TOKENIZER_MODEL": "t.model"}
    if launcher == "torchrun_hostfile":
        variables["SLURM_NODEID"] = ""
    status, output = launch(folder, LAUNCH / f"{launcher}.sh", RECIPES / "tiny.sh", **variables)
    assert status == 0, output
    started = sorted((folder / "started").read_text().splitlines())
    nodes = [f"{program}  NODE_RANK={node} 0yes yes" for program in ("python", "torchrun") for node in (0, 1)]
    assert [line for line in started if "plan" not in line] == nodes
    (plan,) = set(started) - set(nodes)
    assert plan == "python plan NODE_RANK= 0yes yes"
    assert (folder / "runs/tiny/flight_recorder").is_dir()


def test_the_plan_is_made_in_pyxis_container(folder):
    install(folder, {"python": NOTE, "torchrun": NOTE})
    variables = slurm_job(folder) | {"CONTAINER_IMAGE": IMAGE, "PROLOGUE": "prologue.sh"}
    variables |= {"DATA_PATH": "data", "TOKENIZER_MODEL": "t.model"}
    (folder / "srun").rename(folder / "real_srun")
    install(folder, {"srun": '#!/usr/bin/env bash\necho "$*" >>"${0%/*}/srun.log"\nexec "${0%/*}/real_srun" "$@"\n'})
    status, output = launch(folder, LAUNCH / "slurm.sh", RECIPES / "tiny.sh", **variables)
    assert status == 0, output
    plan, check, train = (folder / "srun.log").read_text().splitlines()
    assert plan.startswith("--nodes 1 --ntasks 1 --container-image") and "plan_run.py" in plan
    assert all("--container-image" in line for line in (check, train))
    started = (folder / "started").read_text().splitlines()
    assert started[0] == "python plan NODE_RANK=0  "  # the prologue is for the container, not for this host
