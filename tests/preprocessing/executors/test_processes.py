"""Tasks done by processes: all of them once, errors as they are, and processes that are killed."""

import os
import signal
import time
from functools import partial

import pytest

from megatron_bfp.errors import InputError, OptionError
from megatron_bfp.preprocessing.executors.processes import run_in_processes


def square(task, report):
    report(1)
    return lambda: task * task


def fail(task, report):
    if task == 3:
        raise OptionError("three is no good")
    return lambda: task


def kill_itself(task, report, folder, times):
    """Die in the middle of task 2, the first few times."""
    tried = os.path.join(folder, f"tried-{len(os.listdir(folder))}")
    if task == 2 and len(os.listdir(folder)) < times:
        open(tried, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return lambda: task


def kill_itself_finishing(task, report, folder):
    """Die in task 2, while the task before is finished."""
    if task == 2 and not os.listdir(folder):
        open(os.path.join(folder, "tried"), "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return lambda: time.sleep(0.2) or task


def wait_for_the_next(task, report, folder):
    """Tasks 0 and 1 are finished when their process has computed another one."""
    time.sleep(0.05)
    open(os.path.join(folder, f"{os.getpid()}-{task}"), "w").close()

    def finish():
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            if any(
                name.startswith(f"{os.getpid()}-") and name > f"{os.getpid()}-{task}" for name in os.listdir(folder)
            ):
                return True
            time.sleep(0.01)
        return False

    return finish if task < 2 else lambda: True


def fail_finishing(task, report):
    def finish():
        if task == 3:
            raise OptionError("the disk is full")

    return finish


def leave(task, report):
    os._exit(5)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_every_task_is_done_once(workers):
    parts = []
    found = dict(run_in_processes(square, range(20), workers, parts.append))
    assert found == {number: number * number for number in range(20)}
    assert sum(parts) == 20


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_is_raised_as_it_was(workers):
    with pytest.raises(OptionError, match="three is no good"):
        list(run_in_processes(fail, range(6), workers, print))
    with pytest.raises(OptionError, match="the disk is full"):
        list(run_in_processes(fail_finishing, range(6), workers, print))


def test_a_task_is_finished_while_the_next_is_computed(tmp_path):
    found = dict(run_in_processes(partial(wait_for_the_next, folder=tmp_path), range(8), 2, print))
    assert found == dict.fromkeys(range(8), True)


def test_tasks_are_taken_as_workers_come_free():
    taken = []

    def tasks():
        for number in range(10):
            taken.append(number)
            yield number

    for number, _ in enumerate(run_in_processes(square, tasks(), 2, print), 1):
        assert len(taken) <= number + 4  # each of two workers finishes one and computes one


def test_a_killed_worker_is_named_and_its_task_tried_again(tmp_path, capfd):
    found = dict(run_in_processes(partial(kill_itself, folder=tmp_path, times=2), range(5), 2, print))
    assert found == {number: number for number in range(5)}
    lines = [line for line in capfd.readouterr().err.splitlines() if "trying again" in line]
    assert len(lines) == 2 and all("was killed by SIGKILL at 2; trying again" in line for line in lines)


def test_a_killed_worker_s_task_that_was_not_finished_is_done_again(tmp_path):
    results = list(run_in_processes(partial(kill_itself_finishing, folder=tmp_path), range(8), 2, print))
    assert sorted(results) == [(number, number) for number in range(8)]


def test_a_task_that_kills_every_worker_is_given_up(tmp_path):
    with pytest.raises(
        InputError, match=r"worker process \d+ was killed by SIGKILL at 2, the 3rd time; is there enough"
    ):
        list(run_in_processes(partial(kill_itself, folder=tmp_path, times=9), range(5), 2, print))
    with pytest.raises(InputError, match="ended with exit status 5 at 0"):
        list(run_in_processes(leave, range(1), 2, print))


def test_no_process_is_left_behind():
    import multiprocessing

    before = len(multiprocessing.active_children())
    with pytest.raises(OptionError):
        list(run_in_processes(fail, range(6), 3, print))
    list(run_in_processes(square, range(6), 3, print))
    deadline = time.monotonic() + 10
    while len(multiprocessing.active_children()) > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(multiprocessing.active_children()) == before
