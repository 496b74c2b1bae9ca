"""``tools/preprocess_bfp.py`` interrupted, terminated and killed: what is left, and what a rerun gives."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
from helpers.commands import files_in, preprocess_tool
from helpers.datasets import ROOT

pytest.importorskip("tokenizers")

from helpers.tokenizer_fixtures import EOD

from megatron_bfp.indexed_dataset.reader import IndexedDataset


@pytest.mark.parametrize("moment", [0.3, 1, pytest.param(4, marks=pytest.mark.slow)])
def test_an_interrupted_run_says_so_and_keeps_finished_shards_only(tmp_path, tokenizer_file, no_fast_library, moment):
    """Ctrl-C and a scheduler's SIGTERM reach the whole group of processes."""
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps({"text": "a document " * 40}) + "\n")
    path.write_bytes(path.read_bytes() * (100_000 if moment < 2 else 1_000_000))  # more than is done by then
    arguments = ["--input", path, "--output-prefix", tmp_path / "out", "--tokenizer-model", tokenizer_file]
    arguments += ["--seq-length", "64", "--workers", "2", "--skip-bad-documents"]
    for number, status, message in (
        (signal.SIGINT, 130, "preprocess_bfp.py: interrupted\n"),
        (signal.SIGTERM, 143, ""),
    ):
        command_line = [*map(str, [sys.executable, ROOT / "tools" / "preprocess_bfp.py", *arguments])]
        options = {"start_new_session": True, "env": no_fast_library}
        # tests that run in the background of a shell are told to ignore SIGINT, and so would this process be
        options["preexec_fn"] = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        process = subprocess.Popen(command_line, stderr=subprocess.PIPE, text=True, **options)
        deadline = time.monotonic() + 60
        while not (tmp_path / "out.shards" / "run").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(moment)
        os.killpg(process.pid, number)
        assert process.wait(timeout=60) == status
        lines = [line for line in process.stderr.read().splitlines(True) if not line.startswith("tokenizing")]
        kept = {name for name in files_in(tmp_path) if "out.shards/0" in name or "out.shards/joined-0" in name}
        assert "".join(line for line in lines if "goes on from there" not in line) == message
        assert len(lines) == (message != "") + bool(kept)
        of_run = {"joined-0.bin", "joined-0.lengths"}
        assert {name.rsplit("/")[-1] for name in kept} <= {"record", "0.bin", "0.idx"} | of_run
        others = {"out.shards/run", "out.shards/lock"} if kept else set()
        assert {*files_in(tmp_path)} - kept == {"in.jsonl"} | others
        shutil.rmtree(tmp_path / "out.shards", ignore_errors=True)


def test_a_terminated_run_leaves_neither_files_nor_processes(tmp_path, tokenizer_file, no_fast_library):
    path = tmp_path / "in.jsonl"
    with open(path, "w") as file:
        for number in range(60_000):
            file.write(json.dumps({"text": f"document {number} " * 40}) + "\n")
    arguments = ["--input", path, "--output-prefix", tmp_path / "out", "--tokenizer-model", tokenizer_file]
    command_line = [sys.executable, ROOT / "tools" / "preprocess_bfp.py", *arguments, "--seq-length", "64"]
    for signal_number, status in ((signal.SIGTERM, 143), (signal.SIGKILL, -9)):
        command_line = [*map(str, command_line), "--workers", "2"]
        process = subprocess.Popen(command_line, start_new_session=True, env=no_fast_library)
        deadline = time.monotonic() + 60
        while not workers_of(process.pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        workers = workers_of(process.pid)
        assert workers
        time.sleep(1)
        process.send_signal(signal_number)
        assert process.wait(timeout=60) == status
        deadline = time.monotonic() + 20
        while any(os.path.exists(f"/proc/{worker}") for worker in workers) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not any(os.path.exists(f"/proc/{worker}") for worker in workers)
        if signal_number == signal.SIGTERM:
            assert files_in(tmp_path) == ["in.jsonl"]


def workers_of(parent):
    """Process ids of the tool's worker processes."""
    return open(f"/proc/{parent}/task/{parent}/children").read().split()


@pytest.mark.case(7)
@pytest.mark.slow
def test_a_rerun_after_a_kill_at_any_moment_gives_the_same_bytes(tmp_path, tokenizer_file):
    """Thirty kills, each of a run that goes on where the one before was killed, until it is done and begun anew."""
    path = tmp_path / "in.jsonl"
    with open(path, "w") as file:
        for number in range(300_000):
            file.write(json.dumps({"text": f"document {number} " * (1 + number % 60)}) + "\n")
    common = ["--input", path, "--tokenizer-model", tokenizer_file, "--eod-token", EOD, "--append-eod"]
    common += ["--seq-length", "128", "--split", "8,1,1", "--workers", "2", "--output-prefix"]
    (tmp_path / "whole").mkdir()
    start = time.monotonic()
    assert preprocess_tool(*common, tmp_path / "whole" / "out").returncode == 0
    seconds = time.monotonic() - start
    reference = contents(tmp_path / "whole")
    rng = random.Random(3)
    killed, whole_runs = [], 0
    folder = tmp_path / "killed"
    folder.mkdir()
    while len(killed) < 30 and whole_runs < 30:
        command_line = [sys.executable, ROOT / "tools" / "preprocess_bfp.py", *common, folder / "out"]
        process = subprocess.Popen([*map(str, command_line)], start_new_session=True, stdout=subprocess.DEVNULL)
        time.sleep(rng.random() * seconds)
        os.killpg(process.pid, signal.SIGKILL)
        if process.wait() == -signal.SIGKILL:
            killed.append({name.split("/")[0] for name in files_in(folder)})
        if os.path.exists(folder / "out_text_document.idx"):
            IndexedDataset(str(folder / "out_text_document"))  # whatever can be opened is whole
        if rng.random() < 0.15 or process.returncode == 0:
            done = preprocess_tool(*common, folder / "out")
            assert done.returncode == 0, done.stderr
            assert contents(folder) == reference
            whole_runs += 1
            shutil.rmtree(folder)
            folder.mkdir()
    assert len(killed) == 30 and whole_runs > 1
    assert sum("out.shards" in names for names in killed) > 5  # some in the middle
    assert preprocess_tool(*common, folder / "out").returncode == 0
    assert contents(folder) == reference


def contents(folder):
    """All files but the summary, which tells times."""
    return {name: (folder / name).read_bytes() for name in files_in(folder) if not name.endswith(".summary.json")}
