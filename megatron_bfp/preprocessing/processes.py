"""Tasks done by processes of this machine. A process that is killed is named, and its task is tried again.

The processes are forks: what was loaded before, as tokenizers are, is there at once and in memory once. So the function
must not need threads that were started before, in this process or by a library.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

from ..errors import InputError

ATTEMPTS = 3
"""How often a task is tried whose process is killed."""
REPORT_SECONDS = 0.5

Function = Callable[[Any, Callable[[Any], None]], Any]
"""Takes a task and something that is told, in parts that can be added, how much of it is done."""


def run_in_processes(
    function: Function, tasks: Iterable[Any], workers: int, report: Callable[[Any], None]
) -> Iterator[tuple[Any, Any]]:
    """Do tasks, with one worker in this process.

    Args:
        function: is what it was when the call began. Tasks and results can be pickled.
        tasks: are taken as workers come free.

    Yields:
        Each task with its result, as they are done.

    Raises:
        What ``function`` raises.
        InputError: the process of a task was killed ``ATTEMPTS`` times.
    """
    if workers == 1:
        for task in tasks:
            yield task, function(task, report)
        return
    pool: list[_Worker] = []
    try:
        yield from _run(function, iter(tasks), workers, report, pool)
    finally:
        for worker in pool:
            worker.kill()


def _run(
    function: Function, tasks: Iterator[Any], workers: int, report: Callable[[Any], None], pool: list["_Worker"]
) -> Iterator[tuple[Any, Any]]:
    killed: list[tuple[Any, int]] = []  # tasks to try again, and how often they were tried
    more = True
    while True:
        while more or killed:
            idle = next((worker for worker in pool if worker.task is None), None)
            if idle is None and len(pool) == workers:
                break
            task, attempts = killed.pop() if killed else (next(tasks, None), 0)
            if task is None:
                more = False
                continue
            if idle is None:
                idle = _Worker(function)
                pool.append(idle)
            idle.start(task, attempts + 1)
        busy = {worker.connection: worker for worker in pool if worker.task is not None}
        if not busy:
            return
        for connection in wait(list(busy)):
            worker = busy[connection]
            task, attempts = worker.task, worker.attempts
            try:
                kind, value = connection.recv()
            except (EOFError, ConnectionError):
                pool.remove(worker)
                killed.append((task, attempts))
                _say_killed(worker, task, attempts)
                continue
            if kind == "part":
                report(value)
                continue
            worker.task = None
            if kind == "raised":
                raise value
            yield task, value


class _Worker:
    """A process that does one task after another."""

    def __init__(self, function: Function) -> None:
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(function, theirs), daemon=True)
        self.task: Any = None
        self.attempts = 0
        with _signals_held():
            self.process.start()
        theirs.close()

    def start(self, task: Any, attempts: int) -> None:
        self.task, self.attempts = task, attempts
        try:
            self.connection.send(task)
        except (BrokenPipeError, ConnectionError):
            pass  # it was killed while it was idle: reading from it says so

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def _say_killed(worker: _Worker, task: Any, attempts: int) -> None:
    """Say that a worker was killed.

    Raises:
        InputError: its task is not to be tried again.
    """
    worker.process.join()
    code = worker.process.exitcode
    how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with exit status {code}"
    what = f"worker process {worker.process.pid} {how} at {task}"
    if attempts == ATTEMPTS:
        raise InputError(f"{what}, the {ATTEMPTS}rd time; is there enough memory? Fewer --workers need less")
    print(f"{what}; trying again", file=sys.stderr, flush=True)


def _work(function: Function, connection: Connection) -> None:
    """What a worker process does."""
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    while True:
        try:
            task = connection.recv()
        except (EOFError, ConnectionError):
            return
        parts = _Parts(connection)
        try:
            answer = ("done", function(task, parts.add))
        except Exception as error:
            answer = ("raised", error)
        parts.send()
        connection.send(answer)


class _Parts:
    """Adds parts up and sends them now and then."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sum: Any = None
        self._due = time.monotonic() + REPORT_SECONDS

    def add(self, part: Any) -> None:
        self._sum = part if self._sum is None else self._sum + part
        if time.monotonic() >= self._due:
            self.send()

    def send(self) -> None:
        if self._sum is not None:
            self._connection.send(("part", self._sum))
        self._sum, self._due = None, time.monotonic() + REPORT_SECONDS


def _end_with_the_parent() -> None:
    """A worker whose parent was killed would go on for a while."""
    multiprocessing.parent_process().join()
    os._exit(1)


@contextmanager
def _signals_held() -> Iterator[None]:
    """Hold back Ctrl-C and SIGTERM here, and for ever in processes started meanwhile: they are the parent's business.

    Both may reach a whole group of processes. The parent then ends the workers, without a traceback from each.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
