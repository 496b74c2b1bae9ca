"""Parts of long runs that need no launcher: which checkpoint is complete, what it may be resumed with, and signals."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
from helpers.datasets import ROOT

pytest.importorskip("deepspeed")

import torch
from torch import distributed
from trainer import checkpoints as pretrain_checkpoints
from trainer import ranks as pretrain_ranks
from trainer import ranks as pretrain_signals
from trainer.arguments import parse_arguments
from trainer.checkpoints import Checkpoint, SavedRun, check_options, convert, open_checkpoint
from trainer.ranks import (
    STOP_SIGNALS,
    StopRequest,
    check_shared,
    leave_signals_to_the_trainer,
    on_each_node,
    on_first_rank,
)

from megatron_bfp.errors import InputError, OptionError, SequenceIndexError

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
    monkeypatch.setattr(pretrain_checkpoints, "log", lines.append)
    whole, spoilt = checkpoint("iter_0000999"), checkpoint("iter_10000000")
    checkpoint("iter_0000003")
    checkpoint("iter_10000001_universal")
    spoil(spoilt)
    found = pretrain_checkpoints._latest(str(whole.parent))
    assert found.path == str(whole)
    assert len(lines) == 1 and lines[0].startswith(f"--load {whole.parent}: skipped {spoilt}: {problem}")


def test_the_latest_checkpoint_is_that_of_the_highest_number(checkpoint):
    for name in ("iter_9999999", "iter_10000000", "iter_0000001"):
        folder = checkpoint(name)
    assert pretrain_checkpoints._latest(str(folder.parent)).path.endswith("iter_10000000")


def test_checkpoints_are_removed_by_number_too(checkpoint, monkeypatch):
    monkeypatch.setattr(pretrain_checkpoints, "log", lambda line: None)
    for name in ("iter_9999998", "iter_9999999", "iter_10000000", "iter_10000001", "iter_10000002_universal"):
        folder = checkpoint(name)
    (folder.parent / "iter_9999999" / "complete.json").unlink()
    pretrain_checkpoints._remove_older(str(folder.parent), 10_000_001, 2)
    left = ["iter_10000000", "iter_10000001", "iter_10000002_universal", "iter_9999999"]
    assert sorted(os.listdir(folder.parent)) == left
    for _ in range(2):
        pretrain_checkpoints._remove_older(str(folder.parent), 10_000_001, 1)
    assert sorted(os.listdir(folder.parent)) == left[1:]
    pretrain_checkpoints._remove_older(str(folder.parent), 10_000_000, 1)
    assert sorted(os.listdir(folder.parent)) == left[1:]


def test_a_folder_that_cannot_be_listed_is_one_error(checkpoint, monkeypatch):
    folder = checkpoint("iter_0000003").parent

    def stale(path):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(pretrain_checkpoints.os, "listdir", stale)
    with pytest.raises(InputError, match=f"--load {folder}: cannot be read: Stale file handle"):
        pretrain_checkpoints._latest(str(folder))


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
    assert pretrain_checkpoints._latest(str(tmp_path)) is None
    assert pretrain_checkpoints._latest(str(tmp_path / "missing")) is None


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
    with pytest.raises(InputError, match="resume with the 4 data-parallel ranks that saved it, or mend that"):
        convert(open_checkpoint(str(folder)), str(tmp_path))
    saved = SavedRun(3, 24, 8, 4, tensor_model_parallel_size=2, zero_stage=3)
    with pytest.raises(OptionError, match="cannot convert ZeRO 3 with tensor parallelism"):
        convert(Checkpoint("there", saved, None), str(tmp_path))


@pytest.fixture
def one_rank():
    """A process group of this process alone; signals are handled as before afterwards."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    is_first = not distributed.is_initialized()  # tests of other files leave theirs
    if is_first:
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    if is_first:
        distributed.destroy_process_group()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_noted_and_kept(one_rank, number):
    request = StopRequest(torch.device("cpu"), minutes=5)
    assert request.agreed() == (0, False)
    os.kill(os.getpid(), number)
    assert request.agreed() == request.agreed() == (number, False)


def test_the_time_of_a_run_is_up(one_rank):
    assert StopRequest(torch.device("cpu"), minutes=0).agreed() == (0, True)


def test_processes_that_read_samples_ignore_signals(one_rank):
    leave_signals_to_the_trainer(0)
    for number in STOP_SIGNALS:
        os.kill(os.getpid(), number)


def test_fault_C02_processes_that_read_samples_die_with_their_trainer(monkeypatch, one_rank):
    parents = []
    monkeypatch.setattr(pretrain_signals, "die_with_parent", parents.append)
    monkeypatch.setattr(pretrain_signals.multiprocessing, "parent_process", lambda: SimpleNamespace(pid=42))
    leave_signals_to_the_trainer(0)
    assert parents == [42]


def test_fault_C03_a_folder_that_a_node_cannot_write_or_see_is_named(one_rank, tmp_path, monkeypatch):
    check_shared(str(tmp_path))
    on_each_node(lambda: None)

    def err():
        raise OptionError("--save there: cannot be written")

    with pytest.raises(OptionError, match=rf"--save there: cannot be written \(node {socket.gethostname()}\)"):
        on_each_node(err)
    monkeypatch.setattr(pretrain_ranks.os.path, "exists", lambda path: False)
    with pytest.raises(OptionError, match=f"--save {tmp_path}: node {socket.gethostname()} does not see it"):
        check_shared(str(tmp_path))
    assert os.listdir(tmp_path) == []


def test_rank_0_works_and_errs_for_all(one_rank):
    assert on_first_rank(lambda: [1]) == [1]

    def err():
        raise SequenceIndexError("damaged")

    with pytest.raises(OptionError, match="damaged"):
        on_first_rank(err)


def test_a_reader_of_the_log_that_is_gone_stops_nothing():
    """In a process of its own, whose output is a pipe that nobody reads."""
    code = "from trainer import ranks; ranks.distributed.get_rank = lambda: 0\n"
    code += "for _ in range(3): ranks.log('lost')"
    reader, writer = os.pipe()
    os.close(reader)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "examples")])}
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True, env=environment
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
