"""Launchers over recipes: commands that parsers accept, derived numbers, SLURM with a stand-in, clean scripts."""

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("torch")

from cluster.layout import Layout
from cluster.plan import training_sequences
from cluster.recipe import read_recipe
from helpers import launching
from helpers.cluster_stand_ins import PDSH, SCONTROL, SRUN, install, launch, tiny_run
from helpers.datasets import ROOT
from helpers.recipes import LAUNCH, RECIPES, commands, dry_run, training_options
from trainer.arguments import parse_arguments

from megatron_bfp.errors import OptionError

FOR_GPUS = sorted(path.stem for path in RECIPES.glob("llama_*.sh"))
HOSTS = "node-1 slots=8\nnode-2 slots=8\n# node-3 slots=8\n"
LAUNCHERS = ("deepspeed_hostfile", "deepspeed_no_ssh", "slurm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("launchers")
    (folder / "hosts").write_text(HOSTS)
    (folder / "many_hosts").write_text("".join(f"node-{number} slots=8\n" for number in range(32)))
    return folder


@pytest.mark.parametrize("launcher", [*LAUNCHERS, "torchrun_hostfile"])
def test_the_trainer_accepts_the_options_of_each_recipe(folder, launcher):
    recipes = [*FOR_GPUS, "tiny"]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(lambda recipe: dry_run(folder, launcher, recipe, "--seed", "7"), recipes))
    for recipe, (status, output) in zip(recipes, results, strict=True):
        assert status == 0, output
        check, train = commands(output)
        assert any("preflight.py" in word for word in check)
        options = parse_arguments(training_options(output, "pretrain_gpt.py"))
        assert options.seed == 7 and options.eod_token == "<|endoftext|>"
        assert list(options.data_path) == ["0.3", "a_text_document", "0.7", "b_text_document"]
        assert options.data_impl == ("mmap" if "concat" in recipe else "bfp")
        assert options.dataloader_inter_document_masking == recipe.endswith("masked")
        assert options.global_batch_size * options.seq_length == (2**21 if recipe in FOR_GPUS else 2**13)
        assert options.bf16 == (recipe in FOR_GPUS)
    assert not (folder / "runs").exists()


def test_twins_differ_in_the_data_alone():
    for name in ("llama_7b_code_2k", "llama_13b_text_2k", "llama_13b_text_8k"):
        base, concat, masked = (
            read_recipe(str(RECIPES / f"{name}{suffix}.sh")).words for suffix in ("", "_concat", "_concat_masked")
        )
        assert tuple("mmap" if word == "bfp" else word for word in base) == concat
        assert (*concat, "--dataloader-inter-document-masking") == masked


@pytest.mark.parametrize(
    "recipe, accumulation",
    [
        ("llama_7b_code_2k", (128, 32, 4)),
        ("llama_13b_text_2k", (256, 64, 8)),
        ("llama_13b_text_8k", (128, 32, 4)),
        ("llama_13b_text_32k", (64, 16, 2)),
    ],
)
def test_a_global_batch_is_the_same_for_any_number_of_nodes(folder, recipe, accumulation):
    for nodes, expected in zip((1, 4, 32), accumulation, strict=True):
        status, output = dry_run(folder, "slurm", recipe, NODES=nodes)
        numbers = dict(re.findall(r"^(\S.*?)  +(.*)$", output, re.MULTILINE))
        assert status == 0 and numbers["GPUs"] == f"{nodes} x 8 = {8 * nodes}"
        assert numbers["gradient accumulation steps"] == str(expected)
        assert numbers["tokens per step"].startswith("2,097,152 in ")
        assert numbers["warm-up steps"] == "3,000, 6.3 B tokens"
        assert numbers["steps"] == ("143,051, 300.0 B tokens" if "7b" in recipe else "238,418, 500.0 B tokens")
        micro_batches = int(numbers["micro-batch size"]) * int(numbers["data parallel"]) * expected
        assert micro_batches * 1024 * int(re.findall(r"(\d+)k$", recipe)[0]) == 2**21
        assert numbers.get("context parallel") == ("4" if "32k" in recipe else None)
        too_much = "MORE THAN AN A100-80GB HAS" in output
        assert too_much == (nodes == 1 and recipe == "llama_13b_text_2k")


