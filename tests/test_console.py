"""Lines that several ranks write to one pipe."""

import os
import subprocess
import sys

import pytest
from helpers.datasets import ROOT

from megatron_bfp import progress
from megatron_bfp.optional import not_installed

TELL = "from megatron_bfp.console import tell; tell('loss 3.5')"
PRINT = "import sys; print('loss 3.5', file=sys.stderr, flush=True)"


def writes_of(program):
    """What each single write to standard error consists of, under PYTHONUNBUFFERED."""
    reading, writing = os.pipe2(os.O_DIRECT)  # keeps writes apart
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program], stderr=writing, env=environment, check=True)
    os.close(writing)
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        return list(iter(lambda: pipe.read(4096), b""))


def test_a_line_is_one_write_so_that_lines_of_several_ranks_do_not_mix():
    assert writes_of(TELL) == [b"loss 3.5\n"]


def test_control_print_writes_the_end_of_a_line_apart():
    assert writes_of(PRINT) == [b"loss 3.5", b"\n"]


def run_and_print(code, **keywords):
    """Status and standard error of ``run`` in a process of its own."""
    code = f"from megatron_bfp import console, errors\nconsole.QUIET_SECONDS = 0\n{code}"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, **keywords)
    return done.returncode, done.stderr


@pytest.mark.parametrize("quiet", [False, True])
def test_a_quiet_rank_keeps_to_itself_only_what_all_ranks_raise(quiet):
    for error, is_said in (("OptionError", not quiet), ("IndexedDatasetError", True)):
        status, said = run_and_print(
            f"""
def main():
    raise errors.{error}("wrong")

raise SystemExit(console.run(main, "name", quiet={quiet}))
"""
        )
        assert (status, said) == (2, "name: error: wrong\n" * is_said)


def test_only_a_closed_pipe_of_its_own_output_ends_a_command_in_silence():
    status, said = run_and_print(
        """
def main():
    raise BrokenPipeError("of a worker")

raise SystemExit(console.run(main, "name"))
"""
    )
    assert status == 1 and "of a worker" in said


def test_a_missing_package_is_named_as_pip_knows_it():
    for module, package in (("megatron.core", "megatron-core"), ("backports", "backports.zstd"), ("ray", "ray")):
        error = not_installed(ModuleNotFoundError(name=module), "this")
        assert str(error).startswith(f"this needs the {package} package, which is missing: pip install 'megatron-bfp[")
    other = ModuleNotFoundError(name="else")
    assert not_installed(other) is other


def test_progress_is_a_line_every_ten_seconds(monkeypatch):
    now, lines = [0.0], []
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    for _ in progress._in_lines(range(31), 31, "counting", lines.append):
        now[0] += 1.0
    assert [line.split(" after ")[1] for line in lines] == ["2 s", "12 s", "22 s"]
