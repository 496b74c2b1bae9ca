"""What ranks do together: rank 0 works and errs for all, signals and time stop a run, and its workers end with it."""

import os
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
from helpers.datasets import ROOT

torch = pytest.importorskip("torch")

from torch import distributed
from trainer import ranks
from trainer.ranks import (
    STOP_SIGNALS,
    StopRequest,
    check_shared,
    leave_signals_to_the_trainer,
    on_each_node,
    on_first_rank,
)

from megatron_bfp.errors import OptionError, SequenceIndexError


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
    monkeypatch.setattr(ranks, "die_with_parent", parents.append)
    monkeypatch.setattr(ranks.multiprocessing, "parent_process", lambda: SimpleNamespace(pid=42))
    leave_signals_to_the_trainer(0)
    assert parents == [42]


def test_fault_C03_a_folder_that_a_node_cannot_write_or_see_is_named(one_rank, tmp_path, monkeypatch):
    check_shared(str(tmp_path))
    on_each_node(lambda: None)

    def err():
        raise OptionError("--save there: cannot be written")

    with pytest.raises(OptionError, match=rf"--save there: cannot be written \(node {socket.gethostname()}\)"):
        on_each_node(err)
    monkeypatch.setattr(ranks.os.path, "exists", lambda path: False)
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


@pytest.mark.parametrize("here, there, expected", [(0, 15, 15), (15, 0, 15), (10, 15, 15), (0, 0, 0)])
def test_a_signal_that_any_rank_has_noted_stops_all(one_rank, monkeypatch, here, there, expected):
    def all_reduce(noted, op):
        combined = {distributed.ReduceOp.MAX: torch.maximum, distributed.ReduceOp.MIN: torch.minimum}[op]
        noted.copy_(combined(noted, torch.tensor([there, int(there > 0)])))

    request = StopRequest(torch.device("cpu"), minutes=5)
    request._signal = here
    monkeypatch.setattr(distributed, "all_reduce", all_reduce)
    assert request.agreed() == (expected, there > 0)
