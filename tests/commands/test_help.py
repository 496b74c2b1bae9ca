"""Help of every command: each option is explained with its default, in 80 columns, and within a second."""

import argparse
import json
import subprocess
import sys

import pytest
from helpers.commands import COMMANDS, OLDER, VERBS, call, parser_of
from helpers.datasets import ROOT
from helpers.terminal import run_on_terminal

from megatron_bfp import __version__

SLOW_PACKAGES = {"torch", "tokenizers", "pyarrow", "ray", "sentencepiece", "tiktoken", "matplotlib", "tqdm"}
SLOW_PACKAGES |= {"safetensors", "transformers"}
OF_TWO = {"--sequence", "--sample"}
"""Show needs one of these."""


def actions_of(monkeypatch, command):
    """The options and arguments of a command, each with its help as it is printed."""
    parser = parser_of(monkeypatch, command)
    for action in parser._actions:
        assert action.help, (command, action.dest)
        yield action, parser._get_formatter()._expand_help(action)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_a_help_text_with_its_default(monkeypatch, command):
    for action, text in actions_of(monkeypatch, command):
        assert len(text) > 3 and not text.endswith("."), action.dest
        default = action.default
        if default is None or default is False or default == argparse.SUPPRESS or default == []:
            continue
        words = " ".join(map(str, default)) if isinstance(default, (list, tuple)) else str(default)
        assert f"default: {words}" in text, (action.dest, text)


@pytest.mark.parametrize("command", [f"megatron-bfp {verb}" for verb in VERBS])
def test_a_value_that_can_be_left_out_has_a_default_in_words(monkeypatch, command):
    for action, text in actions_of(monkeypatch, command):
        if (
            action.option_strings
            and action.nargs != 0
            and not action.required
            and not OF_TWO & {*action.option_strings}
        ):
            assert "(default: " in text or "(required without --shard-index)" in text, (action.dest, text)


def test_one_name_means_one_thing(monkeypatch):
    """Options of the same name have the same type in all verbs, and take as many values unless they are compared."""
    types, metavars = {}, {}
    for verb in VERBS:
        for action, _ in actions_of(monkeypatch, f"megatron-bfp {verb}"):
            for option in action.option_strings:
                types.setdefault(option, set()).add(action.type)
                metavars.setdefault(option, set()).add(action.metavar)
    assert all(len(kinds) == 1 for kinds in (*types.values(), *metavars.values()))
    shared = {
        "--seq-length",
        "--split",
        "--max-documents-per-sequence",
        "--even-sequences",
        "--data-cache-path",
        "--tokenizer-model",
        "--json",
    }
    assert shared <= set(types)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_its_name_and_version(monkeypatch, capsys, command):
    assert call(monkeypatch, command, "--version") == 0
    assert capsys.readouterr().out == f"{command} {__version__}\n"
    assert call(monkeypatch, command, "--help") == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"usage: {command} ") and printed.err == ""


PRINT_ALL = """
import pytest
from helpers.commands import COMMANDS, call
with pytest.MonkeyPatch.context() as patch:
    for command in COMMANDS:
        print("=====", command)
        call(patch, command, "--help")
"""


def test_help_fits_a_terminal_of_80_columns():
    status, shown = run_on_terminal([sys.executable, "-c", PRINT_ALL], env={"PYTHONPATH": f"{ROOT}:{ROOT}/tests"})
    lines = shown.replace("\r", "").splitlines()
    assert status == 0 and sum(line.startswith("=====") for line in lines) == len(COMMANDS), shown
    assert [line for line in lines if len(line) > 80] == []


IMPORTED = """
import json, sys, time
from megatron_bfp.commands.main import console
sys.argv[0] = "/usr/bin/megatron-bfp"
try:
    status = console()
except SystemExit as exit:
    status = exit.code
print(json.dumps([status, time.process_time(), sorted(sys.modules)]), file=sys.stderr)
"""
MODULES = {"preprocess": {"preprocess", "preprocess_options", "built_indexes"}, "index": {"index", "built_indexes"}}
MODULES |= {"merge": {"merge", "built_indexes"}, "run": {"run"}}
MODULES |= {verb: {"hooks"} for verb in ("enable", "disable", "status")}
MODULES |= {"export-huggingface": {"huggingface", "huggingface.export"}}
MODULES |= {verb: {verb} for verb in ("report", "show", "verify")}


def start(*arguments):
    command = [sys.executable, "-c", IMPORTED, *arguments]
    settings = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, **settings)


def test_help_imports_the_module_of_its_verb_and_nothing_slow():
    """The bound is in seconds of this process, which a busy machine does not stretch."""
    started = {(): start("--help")} | {(verb,): start(verb, "--help") for verb in VERBS}
    for words, process in started.items():
        status, seconds, modules = json.loads(process.communicate(timeout=120)[1].splitlines()[-1])
        assert status == 0 and seconds < 1.5, (words, seconds)
        assert not SLOW_PACKAGES & {name.partition(".")[0] for name in modules}
        own = {
            name.removeprefix("megatron_bfp.commands.") for name in modules if name.startswith("megatron_bfp.commands.")
        }
        assert own - {"main", "shared", "json_output"} == (MODULES[words[0]] if words else set())


def test_a_mistyped_option_is_told_as_quickly():
    status, seconds, modules = json.loads(
        start("verify", "data", "--tokns").communicate(timeout=120)[1].splitlines()[-1]
    )
    assert status == 2 and seconds < 1.5 and not SLOW_PACKAGES & {name.partition(".")[0] for name in modules}


def test_the_older_commands_keep_their_options(monkeypatch):
    """Names of options are promises: scripts of others give them."""
    options = {
        command: {option for action, _ in actions_of(monkeypatch, command) for option in action.option_strings}
        for command in OLDER
    }
    assert (
        options["preprocess_bfp.py"]
        == options["megatron-bfp-preprocess"]
        >= {
            *("--input", "--json-keys", "--output-prefix", "--tokenizer-type", "--tokenizer-model", "--eod-token"),
            *("--append-eod", "--bos-token", "--append-bos", "--no-append-bos", "--workers", "--skip-bad-documents"),
            *("--overwrite", "--executor", "--ray-address", "--shard-count", "--shard-index", "--tiktoken-pattern"),
            *("--tiktoken-num-special-tokens", "--tiktoken-special-tokens", "--vocab-size", "--indexed", "--merge"),
            *("--seq-length", "--split", "--max-documents-per-sequence"),
        }
    )
    assert (
        options["report_bfp.py"]
        == options["megatron-bfp-report"]
        >= {
            *("--seq-length", "--output", "--seed", "--split", "--max-documents-per-sequence"),
        }
    )
