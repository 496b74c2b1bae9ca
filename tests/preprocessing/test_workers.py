"""Jobs with several workers: a worker that is killed, a disk that is full, Ray."""

import json
import os
import resource
import signal
import subprocess
import sys
import time

import pytest
from helpers.datasets import ROOT
from helpers.jobs import dataset_bytes

pytest.importorskip("tokenizers")

from helpers.tokenizer_fixtures import EOD

from megatron_bfp.indexed_dataset.reader import IndexedDataset


def test_a_worker_that_is_killed_is_replaced(corpus, tmp_path, tokenizer_file, no_fast_library):
    """``kill -9`` of one worker: it is named, its task is done again, and the bytes are the same."""
    corpus.write_text(corpus.read_text() * 60)
    common = ["--input", corpus, "--tokenizer-model", tokenizer_file, "--eod-token", EOD, "--append-eod"]
    tool = [sys.executable, ROOT / "tools" / "preprocess_bfp.py", *common, "--seq-length", "64", "--output-prefix"]
    assert subprocess.run([*map(str, [*tool, tmp_path / "whole"])], stdout=subprocess.DEVNULL).returncode == 0
    process = subprocess.Popen(
        [*map(str, [*tool, tmp_path / "out", "--workers", "2"])],
        env=no_fast_library,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    unfinished_tasks = []
    while not unfinished_tasks and time.monotonic() < deadline:
        time.sleep(0.02)
        unfinished_tasks = list(tmp_path.glob("out.shards/[0-9]*-[0-9]*.part"))  # not the one of the file `run`
    worker = int(unfinished_tasks[0].name.split("-")[-1].removesuffix(".part"))
    os.kill(worker, signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert f"worker process {worker} was killed by SIGKILL at task " in err and "trying again" in err
    assert dataset_bytes(tmp_path) == dataset_bytes(tmp_path, "whole")


def limit_file_size():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_one_line_and_the_job_resumes_when_there_is_space(tmp_path, tokenizer_file, workers):
    """A small tmpfs where it can be mounted, else a limit on the size of files."""
    disk = tmp_path / "disk"
    disk.mkdir()
    path = tmp_path / "in.jsonl"
    with open(path, "w") as file:
        for number in range(200_000):
            file.write(json.dumps({"text": f"document {number} " * 9}) + "\n")
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(disk)]
    mounted = subprocess.run(mount, capture_output=True).returncode == 0
    try:
        common = ["--input", path, "--tokenizer-model", tokenizer_file, "--seq-length", "64", "--workers", workers]
        tool = [sys.executable, ROOT / "tools" / "preprocess_bfp.py", *common, "--output-prefix"]
        options = {"capture_output": True, "text": True, "timeout": 120}
        limit = None if mounted else limit_file_size
        full = subprocess.run([*map(str, [*tool, disk / "out"])], preexec_fn=limit, **options)
        assert full.returncode == 2 and "Traceback" not in full.stderr
        lines = [line for line in full.stderr.splitlines() if not line.startswith("tokenizing:")]
        assert "cannot be written: " in lines[-1] and len(lines) <= 2
        reason = "No space left on device" if mounted else "File too large"
        assert reason in lines[-1]
        assert not list(disk.glob("*.bin")) and not list(disk.glob("*.idx"))
        if mounted:
            assert subprocess.run(["mount", "-o", "remount,size=200m", str(disk)]).returncode == 0
        done = subprocess.run([*map(str, [*tool, disk / "out"])], **options)
        assert done.returncode == 0, done.stderr
        assert IndexedDataset(str(disk / "out_text_document")).num_documents == 200_000
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(disk)])


def test_ray_gives_the_same_bytes(corpus, tmp_path, tokenizer_file, monkeypatch):
    pytest.importorskip("ray")
    corpus.write_text(corpus.read_text() * 40)
    common = ["--input", corpus, "--tokenizer-model", tokenizer_file, "--eod-token", EOD, "--append-eod"]
    tool = [sys.executable, ROOT / "tools" / "preprocess_bfp.py", *common, "--seq-length", "64", "--output-prefix"]
    ray = ["--executor", "ray", "--ray-address", "local", "--workers", "2"]
    outputs = {"here": [], "ray": ray}
    for name, extra in outputs.items():
        done = subprocess.run(
            [*map(str, [*tool, tmp_path / name, *extra])], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
    assert dataset_bytes(tmp_path, "here") == dataset_bytes(tmp_path, "ray")
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "a"}\nbad\n')
    arguments = [*map(str, [*tool, tmp_path / "bad", *ray])]
    arguments[arguments.index(str(corpus))] = str(bad)
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "bad.jsonl:2 (byte 14): not JSON" in done.stderr.splitlines()[-1]
    none = subprocess.run(
        [*map(str, [*tool, tmp_path / "none", "--executor", "ray"])],
        capture_output=True,
        text=True,
        timeout=300,
        env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
    )
    assert none.returncode == 2 and "--ray-address" in none.stderr and "Traceback" not in none.stderr
