"""Runs of the example trainer that an experiment compares, each a process of its own. A rerun resumes them."""

import fcntl
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from megatron_bfp.errors import InputError

EXAMPLES = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LINE_SECONDS = 30.0


@dataclass(frozen=True)
class TrainingRun:
    """A model to be trained by ``pretrain_gpt.py`` on one rank. Its folder gets the trainer's log and checkpoints."""

    name: str
    """For messages."""
    folder: str
    options: Mapping[str, Any]
    """The trainer's, without dashes; True for a flag."""

    def trainer_options(self) -> list[str]:
        """The trainer's command line, which also resumes."""
        checkpoints = os.path.join(self.folder, "checkpoints")
        options = {**self.options, "save": checkpoints, "load": checkpoints}
        return [
            text for name, value in options.items() for text in ([f"--{name}"] if value is True else _pair(name, value))
        ]

    def checkpoint(self, iteration: int | None = None) -> str:
        """The folder of the last checkpoint, or of that after ``iteration`` steps."""
        iteration = self.options["train-iters"] if iteration is None else iteration
        return os.path.join(self.folder, "checkpoints", f"iter_{iteration:07d}")

    def is_done(self) -> bool:
        """Whether the last checkpoint is complete."""
        return os.path.isfile(os.path.join(self.checkpoint(), "complete.json"))


def _pair(name: str, value: Any) -> list[str]:
    return [f"--{name}", *map(str, value if isinstance(value, (list, tuple)) else [value])]


def train_all(
    runs: Sequence[TrainingRun], jobs: int, measure: Callable[[TrainingRun], object] | None = None
) -> Iterator[TrainingRun]:
    """Train the runs that are not trained yet, ``jobs`` at a time, and measure each in its turn.

    Args:
        measure: called with each trained run, for one run at a time. It should keep its result in the run's folder, and
            do nothing if it is there.

    Yields:
        Each run when it is done.

    Raises:
        InputError: a trainer failed. Runs that have started go on to their end, no others are started.
    """
    pool, failed = ThreadPoolExecutor(jobs), threading.Event()
    measuring, progress = threading.Lock(), RunProgress(len(runs), jobs)

    def train_unless_failed(run: TrainingRun) -> None:
        try:
            if not failed.is_set():
                start, is_new = time.monotonic(), not run.is_done()
                train(run, jobs)
                if measure:
                    with measuring:  # loading a model sets megatron-core's global state
                        measure(run)
                progress.add(run, time.monotonic() - start if is_new else None)
        except BaseException:
            failed.set()
            raise

    try:
        futures = {pool.submit(train_unless_failed, run): run for run in runs}
        for future in as_completed(futures):
            future.result()
            if not failed.is_set():
                yield futures[future]
    finally:
        pool.shutdown(cancel_futures=True)


class RunProgress:
    """Counts runs that are done, and says how long the others will take."""

    def __init__(self, runs: int, jobs: int) -> None:
        self._runs, self._jobs, self._done = runs, jobs, 0
        self._seconds: list[float] = []
        self._lock = threading.Lock()

    def add(self, run: TrainingRun, seconds: float | None) -> None:
        """Count a run.

        Args:
            seconds: that it took; None if it was trained before.
        """
        with self._lock:
            self._done += 1
            if seconds is not None:
                self._seconds.append(seconds)
                mean, left = sum(self._seconds) / len(self._seconds), self._runs - self._done
                eta = f"about {mean * left / self._jobs / 60:.0f} minutes left"
                say(f"{run.name}: {seconds:.0f} s; {self._done} of {self._runs} runs are done, {eta}")


def train(run: TrainingRun, jobs: int = 1) -> None:
    """Train a model to its end, unless it is done.

    Args:
        jobs: trainings at a time. They share the CPUs, unless ``OMP_NUM_THREADS`` is set.

    Raises:
        InputError: the trainer failed.
    """
    os.makedirs(run.folder, exist_ok=True)
    lock = os.open(run.folder, os.O_RDONLY)
    try:
        # if this process is killed, the trainer keeps the lock: a rerun waits for it and starts no second trainer
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not run.is_done():
            _run_trainer(run, jobs, lock)
    finally:
        os.close(lock)


def _run_trainer(run: TrainingRun, jobs: int, lock: int) -> None:
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs)), **os.environ, **alone}
    environment |= {"MASTER_PORT": str(free_port()), "PYTHONPATH": python_path()}
    path = os.path.join(run.folder, "train.log")
    start = time.monotonic()
    with open(path, "a", encoding="utf-8") as log:
        process = subprocess.Popen(
            [sys.executable, os.path.join(EXAMPLES, "pretrain_gpt.py"), *run.trainer_options()],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=[lock],
        )
    say(f"{run.name}: training, log in {path}")
    while True:
        try:
            status = process.wait(LINE_SECONDS)
            break
        except subprocess.TimeoutExpired:
            say(f"{run.name}: {_last_step(path)}")
    if status or not run.is_done():
        raise InputError(f"{run.name}: the trainer ended with status {status} before its last step; see {path}")
    say(f"{run.name}: trained in {time.monotonic() - start:.0f} s")


def _last_step(path: str) -> str:
    """The beginning of the last step's line in a trainer's log."""
    with open(path, encoding="utf-8", errors="replace") as file:
        steps = [line for line in file if line.startswith("iteration ")]
    return " |".join(steps[-1].split(" |")[:2]) if steps else "starting"


def python_path() -> str:
    """``PYTHONPATH`` for a process that imports megatron_bfp, where it is not installed."""
    return os.pathsep.join([os.path.dirname(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])])


def say(line: str) -> None:
    """A line of progress."""
    print(line, file=sys.stderr, flush=True)


def free_port() -> int:
    """A free port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
