"""Tasks done by processes of this machine. A process that is killed is named, and its tasks are tried again.

The processes are forks: tokenizers that were loaded before are available at once, and in memory once. So the work on a
task must not need threads that were started before, in this process or by a library.

The work on a task has two steps: ``compute`` needs a core, ``finish`` waits for the disk. A process finishes one task
in a thread while it computes the next, so its core stays busy.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple, Protocol

from ...console import tell
from ...errors import InputError
from ...tokenizers.interface import first_line

ATTEMPTS = 3
"""How often a task is tried if its process is killed."""
REPORT_SECONDS = 0.5
"""Between two reports of a worker process."""

Report = Callable[[Any], None]
"""Is told how much of a task is done, in parts that can be added."""


class Work(Protocol):
    """The work on one task."""

    def compute(self, report: Report) -> None:
        """Do what needs a core."""

    def finish(self) -> Any:
        """Wait for the disk, and return the task's result. Runs in another thread while the next task is computed."""


MakeWork = Callable[[Any], Work]
"""Makes the work on a task."""


def run_in_processes(
    make_work: MakeWork, tasks: Iterable[Any], workers: int, report: Report
) -> Iterator[tuple[Any, Any]]:
    """Do tasks. One worker is this process itself.

    Args:
        make_work: is what it was when the call began. Tasks and results can be pickled.
        tasks: are taken as workers come free.

    Yields:
        Each task with its result, as they are done.

    Raises:
        What the work raises.
        InputError: the process of a task was killed ``ATTEMPTS`` times.
    """
    if workers == 1:
        yield from _run_here(make_work, tasks, report)
        return
    pool: list[_Worker] = []
    try:
        yield from _run(make_work, iter(tasks), workers, report, pool)
    finally:
        for worker in pool:
            worker.process.kill()
        for worker in pool:  # which take a moment to end, all at the same time
            worker.close()


def _run_here(make_work: MakeWork, tasks: Iterable[Any], report: Report) -> Iterator[tuple[Any, Any]]:
    for task in tasks:
        try:
            work = make_work(task)
            work.compute(report)
            result = work.finish()
        except BaseException as error:
            if not is_panic(error):
                raise
            raise portable(error, task) from None
        yield task, result


def _run(
    make_work: MakeWork, tasks: Iterator[Any], workers: int, report: Report, pool: list["_Worker"]
) -> Iterator[tuple[Any, Any]]:
    killed: list[_Attempt] = []
    more = True
    while True:
        while more or killed:
            free = next((worker for worker in pool if worker.is_free), None)
            if free is None and len(pool) == workers:
                break
            attempt = killed.pop() if killed else _Attempt(next(tasks, None), 1)
            if attempt.task is None:
                more = False
                continue
            if free is None:
                free = _Worker(make_work)
                pool.append(free)
            free.start(attempt)
        busy = [worker for worker in pool if worker.attempts]
        if not busy:
            return
        ready = wait([worker.connection for worker in busy])
        for worker in busy:
            if worker.connection not in ready:
                continue
            try:
                kind, value = worker.connection.recv()
            except (EOFError, ConnectionError):
                pool.remove(worker)
                killed += worker.killed()
                continue
            if kind == "part":
                report(value)
            elif kind == "computed":
                worker.is_free = True
            elif kind == "raised":
                raise value
            else:
                yield worker.attempts.pop(0).task, value


class _Attempt(NamedTuple):
    task: Any
    number: int
    """From 1 to ``ATTEMPTS``."""