def test_the_steps_of_an_epoch_are_those_of_the_index(folder, write_dataset):
    pytest.importorskip("tokenizers")
    from megatron_bfp.sequence_index.builder import build
    from megatron_bfp.sequence_index.key import IndexKey

    dataset = write_dataset([[1] * length for length in [512] * 100 + [200, 312] * 50], "data")
    run = {"DATA_PATH": dataset.prefix, "GPUS_PER_NODE": 2, "NODES": 2}
    output = dry_run(folder, "slurm", "tiny", **run)[1]
    assert re.search("not known yet: .*there is no sequence index s512-d0-194", output)
    key = IndexKey(512, 0, 194)  # of 200 documents, 969 in 1000
    counts = build(dataset, key, f"{dataset.prefix}.bfp").counts
    steps = counts["sequences"] / 16
    status, output = dry_run(folder, "slurm", "tiny", **run)
    assert status == 0 and f"{steps:,.1f} steps for the {counts['sequences']:,} sequences" in output
    assert f"seen {100 / steps:.2f} times" in output
    tokens = 512 * 100 + 256 * 94
    concatenated = read_recipe(str(RECIPES / "tiny.sh"), ["--data-impl", "mmap"]).options
    assert training_sequences(dataset.prefix, concatenated) == (tokens - 1) // 512


def test_a_cluster_that_does_not_divide_is_refused(folder):
    status, output = dry_run(folder, "deepspeed_no_ssh", "llama_7b_code_2k", NODES=3)
    assert status == 2 and not commands(output)
    assert re.search(
        r"^plan_run: error: 3 nodes of 8 GPUs: global_batch_size=1024 is not a multiple of", output, re.MULTILINE
    )
    with pytest.raises(OptionError, match="model's size of 4 GPUs .* does not divide 6 GPUs"):
        Layout(3, 2, 4, 1, 256, 8192)


def test_what_is_missing_is_named(folder):
    assert "TOKENIZER_MODEL" in dry_run(folder, "slurm", "tiny", TOKENIZER_MODEL="")[1]
    assert (
        "use torchrun_hostfile.sh"
        in dry_run(folder, "deepspeed_hostfile", FOR_GPUS[0], TRAINER="megatron_lm", MEGATRON_PATH="m")[1]
    )
    assert "no such recipe" in dry_run(folder, "slurm", "huge")[1]


def test_the_environment_reaches_all_hosts_in_the_form_deepspeed_reads(folder):
    script = f'source "{LAUNCH}/functions.sh"; source "{LAUNCH}/environment.sh"; assignments'
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in lines
    assert all(re.fullmatch(r"[A-Z_]+=\S+", line) for line in lines)  # it fails on comments and empty lines


def train_on_two_nodes(folder, script, stand_ins, **variables):
    """What a launcher prints that trains two steps of the tiny recipe, made smaller, on two nodes of one rank."""
    install(folder, stand_ins)
    recipe, settings = tiny_run(folder)
    status, output = launch(folder, script, recipe, **settings | variables)
    assert status == 0, output[-5000:]
    assert "preflight: 2 nodes agree" in output
    steps = re.findall(r"iteration (\d+)/2 \| loss", output)
    assert steps == ["1", "2"] and "consumed samples 32 " in output
    assert (folder / "run/checkpoints/latest").read_text() == "iter_0000002"
    return output


def test_slurms_script_trains_across_nodes(tmp_path):
    """It runs from a spool, as sbatch's copy of it does."""
    pytest.importorskip("deepspeed")
    shutil.copy(LAUNCH / "slurm.sh", tmp_path / "slurm_script")
    slurm = {"SLURM_JOB_ID": 4711, "SLURM_NNODES": 2, "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_SUBMIT_DIR": ROOT}
    train_on_two_nodes(tmp_path, tmp_path / "slurm_script", {"srun": SRUN, "scontrol": SCONTROL}, **slurm)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["deepspeed_hostfile", "torchrun_hostfile"])
