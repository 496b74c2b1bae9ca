"""A TOML file in place of a recipe: the same command and the same run, and errors of one line."""

import re

import pytest
from cluster.recipe import read_recipe
from cluster.settings import SETTINGS, read_settings, table
from helpers.cluster_stand_ins import SLURM, install, launch, slurm_job, tiny_run
from helpers.launching import steps
from helpers.recipes import LAUNCH, RECIPES, commands, dry_run, training_options
from trainer.arguments import parse_arguments

from megatron_bfp.errors import BFPError, OptionError

FROM_FILE = {"DATA_PATH": "", "TOKENIZER_MODEL": "", "EOD_TOKEN": "", "NODES": "", "HOSTFILE": "", "DRY_RUN": 1}
MORE = {"CONTAINER_IMAGE": "image.sif", "CONTAINER_RUNTIME": "apptainer", "CONTAINER_MOUNTS": "/data"}
MORE |= {"SRUN_ARGS": "--mpi=none --export ALL", "PROLOGUE": "prologue.sh"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("node-1 slots=8\nnode-2 slots=8\n")
    (tmp_path / "prologue.sh").write_text("")
    return tmp_path


def printed(folder, launcher, recipe, *options, **variables):
    """A file of what a launcher would run."""
    status, output = dry_run(folder, launcher, recipe, *options, "--print-config", **variables, DRY_RUN=0)
    assert status == 0, output
    (folder / "run.toml").write_text(output)
    return folder / "run.toml"


def planned(folder, launcher, *words, **variables):
    """What a launcher would do with a file, all of whose variables are in it."""
    settings = {"NODE_RANK": 1, "MASTER_ADDR": "node-1", "PATH": None} | FROM_FILE | variables
    settings = {name: value for name, value in settings.items() if value is not None}
    return launch(folder, LAUNCH / f"{launcher}.sh", *words, **settings)


def without_options(words):
    return words[: next(number for number, word in enumerate(words) if word.endswith("pretrain_gpt.py"))]


OTHERS = ("torchrun_hostfile", "deepspeed_hostfile", "deepspeed_no_ssh")


@pytest.mark.parametrize("launcher", ["slurm", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_a_printed_file_starts_what_the_recipe_starts(folder, launcher):
    more = {} if launcher == "deepspeed_hostfile" else MORE
    options = ("--seed", "7", "--data-path", "0.3", "my_data", "0.7", "other")
    status, recipe = dry_run(folder, launcher, "llama_13b_text_32k", *options, **more)
    assert status == 0, recipe
    file = printed(folder, launcher, "llama_13b_text_32k", *options, **more)
    status, from_file = planned(folder, launcher, file.name, OUTPUT=folder / "runs/llama_13b_text_32k")
    assert status == 0, from_file
    ours, theirs = (parse_arguments(training_options(output, "pretrain_gpt.py")) for output in (from_file, recipe))
    assert ours == theirs and ours.seed == 7 and ours.data_path == ("0.3", "my_data", "0.7", "other")
    plans = [re.findall(r"^(\S.*?)  +(.*)$", output, re.MULTILINE)[1:] for output in (from_file, recipe)]
    assert plans[0] == plans[1] and len(plans[0]) > 8  # but for the name
    if launcher in ("slurm", "deepspeed_no_ssh"):  # else one word has all
        assert without_options(commands(from_file)[-1]) == without_options(commands(recipe)[-1])
    else:
        line, other = (output.splitlines()[-1].partition("pretrain_gpt.py")[0] for output in (from_file, recipe))
        assert line == other


def test_options_and_variables_win_over_the_file(folder):
    file = printed(folder, "slurm", "tiny", NODES=2)
    status, output = planned(folder, "slurm", file.name, "--lr", "0.5", NODES=1, DATA_PATH="other", EOD_TOKEN="<e>")
    assert status == 0, output
    (_, train) = commands(output)
    assert train[train.index("--nodes") + 1] == "1"
    config = parse_arguments(training_options(output, "pretrain_gpt.py"))
    assert (config.lr, config.data_path, config.eod_token) == (0.5, ("other",), "<e>")
    assert config.tokenizer_model == "tokenizer.model"  # of the file


def test_the_memory_estimate_reads_the_file(folder, monkeypatch):
    file = printed(folder, "slurm", "tiny")
    monkeypatch.setenv("OUTPUT", str(folder / "runs/tiny"))
    recipe, from_file = read_recipe(str(RECIPES / "tiny.sh")), read_recipe(str(file), ["--micro-batch-size", "2"])
    assert (from_file.device, from_file.vocab_size) == (recipe.device, recipe.vocab_size) == ("cpu", 8192)
    assert from_file.options.micro_batch_size == 2 and from_file.options.num_layers == recipe.options.num_layers


@pytest.mark.parametrize(
    "line, reason",
    [
        ("gpu_per_node = 8", "[launch] has no setting gpu_per_node; did you mean gpus_per_node?"),
        ('nodes = "4"', "[launch] nodes must be a whole number, got '4'"),
        ("srun_args = [1]", "[launch] srun_args must be a text in quotes, got [1]"),
        ("nodes 4", "not TOML: "),
    ],
)
def test_a_wrong_key_is_named_with_the_file(folder, line, reason):
    (folder / "run.toml").write_text(f"[launch]\n{line}\n")
    with pytest.raises(BFPError) as error:
        read_settings("run.toml")
    assert reason in str(error.value) and "run.toml: " in str(error.value)


@pytest.mark.parametrize("line", ["[launc]", "[launch]\nnode = 2"])
def test_a_wrong_key_is_one_line_before_anything_starts(folder, line):
    (folder / "run.toml").write_text(f"num_layers = 2\n{line}\n")
    status, output = planned(folder, "slurm", "run.toml", vocab_size=5, NODES=1)
    (error,) = output.splitlines()
    assert status == 2 and "run.toml: " in error and "; did you mean " in error


def test_a_table_that_is_none_is_refused_by_launchers_and_trainer(folder):
    (folder / "run.toml").write_text("launch = 5\n")
    with pytest.raises(OptionError, match="launch must be a table"):
        read_settings(str(folder / "run.toml"))
    with pytest.raises(OptionError, match="there is no option launch"):
        parse_arguments(["--config", str(folder / "run.toml")])


def test_what_a_file_cannot_do_is_named(folder):
    file = printed(folder, "slurm", "tiny")
    status, output = planned(folder, "slurm", file.name, TRAINER="megatron_lm", MEGATRON_PATH="m")
    assert status == 2 and "a TOML file has the example trainer's options; give megatron_lm a recipe" in output
    status, output = dry_run(
        folder, "slurm", "llama_7b_code_2k", "--print-config", TRAINER="megatron_lm", MEGATRON_PATH="m"
    )
    assert status == 2 and "not those of megatron_lm" in output
    file.write_text(file.read_text().replace("vocab_size = 8192\n", ""))
    status, output = planned(folder, "slurm", file.name)
    assert status == 2 and "run.toml: set vocab_size in its table [launch]" in output
    assert planned(folder, "slurm", "missing.toml")[0] == 2


def test_each_setting_is_written_and_read_back(tmp_path):
    values = {name: "5" if kind is int else "a \"b\" $c \\ 'd'" for name, kind in SETTINGS.items()}
    (tmp_path / "run.toml").write_text(table(values))
    read = read_settings(str(tmp_path / "run.toml"))
    assert {name.lower(): value for name, value in read.items()} == values
    names = set(re.findall(r"\b([A-Z_]{5,})=", (LAUNCH / "common.sh").read_text())) & {"NODES", "OUTPUT", "PROLOGUE"}
    assert names <= {name.upper() for name in SETTINGS}


@pytest.mark.slow
def test_a_file_and_a_recipe_train_with_the_same_losses(tmp_path):
    pytest.importorskip("deepspeed")
    recipe, variables = tiny_run(tmp_path, train_iters=4)
    variables |= slurm_job(tmp_path)
    install(tmp_path, SLURM)
    status, first = launch(tmp_path, LAUNCH / "slurm.sh", recipe, "--lr", "0.01", **variables)
    assert status == 0, first[-5000:]
    status, text = launch(tmp_path, LAUNCH / "slurm.sh", recipe, "--lr", "0.01", "--print-config", **variables)
    assert status == 0, text
    (tmp_path / "run.toml").write_text(text.replace(f"{tmp_path}/run", f"{tmp_path}/second"))
    (tmp_path / "other.toml").write_text(text.replace(f"{tmp_path}/run", f"{tmp_path}/third"))
    for name in ("DATA_PATH", "TOKENIZER_MODEL", "EOD_TOKEN", "GPUS_PER_NODE", "OUTPUT"):
        del variables[name]
    status, second = launch(tmp_path, LAUNCH / "slurm.sh", "run.toml", **variables)
    assert status == 0, second[-5000:]
    assert len(steps(first)) == 4 and steps(first) == steps(second)
    status, third = launch(tmp_path, LAUNCH / "slurm.sh", "other.toml", "--seed", "5", **variables)
    assert status == 0 and steps(third) != steps(first)
