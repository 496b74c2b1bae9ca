"""Words on their way from a launcher to the trainer's processes: through pdsh, shells, srun and deepspeed."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("tokenizers")

from helpers import launching
from helpers.datasets import ROOT, documents_of, write
from helpers.recipes import LAUNCH, RECIPES

from megatron_bfp.sequence_index.builder import build
from megatron_bfp.sequence_index.key import IndexKey, index_directory

FUNCTIONS = LAUNCH / "functions.sh"
SHELLS = [shell for shell in ("bash", "dash") if shutil.which(shell)]
WORDS = ["a b", "$(touch owned)", "`touch owned` b", 'a $HOME "q" `x` \\ b', "it's", "it's a", "<|endoftext|>", "%n%h%"]
WORDS += ["50% %n", "tab\tb", "line\nfeed", "a\nb c\n", "*", "~", "a & b", 'a \\" b', "\\", "a \\", "é", "!x", "a=b c"]
PROGRAMS = ("deepspeed", "pdsh", "srun", "python", "bash", "torchrun")
STAND_IN = """#!/bin/bash
case $1 in */plan_run.py) exec {python} "$@" ;; esac
{{ printf '%s\\0' "${{0##*/}}" "$@"; printf '\\0'; }} >>{folder}/words
env -0 >>{folder}/environment
"""


@pytest.fixture
def programs(tmp_path):
    """A folder of stand-ins that write down their words, and what they see of the environment."""
    folder = tmp_path / "programs"
    folder.mkdir()
    for name in PROGRAMS:
        (folder / name).write_text(STAND_IN.format(python=sys.executable, folder=folder))
        (folder / name).chmod(0o755)
    return folder


def written(programs):
    """The command lines that the stand-ins got since this was last asked, each a list of words."""
    lines = (programs / "words").read_text().split("\0\0")[:-1]
    (programs / "words").unlink()
    return [line.split("\0") for line in lines]


def record(programs, launcher, *words, recipe=RECIPES / "llama_7b_code_2k.sh", folder=None, launch=LAUNCH, **variables):
    """The command lines that a launcher gives to the programs that start processes, and what it prints."""
    folder = folder or programs.parent
    (folder / "hosts").write_text("node-1 slots=8\nnode-2 slots=8\n")
    settings = {"HOSTFILE": "hosts", "NODES": 2, "NODE_RANK": 1, "MASTER_ADDR": "node-1", "GPUS_PER_NODE": 8}
    settings |= {"DATA_PATH": "data", "TOKENIZER_MODEL": "t.model", "OUTPUT": programs / "out"}
    settings["PATH"] = f"{programs}:/usr/bin:/bin"
    environment = launching.ENVIRONMENT | {name: str(value) for name, value in (settings | variables).items()}
    command = ["/bin/bash", str(launch / f"{launcher}.sh"), str(recipe), *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    return written(programs), done.stdout


def as_pdsh(text, rank):
    """What pdsh hands to ssh: its own letters replaced."""
    letters = {"%n": str(rank), "%h": "HOST", "%u": "USER", "%%": "%"}
    return re.sub("%.?", lambda match: letters.get(match[0], match[0]), text, flags=re.DOTALL)


def run_remotely(command, programs, shell):
    """The words of the program that a command starts on a node, whose shell knows nothing of the launcher's."""
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": "/home/somebody"}
    done = subprocess.run([shutil.which(shell), "-c", command], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    (words,) = written(programs)
    return words


def after(words, end):
    """The words after the last one that ends so."""
    return words[max(number for number, word in enumerate(words) if word.endswith(end)) + 1 :]


def check_arrival(preflight, trainer):
    """Every word of WORDS is there, unchanged, at the end of both command lines, and both have the same options."""
    assert trainer[-len(WORDS) - 1 :] == ["--data-path", *WORDS]
    assert after(preflight, "preflight.py")[-len(trainer) :] == trainer
    assert preflight[-len(trainer) - 2 : -len(trainer)] == ["--trainer", "pretrain_gpt"]


@pytest.mark.parametrize("launcher", ["slurm", "deepspeed_no_ssh"])
def test_fault_B12_words_arrive_where_no_shell_is_between(programs, launcher):
    (preflight, trainer), _ = record(programs, launcher, "--data-path", *WORDS)
    check_arrival(preflight, after(trainer, "pretrain_gpt.py"))
    assert not (programs.parent / "owned").exists()


def test_fault_B12_words_arrive_through_pdsh_and_any_shell(programs, tmp_path):
    """The environment too, and whatever the folder is called."""
    folder = tmp_path / "it's $(touch owned) 100%n"
    folder.mkdir()
    interface = "eth0 $(touch owned) %h"
    lines, _ = record(programs, "torchrun_hostfile", "--data-path", *WORDS, folder=folder, NCCL_SOCKET_IFNAME=interface)
    assert [line[:8] for line in lines] == [["pdsh", "-S", "-R", "ssh", "-f", "2", "-w", "node-1,node-2"]] * 2
    for shell in SHELLS:
        (programs / "environment").unlink()
        preflight, trainer = (run_remotely(as_pdsh(line[-1], 1), programs, shell) for line in lines)
        check_arrival(preflight, after(trainer, "pretrain_gpt.py"))
        seen = (programs / "environment").read_text().split("\0")
        for variable in (f"NCCL_SOCKET_IFNAME={interface}", "NODE_RANK=1", f"PWD={folder}", "OMP_NUM_THREADS=1"):
            assert seen.count(variable) == 2, variable
    assert not list(tmp_path.rglob("owned"))


def through_deepspeed(line, rank):
    """What deepspeed's own code and pdsh make of its words: a command for the shell of a node."""
    from deepspeed.launcher.multinode_runner import PDSHRunner
    from deepspeed.launcher.runner import parse_args

    assert line[0] == "deepspeed"
    pdsh = PDSHRunner(parse_args(line[1:]), "INFO").get_cmd({}, {"node-1": [0], "node-2": [0]})[0]
    return as_pdsh(" ".join(pdsh[pdsh.index("-w") + 2 :]), rank)


def test_fault_B12_words_arrive_through_deepspeed_pdsh_and_any_shell(programs, monkeypatch):
    pytest.importorskip("deepspeed")
    monkeypatch.setattr(sys, "executable", "python")
    lines, _ = record(programs, "deepspeed_hostfile", "--data-path", *WORDS)
    for shell in SHELLS:
        preflight, trainer = (run_remotely(through_deepspeed(line, 1), programs, shell) for line in lines)
        assert "--node_rank=1" in preflight and "--no_local_rank" in preflight and "--no_local_rank" not in trainer
        check_arrival(preflight, after(trainer, "pretrain_gpt.py"))
    assert not (programs.parent / "owned").exists()


def test_fault_B12_one_node_of_a_hostfile_gets_words_as_they_are(programs):
    """deepspeed starts its processes itself then, without a shell."""
    (preflight, trainer), _ = record(programs, "deepspeed_hostfile", "--data-path", *WORDS, NODES=1)
    check_arrival(preflight, after(trainer, "pretrain_gpt.py"))


def test_fault_B12_megatrons_script_may_lie_in_any_folder(programs, monkeypatch):
    pytest.importorskip("deepspeed")
    monkeypatch.setattr(sys, "executable", "python")
    checkout = "/my $HOME/mega'tron%n"
    variables = {"TRAINER": "megatron_deepspeed", "MEGATRON_PATH": checkout}
    (_, line), _ = record(programs, "deepspeed_hostfile", "--seed", "7", **variables)
    words = run_remotely(through_deepspeed(line, 0), programs, "bash")
    assert words[words.index("megatron_bfp") :][:2] == ["megatron_bfp", f"{checkout}/pretrain_gpt.py"]


@pytest.mark.parametrize("launcher", ["deepspeed_hostfile", "torchrun_hostfile"])
def test_fault_B12_this_repository_may_lie_in_any_folder(programs, tmp_path, monkeypatch, launcher):
    pytest.importorskip("deepspeed")
    monkeypatch.setattr(sys, "executable", "python")
    repository = tmp_path / 'my $HOME/it\'s "here"%n'
    repository.mkdir(parents=True)
    (repository / "examples").symlink_to(ROOT / "examples")
    lines, _ = record(programs, launcher, launch=repository / "examples" / "cluster" / "launch")
    for line, script in zip(lines, ("preflight.py", "pretrain_gpt.py"), strict=True):
        (programs / "environment").unlink()
        command = through_deepspeed(line, 0) if line[0] == "deepspeed" else as_pdsh(line[-1], 0)
        assert f"{repository}/examples/{script}" in run_remotely(command, programs, "bash")
        if line[0] != "deepspeed":  # there the file for the environment has it
            seen = (programs / "environment").read_text().split("\0")
            assert f"PYTHONPATH={repository}:{launching.ENVIRONMENT['PYTHONPATH']}" in seen


def test_fault_B12_a_folder_that_deepspeed_cannot_hand_on_is_refused(programs, tmp_path):
    folder = tmp_path / "my runs"
    folder.mkdir()
    with pytest.raises(AssertionError, match="my runs: DeepSpeed cannot start runs .*; use torchrun_hostfile.sh"):
        record(programs, "deepspeed_hostfile", folder=folder)
    assert record(programs, "deepspeed_hostfile", folder=folder, NODES=1)


def test_fault_B12_environment_variables_arrive_through_deepspeeds_file(tmp_path):
    """DeepSpeed puts values between double quotes, pdsh replaces its letters, a shell reads them."""
    pytest.importorskip("deepspeed")
    from deepspeed.launcher.multinode_runner import PDSHRunner
    from deepspeed.launcher.runner import parse_args

    values = {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_IB_HCA": '=mlx "5" $HOME `x` \\ %n', "PYTHONPATH": "/a b:/c%h"}
    script = f'source "{FUNCTIONS}"; source "{LAUNCH}/environment.sh"; assignments'
    environment = os.environ | values
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, env=environment, check=True)
    runner = PDSHRunner(parse_args(["script.py"]), "INFO")
    for line in done.stdout.splitlines(keepends=True):
        runner.add_export(*line.split("=", maxsplit=1))
    exports = " ".join(f"export {name}={value};" for name, value in runner.exports.items())
    for shell in SHELLS:
        seen = subprocess.run([shell, "-c", as_pdsh(f"{exports} env", 0)], capture_output=True, text=True, check=True)
        for name, value in values.items():
            assert f"{name}={value}\n" in seen.stdout
    environment["NCCL_IB_HCA"] = "two\nlines"
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, env=environment)
    assert done.returncode == 2 and "NCCL_IB_HCA holds a line feed" in done.stderr


