"""How a rank ends: its processes, and the other ranks, within seconds. Processes without torch stand for ranks.

Each test starts processes that work with ``run_rank`` as ranks do, on a few lines of code. They have a name in their
environment, by which all that are left are found.
"""

import os
import signal
import subprocess
import sys
import time
import uuid

import psutil
import pytest
from helpers.datasets import ROOT
from trainer import process as rank_process
from trainer.process import check_command_line, complete_environment

from megatron_bfp import OptionError

SECONDS = 8.0
PRELUDE = """
import multiprocessing, os, signal, sys, time
from trainer import lifeline
from trainer.lifeline import Lifeline, die_with_parent
from trainer.process import run_rank
from megatron_bfp.errors import InputError

rank = int(os.environ["RANK"])
lifeline.GRACE_SECONDS = float(os.environ["GRACE"])

def share(work):  # what a broadcast does
    path = os.environ["SHARED"]
    if rank == 0:
        result = work()
        with open(path + ".part", "w") as file:
            file.write(repr(result))
        os.rename(path + ".part", path)
        return result
    while not os.path.exists(path):
        time.sleep(0.01)
    return eval(open(path).read())

def read_samples():
    die_with_parent(multiprocessing.parent_process().pid)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(600)

def start_worker():
    worker = multiprocessing.get_context("fork").Process(target=read_samples, daemon=True)
    worker.start()
    return worker

def connect():
    Lifeline.start(rank, int(os.environ["WORLD_SIZE"]), share)

def mark(name):
    open(os.environ["SHARED"] + "." + name, "w").close()

def wait_for(name):
    while not os.path.exists(os.environ["SHARED"] + "." + name):
        time.sleep(0.01)

def main():
    connect()
    start_worker()
    BODY

sys.exit(run_rank(main, "trainer"))
"""


class Ranks:
    """Processes that run the same code as ranks of one world."""

    def __init__(self, folder, body, world_size, grace):
        self.name, self.shared = uuid.uuid4().hex, folder / "shared"
        code = PRELUDE.replace("BODY", body.strip().replace("\n", "\n    "))
        paths = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
        environment = os.environ | {"PYTHONPATH": paths, "NAME_OF_RUN": self.name, "SHARED": str(self.shared)}
        environment |= {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "GRACE": str(grace)}
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", code],
                env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(world_size)
        ]

    def wait_for(self, name):
        while not os.path.exists(f"{self.shared}.{name}"):
            time.sleep(0.01)

    def end(self, seconds=SECONDS):
        """Exit statuses, and what was printed as errors, when all processes have ended in time."""
        ended = []
        end = time.monotonic() + seconds + 3  # to start
        for process in self.processes:
            _, errors = process.communicate(timeout=max(0.1, end - time.monotonic()))
            ended.append((process.returncode, errors))
        while self.left() and time.monotonic() < end:
            time.sleep(0.05)
        assert not self.left()
        return ended

    def left(self):
        left = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("NAME_OF_RUN") == self.name:
                    left.append(process)
            except psutil.Error:
                pass
        return left


@pytest.fixture
def ranks(tmp_path):
    started = []

    def start(body, world_size=1, grace=0.5):
        started.append(Ranks(tmp_path, body, world_size, grace))
        return started[-1]

    yield start
    for run in started:
        for process in run.left():
            process.kill()
        for process in run.processes:
            process.communicate()


@pytest.mark.parametrize(
    "body, status, printed",
    [
        ("raise RuntimeError('an accident')", 1, "RuntimeError: an accident"),
        ("raise InputError('bad data')", 2, "trainer: error: bad data"),
        ("raise KeyboardInterrupt", 130, "trainer: interrupted"),
        ("sys.exit(7)", 7, ""),
        ("sys.exit('a text')", 1, "a text"),
        ("os.close(2); raise RuntimeError", 1, ""),
        ("return 143", 143, ""),
        ("signal.signal(signal.SIGCHLD, lambda *_: 1 / 0); return 3", 3, ""),  # as DataLoader's, of a worker's end
        ("return", 0, ""),
    ],
)
def test_fault_C02_a_rank_ends_with_its_workers(ranks, body, status, printed):
    ((actual, errors),) = ranks(body).end()
    assert actual == status
    assert printed in errors and (printed or not errors)


def test_fault_C02_workers_end_with_a_rank_that_is_killed(ranks):
    run = ranks("mark('ready'); time.sleep(600)")
    run.wait_for("ready")
    run.processes[0].kill()
    assert run.end(3)[0][0] == -signal.SIGKILL