class _Worker:
    """A process that does one task after another, and finishes each while it computes the next."""

    def __init__(self, make_work: MakeWork) -> None:
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(make_work, theirs), daemon=True)
        self.attempts: list[_Attempt] = []
        """Those that have no result yet, in order."""
        self.is_free = True
        """For another one."""
        with _signals_held():
            self.process.start()
        theirs.close()

    def start(self, attempt: _Attempt) -> None:
        self.attempts.append(attempt)
        self.is_free = False
        try:
            self.connection.send(attempt.task)
        except (BrokenPipeError, ConnectionError):
            pass  # it was killed while it was idle: reading from it says so

    def killed(self) -> list[_Attempt]:
        """Say that it was killed.

        Returns:
            The attempts to make again.

        Raises:
            InputError: the last of its tasks is not to be tried again.
        """
        self.process.join()
        code = self.process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with exit status {code}"
        *others, (task, number) = self.attempts
        what = f"worker process {self.process.pid} {how} at {task}"
        if number == ATTEMPTS:
            raise InputError(f"{what}, the {ATTEMPTS}rd time; is there enough memory? Fewer --workers need less")
        tell(f"{what}; trying again")
        return [*others, _Attempt(task, number + 1)]

    def close(self) -> None:
        """Wait for its end, once it was killed."""
        self.process.join()
        self.connection.close()


def _work(make_work: MakeWork, connection: Connection) -> None:
    """What a worker process does."""
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    answers = _Answers(connection)
    finishing: Future[None] | None = None
    with ThreadPoolExecutor(1) as thread:
        while True:
            try:
                task = connection.recv()
            except (EOFError, ConnectionError):
                return
            finish = _computed(make_work, task, answers)
            answers.send_parts()
            if finishing is not None:
                finishing.result()  # of the task before: no more than one waits for the disk
            answers.send("computed")
            finishing = thread.submit(_finish, finish, answers, task)


def _computed(make_work: MakeWork, task: Any, answers: "_Answers") -> Callable[[], Any]:
    """Compute a task; what finishes it, or raises the error that it ended with."""
    try:
        work = make_work(task)
        work.compute(answers.add)
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        return partial(_raise, error)
    return work.finish


def _raise(error: BaseException) -> None:
    raise error


def is_panic(error: BaseException) -> bool:
    """Whether it is an error that ``except Exception`` does not catch and nobody asked for: a panic of Rust code."""
    return not isinstance(error, (Exception, KeyboardInterrupt, SystemExit, GeneratorExit))


def portable(error: BaseException, task: Any) -> Exception:
    """An error that another process can raise: this one, or an ``InputError`` with its message."""
    if isinstance(error, Exception):
        with suppress(Exception):  # of classes that cannot be sent, or not be made again
            ForkingPickler.dumps(error)
            reduced = error.__reduce__()
            if isinstance(reduced, tuple):
                reduced[0](*reduced[1])
                return error
    return InputError(f"{task}: {type(error).__name__}: {first_line(error)}")


def _finish(finish: Callable[[], Any], answers: "_Answers", task: Any) -> None:
    try:
        result = finish()
    except BaseException as error:
        answers.send("raised", portable(error, task))
    else:
        answers.send("done", result)


class _Answers:
    """What a worker sends, from both of its threads. Parts are added up and sent now and then."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()
        self._sum: Any = None
        self._due = time.monotonic() + REPORT_SECONDS

    def send(self, kind: str, value: Any = None) -> None:
        with self._lock:
            self._connection.send((kind, value))

    def add(self, part: Any) -> None:
        self._sum = part if self._sum is None else self._sum + part
        if time.monotonic() >= self._due:
            self.send_parts()

    def send_parts(self) -> None:
        if self._sum is not None:
            self.send("part", self._sum)
        self._sum, self._due = None, time.monotonic() + REPORT_SECONDS


def _end_with_the_parent() -> None:
    """End this worker when its parent is killed; it would go on for a while."""
    if parent := multiprocessing.parent_process():
        parent.join()
    os._exit(1)


@contextmanager
def _signals_held() -> Iterator[None]:
    """Hold back Ctrl-C and SIGTERM here, and for ever in processes started meanwhile: the parent deals with them.

    Both may reach a whole group of processes. The parent then ends the workers, without a traceback from each.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
