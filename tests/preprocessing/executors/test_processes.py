"""Tasks done by processes: all of them once, errors as they are, and processes that are killed."""

import os
import signal
import time
from functools import partial

import pytest

from megatron_bfp.errors import InputError, OptionError
from megatron_bfp.preprocessing.executors.processes import run_in_processes


class Work:
    """The work on a task, whose result is the task itself."""

    def __init__(self, task, folder=None, times=None):
        self.task, self.folder, self.times = task, folder, times

    def compute(self, report):
        pass

    def finish(self):
        return self.task


class Square(Work):
    def compute(self, report):
        report(1)

    def finish(self):
        return self.task * self.task


class Failing(Work):
    def compute(self, report):
        if self.task == 3:
            raise OptionError("three is no good")


class KillingItself(Work):
    """Dies in the middle of task 2, the first few times."""

    def compute(self, report):
        tried = os.path.join(self.folder, f"tried-{len(os.listdir(self.folder))}")
        if self.task == 2 and len(os.listdir(self.folder)) < self.times:
            open(tried, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)


class KillingItselfWhileFinishing(Work):
    """Dies in task 2, while the task before is finished."""

    def compute(self, report):
        if self.task == 2 and not os.listdir(self.folder):
            open(os.path.join(self.folder, "tried"), "w").close()
            os.kill(os.getpid(), signal.SIGKILL)

    def finish(self):
        time.sleep(0.2)
        return self.task


class WaitingForTheNext(Work):
    """Tasks 0 and 1 are finished when their process has computed another one."""

    def compute(self, report):
        time.sleep(0.05)
        open(os.path.join(self.folder, f"{os.getpid()}-{self.task}"), "w").close()

    def finish(self):
        deadline = time.monotonic() + 10
        while self.task < 2:
            names = os.listdir(self.folder)
            if any(name.startswith(f"{os.getpid()}-") and name > f"{os.getpid()}-{self.task}" for name in names):
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True


class FailingToFinish(Work):
    def finish(self):
        if self.task == 3:
            raise OptionError("the disk is full")


class Leaving(Work):
    def compute(self, report):
        os._exit(5)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_every_task_is_done_once(workers):
    parts = []
    results = dict(run_in_processes(Square, range(20), workers, parts.append))
    assert results == {number: number * number for number in range(20)}
    assert sum(parts) == 20


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_is_raised_as_it_was(workers):
    with pytest.raises(OptionError, match="three is no good"):
        list(run_in_processes(Failing, range(6), workers, print))
    with pytest.raises(OptionError, match="the disk is full"):
        list(run_in_processes(FailingToFinish, range(6), workers, print))


def test_a_task_is_finished_while_the_next_is_computed(tmp_path):
    results = dict(run_in_processes(partial(WaitingForTheNext, folder=tmp_path), range(8), 2, print))
    assert results == dict.fromkeys(range(8), True)


def test_tasks_are_taken_as_workers_come_free():
    taken = []

    def tasks():
        for number in range(10):
            taken.append(number)
            yield number

    for number, _ in enumerate(run_in_processes(Square, tasks(), 2, print), 1):
        assert len(taken) <= number + 4  # each of two workers finishes one and computes one


def test_a_killed_worker_is_named_and_its_task_tried_again(tmp_path, capfd):
    results = dict(run_in_processes(partial(KillingItself, folder=tmp_path, times=2), range(5), 2, print))
    assert results == {number: number for number in range(5)}
    lines = [line for line in capfd.readouterr().err.splitlines() if "trying again" in line]
    assert len(lines) == 2 and all("was killed by SIGKILL at 2; trying again" in line for line in lines)


def test_a_killed_worker_s_task_that_was_not_finished_is_done_again(tmp_path):
    results = list(run_in_processes(partial(KillingItselfWhileFinishing, folder=tmp_path), range(8), 2, print))
    assert sorted(results) == [(number, number) for number in range(8)]


def test_a_task_that_kills_every_worker_is_given_up(tmp_path):
    with pytest.raises(
        InputError, match=r"worker process \d+ was killed by SIGKILL at 2, the 3rd time; is there enough"
    ):
        list(run_in_processes(partial(KillingItself, folder=tmp_path, times=9), range(5), 2, print))
    with pytest.raises(InputError, match="ended with exit status 5 at 0"):
        list(run_in_processes(Leaving, range(1), 2, print))


def test_no_process_is_left_behind():
    import multiprocessing

    before = len(multiprocessing.active_children())
    with pytest.raises(OptionError):
        list(run_in_processes(Failing, range(6), 3, print))
    list(run_in_processes(Square, range(6), 3, print))
    deadline = time.monotonic() + 10
    while len(multiprocessing.active_children()) > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(multiprocessing.active_children()) == before