def test_fault_C02_a_worker_whose_rank_has_ended_before_it_began_ends(ranks):
    assert ranks("die_with_parent(12345); time.sleep(600)").end(3)[0][0] == 1


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize(
    "accident, status",
    [("raise RuntimeError('an accident')", 1), ("os.kill(os.getpid(), signal.SIGKILL)", -9), ("sys.exit(5)", 5)],
)
def test_fault_C02_other_ranks_end_with_a_lost_one(ranks, lost, accident, status):
    """The others wait for it, as ranks wait in a reduction, with workers that hold copies of all connections."""
    run = ranks(
        f"mark(f'started{{rank}}')\nif rank == {lost}:\n    [wait_for(f'started{{i}}') for i in range(3)]\n    "
        f"time.sleep(0.3)\n    {accident}\ntime.sleep(600)",
        3,
    )
    ended = run.end()
    others = {rank: (1 if status == -9 else status, f"rank {lost} ended unexpectedly") for rank in range(3)}
    for rank, (actual, errors) in enumerate(ended):
        assert actual == (status if rank == lost else others[rank][0]), ended
        assert (others[rank][1] in errors) == (rank == 0 != lost)  # once on each node


def test_fault_C02_a_lost_rank_is_noticed_also_if_a_process_of_it_is_left(ranks):
    """One that nothing of ours ends, and that was forked with the connections."""
    run = ranks(
        "if rank:\n    if os.fork() == 0:\n        mark('left'); time.sleep(4); os._exit(0)\n    wait_for('left')\n    "
        "os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(600)",
        2,
    )
    run.wait_for("left")
    assert run.processes[0].wait(3) == 1
    run.end()


def test_fault_C02_an_error_of_all_ranks_is_told_by_each_itself(ranks):
    ended = ranks("if rank == 0:\n    time.sleep(1)\nraise InputError('bad data')", 2, grace=3).end()
    assert ended == [(2, "trainer: error: bad data\n"), (2, "trainer (rank 1): error: bad data\n")]


def test_fault_C02_a_rank_that_is_done_ends_no_other(ranks):
    """Nor does one that connects and goes away again without being a rank."""
    body = """
import socket
if rank == 0:
    wait_for("done")
    time.sleep(1)
else:
    for text in (b"", b"done\\n", b"rank 1 wrong\\nfailed 1\\n", b"\\xff" * 5000):
        with socket.create_connection(("127.0.0.1", share(None)[0])) as stranger:
            stranger.sendall(text)
    mark("done")
"""
    assert ranks(body, 2).end() == [(0, ""), (0, "")]


def test_fault_C02_without_a_connection_a_rank_goes_on(ranks):
    ((status, errors),) = ranks("Lifeline.start(1, 2, lambda work: (1, 'secret'))").end()  # port 1 is closed
    assert status == 0 and "rank 1: no connection to 127.0.0.1:1 (" in errors


LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", *rank_process.OTHER_LAUNCHERS)


@pytest.fixture
def environment(monkeypatch):
    """Sets the variables of a launcher, and no others."""
    before = dict(os.environ)

    def set_variables(**variables):
        for name in LAUNCHED:
            os.environ.pop(name, None)
        os.environ.update(variables)

    yield set_variables
    os.environ.clear()
    os.environ.update(before)


def test_fault_C05_without_a_launcher_a_process_is_alone(environment):
    environment(SLURM_STEP_NUM_TASKS="1")
    complete_environment()
    assert [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")] == ["0", "0", "1"]
    assert os.environ["MASTER_ADDR"] == "127.0.0.1" and int(os.environ["MASTER_PORT"]) > 0


def test_fault_C05_a_launcher_s_variables_are_kept(environment):
    variables = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "node-1", "MASTER_PORT": "29500"}
    environment(**variables)
    complete_environment(local_rank=1)
    assert {name: os.environ[name] for name in variables} == variables and os.environ["LOCAL_RANK"] == "1"
    environment(**variables, LOCAL_RANK="2")
    complete_environment(local_rank=1)
    assert os.environ["LOCAL_RANK"] == "2"


@pytest.mark.parametrize(
    "variables, named",
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "has not set MASTER_ADDR, MASTER_PORT"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "has not set RANK"),
        ({"SLURM_STEP_NUM_TASKS": "8"}, "srun started 8 processes that do not know each other"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpirun started 2 processes"),
    ],
)
def test_fault_C05_processes_that_do_not_know_each_other_are_refused(environment, monkeypatch, variables, named):
    monkeypatch.setattr(rank_process.importlib.util, "find_spec", lambda name: None)
    environment(**variables)
    with pytest.raises(OptionError, match=named):
        complete_environment()


def test_wrong_options_end_the_process_and_right_ones_do_not(environment, capsys):
    def wrong():
        raise OptionError("--lr is wrong")

    check_command_line(lambda: object(), "trainer")
    check_command_line(lambda: None, "trainer")
    for local_rank, printed in (("0", "trainer: error: --lr is wrong\n"), ("1", "")):
        environment(RANK=local_rank, LOCAL_RANK=local_rank)
        with pytest.raises(SystemExit) as error:
            check_command_line(wrong, "trainer")
        assert error.value.code == 2
        assert capsys.readouterr().err == printed
