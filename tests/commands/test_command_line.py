"""What command lines share: one line for an error, and its exit status."""

import re
import subprocess
import sys
from importlib import import_module

import pytest
from helpers.commands import COMMANDS
from helpers.datasets import ROOT

from megatron_bfp import OptionError, SequenceIndexError
from megatron_bfp.commands.shared import Parser
from megatron_bfp.console import run, typed_name


def failing(error):
    def main():
        raise error

    return main


@pytest.mark.parametrize(
    "error, status", [(OptionError("bad"), 2), (SequenceIndexError("bad"), 2), (KeyboardInterrupt(), 130)]
)
def test_an_error_is_one_line_and_a_status(capsys, error, status):
    assert run(failing(error), "tool") == status
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_other_ranks_are_quiet_about_options_but_not_about_data(capsys):
    assert run(failing(OptionError("bad")), "tool", quiet=True) == 2
    assert capsys.readouterr().err == ""
    assert run(failing(SequenceIndexError("bad")), "tool (rank 1)", quiet=True) == 2
    assert capsys.readouterr().err == "tool (rank 1): error: bad\n"


def test_other_exceptions_keep_their_traceback():
    with pytest.raises(ZeroDivisionError):
        run(lambda: 1 / 0, "tool")


@pytest.mark.parametrize(
    "path, name",
    [
        ("/usr/local/bin/megatron-bfp-preprocess", "megatron-bfp-preprocess"),
        ("tools/report_bfp.py", "report_bfp.py"),
        (str(ROOT / "megatron_bfp" / "__main__.py"), "python -m megatron_bfp"),
    ],
)
def test_fault_B16_messages_begin_with_the_name_that_was_typed(monkeypatch, capsys, path, name):
    monkeypatch.setattr(sys, "argv", [path])
    assert run(failing(OptionError("bad")), typed_name()) == 2
    assert capsys.readouterr().err == f"{name}: error: bad\n"
    assert run(failing(KeyboardInterrupt()), typed_name()) == 130
    assert capsys.readouterr().err == f"{name}: interrupted\n"


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["tools/preprocess_bfp.py"], "preprocess_bfp.py"),
        (["tools/report_bfp.py"], "report_bfp.py"),
        (["-m", "megatron_bfp", "index"], "python -m megatron_bfp index"),
        (["-m", "megatron_bfp"], "python -m megatron_bfp"),
    ],
)
def test_fault_B16_each_command_names_itself(command, name):
    done = subprocess.run([sys.executable, *command, "--nonsense"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith(f"{name}: error: ") and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["megatron-bfp-preprocess", "megatron-bfp-report"])
def test_fault_B16_each_console_script_names_itself(monkeypatch, capsys, name):
    from megatron_bfp.commands import preprocess as command
    from megatron_bfp.commands import report as report_command

    console = report_command.console if name.endswith("report") else command.console
    monkeypatch.setattr(sys, "argv", [f"/usr/bin/{name}", "--nonsense"])
    assert console() == 2
    assert capsys.readouterr().err.startswith(f"{name}: error: ")
    monkeypatch.setattr(sys, "argv", [f"/usr/bin/{name}", "--help"])
    with pytest.raises(SystemExit):
        console()
    assert capsys.readouterr().out.startswith(f"usage: {name} ")


def test_fault_B16_the_readme_does_not_announce_what_is_there():
    assert "comes next" not in (ROOT / "README.md").read_text()


def test_a_split_that_begins_with_a_minus_is_a_value():
    parser = Parser(prog="tool")
    parser.add_argument("--split")
    assert parser.parse_args(["--split", "-1,1,0"]).split == "-1,1,0"
    with pytest.raises(OptionError, match="--split"):
        parser.parse_args(["--split"])


def test_every_installed_command_is_one_that_is_tested():
    """What pyproject.toml installs, by name and function."""
    content = (ROOT / "pyproject.toml").read_text()
    scripts = dict(re.findall(r'^(megatron-bfp\S*) = "megatron_bfp\.commands\.(\S+):console"$', content, re.MULTILINE))
    assert scripts == {
        "megatron-bfp": "main",
        "megatron-bfp-preprocess": "preprocess",
        "megatron-bfp-report": "report",
    }
    assert set(scripts) <= set(COMMANDS)
    assert all(callable(import_module(f"megatron_bfp.commands.{module}").console) for module in scripts.values())
