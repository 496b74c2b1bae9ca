"""``--config FILE`` and ``--print-config``: the same run as with options, and errors that name file and key."""

import os
import subprocess
import sys

import pytest
from helpers.datasets import ROOT
from trainer.arguments import parse_arguments
from trainer.config_file import config_text

from megatron_bfp import InputError, OptionError

OPTIONS = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 1 --train-iters 100 "
OPTIONS += "--data-path 0.3 A 0.7 B --seq-length 64 --tokenizer-model tokenizer.json --eod-token <|endoftext|> "
OPTIONS += '--split 97,2,1 --lr 3e-5 --bf16 --zero-stage 1 --deepspeed_config with\\quote".json'


def config_of(*words):
    return parse_arguments([*map(str, words)])


@pytest.fixture
def file(tmp_path):
    """The options above as ``--print-config`` writes them."""
    path = tmp_path / "run.toml"
    path.write_text(config_text(config_of(*OPTIONS.split())))
    return path


def test_a_printed_configuration_is_read_back_as_the_same_run(file):
    assert config_of("--config", file) == config_of(*OPTIONS.split())
    assert config_of(f"--config={file}") == config_of(*OPTIONS.split())


def test_the_command_line_wins_wherever_it_stands(file):
    for words in (["--config", file, "--lr", 1, "--data-path", "C"], ["--data-path", "C", "--lr=1", "--config", file]):
        config = config_of(*words)
        assert (config.lr, config.data_path, config.seq_length) == (1.0, ("C",), 64)


def test_the_printed_file_is_all_that_is_printed(file):
    command = [sys.executable, str(ROOT / "examples" / "pretrain_gpt.py"), "--config", str(file), "--print-config"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, file.read_text(), "")


@pytest.mark.parametrize(
    "text, message",
    [
        ("seq_lenght = 5", "there is no option seq_lenght; did you mean seq_length?"),
        ("seq-length = 5", "there is no option seq-length; did you mean seq_length?"),
        ("local_rank = 5", "there is no option local_rank"),
        ("[model]\nnum_layers = 2", "there is no option model"),
        ("num_layers = 2.5", "num_layers must be a whole number, got 2.5"),
        ("num_layers = true", "num_layers must be a whole number, got True"),
        ('lr = "3e-4"', "lr must be a number, got '3e-4'"),
        ("bf16 = 1", "bf16 must be true or false, got 1"),
        ("save = 5", "save must be a text in quotes, got 5"),
        ('data_path = "A"', "data_path must be a list of texts in quotes, got 'A'"),
        ("data_path = []", "data_path must be a list of texts in quotes, got []"),
        ("data_path = [[1]]", "data_path must be a list of texts in quotes, got [[1]]"),
    ],
)
def test_a_wrong_key_or_value_is_one_line_with_the_file(tmp_path, text, message):
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(OptionError) as error:
        config_of("--config", path)
    assert str(error.value) == f"--config {path}: {message}"


def test_a_value_out_of_bounds_is_refused_as_on_the_command_line(file):
    file.write_text(file.read_text().replace("lr = 3e-05", "lr = -1"))
    with pytest.raises(OptionError, match="^--lr must not be negative, got -1"):
        config_of("--config", file)


@pytest.mark.parametrize(
    "content, message",
    [(None, "No such file or directory"), (b"lr 5", "not TOML: .*line 1"), (b"\xff", "not TOML: ")],
)
def test_a_file_that_cannot_be_read_is_one_line(tmp_path, content, message):
    path = tmp_path / "run.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=f"^--config {path}: {message}"):
        config_of("--config", path)
