"""Which checkpoint is complete, which one is the latest, and what it may be resumed or converted with."""

import errno
import json
import os
import subprocess
import sys

import psutil
import pytest
from helpers.datasets import ROOT

pytest.importorskip("deepspeed")

from trainer.arguments import parse_arguments
from trainer.checkpoints import folder, saving
from trainer.checkpoints.folder import Checkpoint, SavedRun, latest_checkpoint, open_checkpoint
from trainer.checkpoints.loading import check_options, convert

from megatron_bfp.errors import InputError, OptionError

SAVED = SavedRun(3, 24, 8, 4, 1, 1)
NEEDED = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 1 --train-iters 100"
NEEDED += " --data-path data --seq-length 64 --tokenizer-model tokenizer.json"


@pytest.fixture
def checkpoint(tmp_path):
    """Makes a complete checkpoint; returns its folder."""

    def make(name):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "weights.pt").write_bytes(bytes(100))
        content = vars(SAVED) | {"files": {"weights.pt": 100}}
        (folder / "complete.json").write_text(json.dumps(content))
        return folder

    return make


def test_a_complete_checkpoint_says_what_it_is(checkpoint):
    folder = checkpoint("iter_0000003")
    assert open_checkpoint(str(folder)) == Checkpoint(str(folder), SAVED, None)


@pytest.mark.parametrize(
    "spoil, problem",
    [
        (lambda folder: (folder / "complete.json").unlink(), "it has no complete.json: its run ended while writing it"),
        (lambda folder: (folder / "complete.json").write_text('{"files'), "complete.json: "),
        (lambda folder: (folder / "complete.json").write_text('{"files": {}}'), "complete.json: "),
        (lambda folder: (folder / "weights.pt").unlink(), "weights.pt is missing"),
        (lambda folder: os.truncate(folder / "weights.pt", 10), "weights.pt has 10 bytes, not 100"),
    ],
)
def test_a_checkpoint_that_is_not_complete_is_skipped_by_name(checkpoint, monkeypatch, spoil, problem):
    lines = []
    monkeypatch.setattr(folder, "log", lines.append)
    whole, spoilt = checkpoint("iter_0000999"), checkpoint("iter_10000000")
    checkpoint("iter_0000003")
    checkpoint("iter_10000001_universal")
    spoil(spoilt)
    assert latest_checkpoint(str(whole.parent)).path == str(whole)
    assert len(lines) == 1 and lines[0].startswith(f"--load {whole.parent}: skipped {spoilt}: {problem}")


def test_the_latest_checkpoint_is_that_of_the_highest_number(checkpoint):
    for name in ("iter_9999999", "iter_10000000", "iter_0000001"):
        path = checkpoint(name)
    assert latest_checkpoint(str(path.parent)).path.endswith("iter_10000000")


def test_checkpoints_are_removed_by_number_too(checkpoint, monkeypatch):
    monkeypatch.setattr(saving, "log", lambda line: None)
    for name in ("iter_9999998", "iter_9999999", "iter_10000000", "iter_10000001", "iter_10000002_universal"):
        folder = checkpoint(name)
    (folder.parent / "iter_9999999" / "complete.json").unlink()
    saving._remove_older(str(folder.parent), 10_000_001, 2)
    left = ["iter_10000000", "iter_10000001", "iter_10000002_universal", "iter_9999999"]
    assert sorted(os.listdir(folder.parent)) == left
    for _ in range(2):
        saving._remove_older(str(folder.parent), 10_000_001, 1)
    assert sorted(os.listdir(folder.parent)) == left[1:]
    saving._remove_older(str(folder.parent), 10_000_000, 1)
    assert sorted(os.listdir(folder.parent)) == left[1:]


def test_a_folder_that_cannot_be_listed_is_one_error(checkpoint, monkeypatch):
    parent = checkpoint("iter_0000003").parent

    def stale(path):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(folder.os, "listdir", stale)
    with pytest.raises(InputError, match=f"--load {parent}: cannot be read: Stale file handle"):
        latest_checkpoint(str(parent))


def test_fault_C02_a_conversion_ends_with_its_trainer():
    """The first has no trainer any more when it starts; the trainer of the second is killed."""
    script = ROOT / "examples" / "convert_checkpoint.py"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
    environment = os.environ | {"PYTHONPATH": paths, "CONVERTED_FOR": "1"}
    assert subprocess.run([sys.executable, str(script)], env=environment, capture_output=True).returncode == 1
    # a conversion that waits, in place of one that works, with a process of its own
    code = "import os, runpy, subprocess, sys, types\n"
    code += "if sys.argv[1:] != ['convert']:\n"
    code += "    environment = os.environ | {'CONVERTED_FOR': str(os.getpid())}\n"
    code += "    subprocess.run([sys.executable, '-c', os.environ['CODE'], 'convert'], env=environment)\n"
    code += "sys.modules['torch'] = types.ModuleType('torch')\n"
    code += "import multiprocessing, time\n"
    code += "try:\n"
    code += f"    runpy.run_path({str(script)!r}, run_name='__main__')\n"
    code += "except ImportError:\n"  # of a torch that is none
    code += "    os.fork()\n"
    code += "    os.write(1, b'%d\\n' % os.getpid())\n"
    code += "    time.sleep(600)\n"
    trainer = subprocess.Popen(
        [sys.executable, "-c", code], env=environment | {"CODE": code}, stdout=subprocess.PIPE, text=True
    )
    both = [psutil.Process(int(trainer.stdout.readline())) for _ in range(2)]
    trainer.kill()
    trainer.wait()
    _, alive = psutil.wait_procs(both, timeout=5)
    for process in alive:
        process.kill()
    assert not alive


def test_an_empty_or_missing_folder_has_no_checkpoint(tmp_path):
    assert latest_checkpoint(str(tmp_path)) is None
    assert latest_checkpoint(str(tmp_path / "missing")) is None


@pytest.mark.parametrize(
    "text, named",
    [
        ("--global-batch-size 16", "--global-batch-size 8, not 16"),
        ("--tensor-model-parallel-size 2", "--tensor-model-parallel-size 1, not 2"),
        ("--zero-stage 3", "--zero-stage 1, not 3"),
    ],
)
def test_options_that_a_checkpoint_does_not_fit_are_named(text, named):
    fitting = parse_arguments(f"{NEEDED} --global-batch-size 8 --zero-stage 1".split())
    check_options("there", SAVED, fitting)
    other = parse_arguments(f"{NEEDED} --global-batch-size 8 --zero-stage 1 {text}".split())
    with pytest.raises(OptionError, match=f"--load there: it was saved with {named}"):
        check_options("there", SAVED, other)


def test_what_deepspeed_cannot_convert_is_one_error(checkpoint, tmp_path):
    folder = checkpoint("iter_0000003")
    with pytest.raises(InputError, match="resume with the 4 data-parallel ranks that saved it, or fix that"):
        convert(open_checkpoint(str(folder)), str(tmp_path))
    saved = SavedRun(3, 24, 8, 4, tensor_model_parallel_size=2, zero_stage=3)
    with pytest.raises(OptionError, match="cannot convert ZeRO 3 with tensor parallelism"):
        convert(Checkpoint("there", saved, None), str(tmp_path))