def planned(output):
    """The numbers of the plan, by their names."""
    return dict(re.findall(r"^(\S.*?)  +(.*)$", output, re.MULTILINE))


def test_fault_A15_a_recipe_that_reads_the_environment_is_planned_as_it_is_run(programs, tmp_path):
    """Under a name that bash would look for in PATH."""
    (tmp_path / "bash").write_text(f'source "{RECIPES}/tiny.sh"\nmicro_batch_size=${{MICRO:-4}}\n')
    for variables, expected in (({"GPUS_PER_NODE": 1}, 4), ({"GPUS_PER_NODE": 1, "MICRO": 1}, 1)):
        (preflight, trainer), output = record(programs, "slurm", recipe="bash", **variables)
        for words in (preflight, trainer):
            assert words[words.index("--micro-batch-size") + 1] == str(expected)
        assert planned(output)["micro-batch size"] == str(expected)
        memory = planned(output)["memory of a GPU, estimated"]
        assert memory.endswith(f"activations {'289.4' if expected == 4 else '76.5'}")
    assert preflight[preflight.index("--gpus-per-node") + 1] == "0"  # it trains on CPUs
    assert preflight[preflight.index("--vocab-size") + 1] == "8192"


def test_fault_C06_the_plan_is_of_what_is_given_after_the_recipe(programs):
    after_recipe = ("--train-iters", "7", "--micro-batch-size", "2", "--global-batch-size=512", "--lr-warmup-it", "2")
    _, output = record(programs, "slurm", *after_recipe, "--tensor-model-parallel-size", "2", "--seq-length", "1024")
    numbers = planned(output)
    assert numbers["steps"] == "7, 0.0 B tokens" and numbers["warm-up steps"].startswith("2, ")
    assert numbers["tokens per step"] == "524,288 in 512 sequences" and numbers["tensor parallel"] == "2"
    assert (numbers["data parallel"], numbers["gradient accumulation steps"]) == ("8", "32")
    with pytest.raises(AssertionError, match="plan_run: error: 2 nodes of 8 GPUs: global_batch_size=1000 is not a"):
        record(programs, "slurm", "--global-batch-size", "1000")
    with pytest.raises(AssertionError, match="plan_run: error: .*--no-such-option"):
        record(programs, "slurm", "--no-such-option")
    assert not (programs / "words").exists()  # nothing was started


