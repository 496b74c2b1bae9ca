"""Parts of the example trainer and of the quickstart that need no run of their own."""

import argparse
import json
import os
import subprocess
import sys
import time

import pytest
from helpers.datasets import ROOT
from quickstart import check as quickstart_check
from trainer import arguments as pretrain_arguments
from trainer.arguments import blend, parse_arguments

from megatron_bfp import BFPError, OptionError
from megatron_bfp.commands.shared import Parser

NEEDED = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 1 --train-iters 100"
NEEDED += " --data-path data --seq-length 64 --tokenizer-model tokenizer.json"


def options_of(text=""):
    return parse_arguments(f"{NEEDED} {text}".split())


def test_the_learning_rate_warms_up_and_decays_along_a_cosine():
    pytest.importorskip("deepspeed")
    from trainer.training import learning_rate

    options = options_of("--lr 1.0 --min-lr 0.1 --lr-warmup-iters 10")
    assert [learning_rate(options, i) for i in (0, 4, 9, 10)] == [0.1, 0.5, 1.0, 1.0]
    assert learning_rate(options, 55) == pytest.approx(0.55)
    assert learning_rate(options, 100) == pytest.approx(0.1)
    rates = [learning_rate(options, i) for i in range(10, 101)]
    assert rates == sorted(rates, reverse=True)
    assert learning_rate(options_of("--lr 1.0 --lr-decay-style constant"), 99) == 1.0
    assert learning_rate(options_of("--lr 1.0 --lr-decay-iters 50"), 99) == 0.0


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
        "--override-checkpoint-args",
        "--data-impl mmap --max-documents-per-sequence 3",
        "--zero-stage 7",
        "--nonsense",
    ],
)
def test_bad_options_name_themselves(text):
    with pytest.raises(OptionError) as error:
        options_of(text)
    assert text.split()[-2 if " " in text else 0] in str(error.value) or text.split()[0] in str(error.value)


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

    monkeypatch.setattr(pretrain_arguments, "Parser", Watched)
    options_of()
    (parser,) = parsers
    formatter = pretrain_arguments.Help("")
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

    assert pretrain_arguments.ATTENTION_KERNELS == tuple(KERNELS)


def test_the_feed_forward_size_is_llama_s():
    assert options_of("--hidden-size 4096 --num-attention-heads 32").ffn_hidden_size == 11008
    assert options_of("--hidden-size 192").ffn_hidden_size == 512
    assert options_of("--ffn-hidden-size 100").ffn_hidden_size == 100


@pytest.fixture
def logs(tmp_path):
    def write(losses_of_each):
        paths = []
        for number, losses in enumerate(losses_of_each):
            paths.append(str(tmp_path / f"{number}.log"))
            lines = [f"iteration {i}/4 | loss {loss:.6f} | learning rate 1 | x\n" for i, loss in losses.items()]
            (tmp_path / f"{number}.log").write_text("noise\n" + "".join(lines))
        return paths

    return write


@pytest.mark.parametrize(
    "first_half, resumed, status",
    [
        ({1: 19.0, 2: 8.0}, {3: 7.0, 4: 6.0}, 0),
        ({1: 19.0, 2: 8.0}, {3: 7.0, 4: 6.000001}, 1),
        ({1: 19.0, 2: 8.0}, {4: 6.0}, 1),
        ({1: 19.0, 2: 8.0, 3: 7.0}, {3: 7.0, 4: 6.0}, 1),
    ],
)
def test_the_quickstart_notices_a_resume_that_differs(logs, first_half, resumed, status):
    assert quickstart_check.main(*logs([{1: 19.0, 2: 8.0, 3: 7.0, 4: 6.0}, first_half, resumed])) == status


def test_the_quickstart_notices_a_loss_that_does_not_fall(logs):
    assert quickstart_check.main(*logs([{1: 9.0, 2: 7.5}, {1: 9.0}, {2: 7.5}])) == 1


def test_the_quickstart_s_corpus_is_this_python_s_source():
    pytest.importorskip("tokenizers")
    from quickstart.data import source_files

    files = list(source_files())
    assert len(files) > 1000 and len(set(files)) == len(files)
    assert any(path.endswith("json/decoder.py") for _, path in files)


def engine_config_of(tmp_path, config, text=""):
    pytest.importorskip("deepspeed")
    from trainer.engine import engine_config

    path = tmp_path / "deepspeed.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    options = options_of(f"--global-batch-size 8 --deepspeed_config {path} {text}")
    return engine_config(options, accumulation=8)


def test_deepspeed_s_json_is_completed_by_the_options(tmp_path):
    given = {
        "train_batch_size": "auto",
        "gradient_clipping": 1.0,
        "bf16": {"enabled": "auto", "immediate_grad_update": True},
        "zero_optimization": {"stage": 2, "overlap_comm": False},
    }
    config = engine_config_of(tmp_path, given, "--bf16")
    assert config["train_batch_size"] == config["gradient_accumulation_steps"] == 8
    assert config["bf16"] == {"enabled": True, "immediate_grad_update": True}
    assert config["zero_optimization"] == {"stage": 2, "overlap_comm": False}
    assert engine_config_of(tmp_path, {})["zero_optimization"] == {"stage": 0}
    assert engine_config_of(tmp_path, {}, "--zero-stage 3")["zero_optimization"] == {"stage": 3}


@pytest.mark.parametrize(
    "config, text, named",
    [
        ({"train_batch_size": 16}, "", "train_batch_size is 16, the options say 8"),
        ({"bf16": {"enabled": True}}, "", "bf16 is True"),
        ({"zero_optimization": {"stage": 1}}, "--zero-stage 2", "--zero-stage 2"),
        ({"optimizer": {"type": "Adam"}}, "", "take out optimizer"),
        ({"fp16": {"enabled": True}}, "", "take out fp16"),
        ("[1]", "", "not a JSON object"),
        ("{", "", "deepspeed.json"),
    ],
)
def test_a_json_that_contradicts_the_options_is_refused(tmp_path, config, text, named):
    pytest.importorskip("deepspeed")
    with pytest.raises(BFPError, match=named):
        engine_config_of(tmp_path, config, text)
