"""The command line: what is accepted and refused, the help, and the two readings of ``--data-path``."""

import argparse
import dataclasses
import os
import subprocess
import sys
import time

import pytest
from helpers.datasets import ROOT
from trainer import arguments
from trainer.arguments import blend, parse_arguments
from trainer.config import ATTENTION_KERNELS, GROUPS, TrainerConfig

from megatron_bfp import OptionError
from megatron_bfp.commands.shared import Parser

NEEDED = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 1 --train-iters 100"
NEEDED += " --data-path data --seq-length 64 --tokenizer-model tokenizer.json"


def options_of(text=""):
    return parse_arguments(f"{NEEDED} {text}".split())


@pytest.mark.parametrize(
    "data_path, expected",
    [
        ("A", (["A"], None)),
        ("A B", (["A", "B"], None)),
        ("0.3 A 0.7 B", (["A", "B"], [0.3, 0.7])),
        ("1 A", (["A"], [1.0])),
        ("5", (["5"], None)),
    ],
)
def test_the_data_path_is_read_as_megatron_reads_it(data_path, expected):
    assert blend(data_path.split()) == expected


@pytest.mark.parametrize("data_path", ["0.3 A B", "0.3 A 0.7", "0 A", "-1 A", "inf A", "0.3 A nan B"])
def test_a_data_path_that_is_neither_is_refused(data_path):
    with pytest.raises(OptionError, match="--data-path"):
        blend(data_path.split())


@pytest.mark.parametrize(
    "text",
    [
        "--split -1,1,0",
        "--split 90,abc,5",
        "--seq-length 0",
        "--train-iters abc",
        "--lr -1",
        "--lr nan",
        "--clip-grad -1",
        "--adam-beta1 1.5",
        "--init-method-std -1",
        "--make-vocab-size-divisible-by 0",
        "--hidden-size 12",
        "--hidden-size 66",
        "--num-workers -1",
        "--group-query-attention --num-query-groups 3",
        "--save-interval 5",
        "--keep-last 2",
        "--save there --keep-last 0",
        "--wandb-exp-name llama",
        "--mlflow-tracking-uri there",
        "--override-checkpoint-args",
        "--data-impl mmap --max-documents-per-sequence 3",
        "--data-impl mmap --even-sequences",
        "--data-impl mmap --targets-only",
        "--data-impl mmap --balance-batches 2",
        "--balance-batches -1",
        "--zero-stage 7",
        "--context-parallel-size 0",
        "--context-parallel-size 3",  # zigzag needs a length that 6 divides
        "--nonsense",
    ],
)
def test_bad_options_name_themselves(text):
    with pytest.raises(OptionError) as error:
        options_of(text)
    assert text.split()[-2 if " " in text else 0] in str(error.value) or text.split()[0] in str(error.value)


def test_concatenation_takes_what_balances_nothing_and_refuses_the_rest_by_name():
    for text in ("", "--balance-batches 0", "--balance-batches 1"):
        assert options_of(f"--data-impl mmap {text}").data_impl == "mmap"
    for text, named in (
        ("--even-sequences",) * 2,
        ("--targets-only",) * 2,
        ("--balance-batches 2", "--balance-batches above 1"),
    ):
        with pytest.raises(OptionError, match=f"^{named} needs --data-impl bfp"):
            options_of(f"--data-impl mmap {text}")
        assert options_of(text).data_impl == "bfp"


def test_fault_C11_help_comes_at_once_and_alone():
    """No module that takes seconds is imported, nothing is printed but help."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-X", "importtime", str(ROOT / "examples" / "pretrain_gpt.py"), "--help"]
    start = time.process_time()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith("usage: pretrain_gpt ")
    lines = done.stderr.splitlines()
    assert all(line.startswith("import time:") for line in lines)
    imported = {line.rsplit("|", 1)[1].strip() for line in lines}
    assert "trainer.arguments" in imported and not imported & {"torch", "deepspeed", "megatron", "transformers"}
    assert time.process_time() - start < 2


def test_fault_C11_wrong_options_are_told_at_once_by_one_rank_of_a_node():
    command = [sys.executable, str(ROOT / "examples" / "pretrain_gpt.py"), "--nonsense"]
    for rank, printed in (("0", True), ("1", False)):
        environment = os.environ | {"PYTHONPATH": str(ROOT), "RANK": rank, "LOCAL_RANK": rank}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr.startswith("pretrain_gpt: error: ") == printed and done.stderr.count("\n") == printed


def test_fault_C11_every_option_has_a_text_and_tells_its_default_or_that_it_is_required(monkeypatch):
    parsers = []

    class Watched(Parser):
        def parse_args(self, argv=None):
            parsers.append(self)
            return super().parse_args(argv)

    monkeypatch.setattr(arguments, "Parser", Watched)
    options_of()
    (parser,) = parsers
    formatter = arguments.Help("")
    for action in parser._actions:
        name = action.option_strings[0]
        text = formatter._expand_help(action)
        assert text and (len(text.split()) > 1 or name == "-h"), name
        if name not in ("-h", "--version"):
            assert text.endswith("(required)") if action.required else "(default: " in text, name
            if action.default not in (None, False) and not action.required:
                assert f"(default: {action.default})" in text, name
    groups = [group for group in parser._action_groups if group._group_actions and group.title != "options"]
    assert len(groups) >= 5 and max(len(group._group_actions) for group in groups) < 15
    assert isinstance(parser.format_help(), str) and argparse.SUPPRESS not in parser.format_help()


def test_the_kernels_that_can_be_chosen_are_those_that_there_are():
    pytest.importorskip("torch")
    from megatron_bfp.attention.kernels import KERNELS

    assert ATTENTION_KERNELS == tuple(KERNELS)


def test_the_feed_forward_size_is_llama_s():
    assert options_of("--hidden-size 4096 --num-attention-heads 32").ffn_hidden_size == 11008
    assert options_of("--hidden-size 192").ffn_hidden_size == 512
    assert options_of("--ffn-hidden-size 100").ffn_hidden_size == 100


def test_the_configuration_is_frozen_and_has_the_fields_of_its_groups_once():
    config = options_of("--num-layers 3")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_layers = 4
    names = [field.name for group in GROUPS.values() for field in dataclasses.fields(group)]
    assert sorted(names) == sorted(field.name for field in dataclasses.fields(TrainerConfig))
    assert len(names) == len(set(names))


def test_a_configuration_made_by_keywords_is_that_of_the_command_line():
    made = TrainerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        micro_batch_size=1,
        train_iters=100,
        data_path=("data",),
        seq_length=64,
        tokenizer_model="tokenizer.json",
    )
    assert made == options_of()