def test_fault_C06_deepspeeds_configuration_follows_the_options(programs):
    variables = {"TRAINER": "megatron_deepspeed", "MEGATRON_PATH": "m"}
    path = programs / "out" / "deepspeed.json"
    record(programs, "deepspeed_no_ssh", **variables)
    usual = json.loads(path.read_text())
    assert usual["train_batch_size"] == 1024 and usual["bf16"] == {"enabled": True} and not usual["fp16"]["enabled"]
    after_recipe = ["--global-batch-size=512", "--micro-batch-size", "2", "--micro-batch-size", "4"]
    record(programs, "deepspeed_no_ssh", *after_recipe, "--clip-grad", "0.5", "--zero-stage", "0", **variables)
    changed = {"train_batch_size": 512, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.5}
    assert json.loads(path.read_text()) == usual | changed | {"zero_optimization": {"stage": 0}}
    assert sorted(os.listdir(path.parent)) == ["deepspeed.json", "flight_recorder", "hostfile-1"]


def test_fault_C06_a_trainer_that_is_not_there_is_named(programs):
    with pytest.raises(AssertionError, match="TRAINER=nanogpt: give pretrain_gpt, megatron_lm or megatron_deepspeed"):
        record(programs, "slurm", TRAINER="nanogpt")


def in_functions(script, *arguments):
    """Exit status, standard output and error of a script that uses the launchers' functions."""
    command = ["bash", "-euc", f'source "{FUNCTIONS}"; {script}', "script", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "text, expected",
    [
        ("0.3 a\n0.7 b", ["0.3", "a", "0.7", "b"]),
        ("0.3 a\r\n0.7 b\r\n", ["0.3", "a", "0.7", "b"]),
        ("\n\n 0.3\ta \t\n\n\t0.7   b\n\n", ["0.3", "a", "0.7", "b"]),
        ("a", ["a"]),
        ("a\\b *$HOME'", ["a\\b", "*$HOME'"]),
        (" \r\n", []),
        ("".join(f"{number}\n" for number in range(500)), [str(number) for number in range(500)]),
    ],
)
def test_fault_A05_all_words_of_all_lines_count(text, expected):
    script = 'split_words "$1"; printf "%s\\0" ${words[@]+"${words[@]}"}'
    status, output, error = in_functions(script, text)
    assert status == 0, error
    assert output.split("\0")[:-1] == (expected or [""])