def test_hostfile_launchers_train_across_nodes(tmp_path, launcher):
    """Everything that a node needs reaches it, though its shell starts with nothing."""
    pytest.importorskip("deepspeed")
    (tmp_path / "hosts").write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    stand_ins = {"pdsh": PDSH, "ssh": "#!/usr/bin/env bash\n"}
    output = train_on_two_nodes(tmp_path, LAUNCH / f"{launcher}.sh", stand_ins, HOSTFILE="hosts", ALL_REDUCE_MB=1)
    assert "preflight: all-reduce of 1.0 MB between 2 ranks on 2 nodes (gloo): " in output


INTEGRATION = ROOT / "tests" / "integration"


@pytest.mark.parametrize("recipe, is_rotary", [("llama_7b_code_2k", True), ("llama_7b_code_2k_concat", False)])
def test_fault_B18_megatron_deepspeed_is_launched_with_positions_that_are_right(folder, tmp_path, recipe, is_rotary):
    settings = {"NODES": 32, "HOSTFILE": "many_hosts", "TRAINER": "megatron_deepspeed", "MEGATRON_PATH": tmp_path}
    status, output = dry_run(folder, "deepspeed_hostfile", recipe, **settings, OUTPUT=tmp_path)
    assert status == 0, output
    assert ("--use-rotary-position-embeddings" in training_options(output, "pretrain_gpt.py")) == is_rotary
    assert ("trains --data-impl mmap with learned positions" in output) != is_rotary


@pytest.mark.integration
@pytest.mark.parametrize("data_impl", ["bfp", "mmap"])
@pytest.mark.parametrize(
    "trainer, launcher",
    [
        ("megatron_lm", "torchrun_hostfile"),
        ("megatron_lm", "slurm"),
        ("megatron_deepspeed", "deepspeed_hostfile"),
        ("megatron_deepspeed", "deepspeed_no_ssh"),
        ("megatron_deepspeed", "slurm"),
    ],
)
def test_megatrons_parser_accepts_the_options_of_each_recipe(folder, tmp_path, trainer, launcher, data_impl):
    variable = f"{trainer.upper()}_PATH"
    checkout = os.environ.get(variable)
    if not checkout:
        pytest.skip(f"{variable} does not name a checkout")
    recipes = [name for name in FOR_GPUS if ("concat" in name) == (data_impl == "mmap")]
    if trainer == "megatron_deepspeed":  # it has no masks for concatenated documents
        recipes = [name for name in recipes if not name.endswith("masked")]
    command_lines = []
    for recipe in recipes:
        status, output = dry_run(
            folder,
            launcher,
            recipe,
            NODES=32,
            HOSTFILE="many_hosts",
            TRAINER=trainer,
            MEGATRON_PATH=checkout,
            OUTPUT=tmp_path,
        )
        assert status == 0, output
        command_lines.append(training_options(output, "pretrain_gpt.py"))
        config = re.search(r"^/.*deepspeed.json:\n(\{.*?^\})", output, re.MULTILINE | re.DOTALL)
        if config:
            (tmp_path / "deepspeed.json").write_text(json.dumps(json.loads(config[1])))
    (tmp_path / "options.json").write_text(json.dumps(command_lines))
    environment = launching.ENVIRONMENT | {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "256",
        "TORCHDYNAMO_DISABLE": "1",
    }
    environment |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NO_VCS_VERSION": "1"}
    if trainer == "megatron_deepspeed":  # imported with its tokenizers, of which none is made here
        (tmp_path / "transformers.py").write_text("AutoTokenizer = None")
    shim = INTEGRATION / "megatron_lm_on_cpu" if trainer == "megatron_lm" else tmp_path
    paths = [shim, checkout, environment["PYTHONPATH"]]
    environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    command = [
        sys.executable,
        "-m",
        "megatron_bfp",
        str(INTEGRATION / "parse_options.py"),
        str(tmp_path / "options.json"),
    ]
    done = subprocess.run(
        [*command, "--data-impl", data_impl], capture_output=True, text=True, env=environment, timeout=200
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    assert done.stdout.count(f"accepted {data_impl} ") == len(recipes)