@pytest.mark.parametrize("data_impl", ["bfp", "mmap"])
def test_fault_A05_every_line_of_data_path_reaches_plan_preflight_and_trainer(programs, tmp_path, data_impl):
    for name in "ab":
        dataset = write(tmp_path / name, documents_of([2048] * 20))
        build(dataset, IndexKey(2048, 0, 19), index_directory(dataset.prefix))
    text = f"0.25 {tmp_path}/a\r\n0.75\t{tmp_path}/b\n"
    more = [] if data_impl == "bfp" else ["--data-impl", "mmap"]
    (preflight, trainer), output = record(programs, "slurm", *more, DATA_PATH=text)
    for words in (preflight, trainer):
        first = words.index("--data-path")
        assert words[first : first + 6] == ["--data-path", "0.25", f"{tmp_path}/a", "0.75", f"{tmp_path}/b", "--split"]
    assert re.findall(r"sequences of \S*/([ab]), seen", output) == ["a", "b"]


def test_fault_A05_a_path_with_a_space_is_given_after_the_recipe(programs, tmp_path):
    dataset = write(tmp_path / "my data", documents_of([2048] * 20))
    build(dataset, IndexKey(2048, 0, 19), index_directory(dataset.prefix))
    (_, trainer), output = record(programs, "slurm", "--data-path", dataset.prefix, DATA_PATH="other")
    assert trainer[-2:] == ["--data-path", dataset.prefix]
    assert f"19 sequences of {dataset.prefix}, seen" in output


READ_HOSTS = 'HOSTFILE=$1; read_hosts; echo "$NODES: ${hosts[*]}"'


@pytest.mark.parametrize(
    "text, expected",
    [
        ("node-1 slots=8\nnode-2 slots=4\n", "2: node-1 node-2"),
        ("node-1 slots=8\r\n\r\n# node-3 slots=8\r\n  node-2\tslots=8 # of two", "2: node-1 node-2"),
        ("node-1 slots=8", "1: node-1"),
    ],
)
def test_fault_A05_every_line_of_a_hostfile_counts(tmp_path, text, expected):
    (tmp_path / "hosts").write_bytes(text.encode())
    assert in_functions(READ_HOSTS, tmp_path / "hosts") == (0, f"{expected}\n", "")


@pytest.mark.parametrize(
    "text, reason",
    [
        ("node-1 slots=8\nnode-2\n", "line 2: 'node-2' names no host; write: node-1 slots=8"),
        ("node-1:8\n", "line 1: 'node-1:8' names no host"),
        ("node-1 slots=8\n\nnode-1 slots=8\n", "line 3: node-1 is there twice"),
        ("# nobody\n", "names no host; write lines such as: node-1 slots=8"),
    ],
)
def test_fault_A05_a_line_that_names_no_host_stops_the_run(tmp_path, text, reason):
    (tmp_path / "hosts").write_text(text)
    status, output, error = in_functions(READ_HOSTS, tmp_path / "hosts")
    assert (status, output) == (2, "") and reason in error and len(error.splitlines()) == 1


def test_fault_A05_more_nodes_than_the_hostfile_has_are_refused(tmp_path):
    (tmp_path / "hosts").write_text("node-1 slots=8\nnode-2 slots=8\n")
    assert in_functions(f"NODES=1; {READ_HOSTS}", tmp_path / "hosts")[1] == "1: node-1 node-2\n"
    for nodes, reason in (("3", "has 2 hosts"), ("two", "give a number of nodes"), ("0", "give a number of nodes")):
        status, _, error = in_functions(f"NODES={nodes}; {READ_HOSTS}", tmp_path / "hosts")
        assert status == 2 and reason in error
    status, _, error = in_functions(READ_HOSTS, tmp_path / "missing")
    assert status == 2 and "missing: cannot be read" in error
