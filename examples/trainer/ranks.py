"""What one rank does for all: printing, and work that the others wait for."""

import datetime
import functools
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

from megatron_bfp.errors import BFPError, OptionError

from .process import die_with_parent

LONGEST_WAIT = datetime.timedelta(days=1)
"""For rank 0. Other process groups give up after DeepSpeed's ten minutes; an index or a conversion can take longer."""


def log(line: str) -> None:
    """Print a line from rank 0. A reader that is gone, as a launcher that was killed, is no reason to stop."""
    if distributed.get_rank() == 0:
        try:
            print(line, flush=True)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def timestamp() -> str:
    """The time, as lines of the log end with it."""
    return datetime.datetime.now().strftime("%Y-%m-%d %H:%M:%S")


def on_first_rank(work: Callable[[], Any]) -> Any:
    """Do something on rank 0 while the others wait, and give its result to all. Call it on all ranks.

    Args:
        work: its result must be one that pickle takes.

    Raises:
        OptionError: on all ranks, if the work raised one of the project's errors on rank 0.
    """
    answer = [None, None]
    if distributed.get_rank() == 0:
        try:
            answer[0] = work()
        except BFPError as error:
            answer[1] = str(error)
    distributed.broadcast_object_list(answer, group=_patient_group())
    if answer[1] is not None:
        raise OptionError(answer[1])
    return answer[0]


def on_each_node(work: Callable[[], None]) -> None:
    """Do something on the first rank of each node. Call it on all ranks.

    Raises:
        OptionError: on all ranks, if the work raised one of the project's errors on a node, which is named.
    """
    problem = None
    if os.environ.get("LOCAL_RANK", "0") == "0":
        try:
            work()
        except BFPError as error:
            problem = f"{error} (node {socket.gethostname()})"
    problems: list[str | None] = [None] * distributed.get_world_size()
    distributed.all_gather_object(problems, problem, group=_patient_group())
    for problem in problems:
        if problem is not None:
            raise OptionError(problem)


def check_shared(folder: str) -> None:
    """Check that all ranks see a folder of rank 0. Call it on all ranks.

    Raises:
        OptionError: one does not.
    """
    path = on_first_rank(lambda: _make_mark(folder))
    sees: list[Any] = [None] * distributed.get_world_size()
    try:
        distributed.all_gather_object(sees, (os.path.exists(path), socket.gethostname()), group=_patient_group())
    finally:
        if distributed.get_rank() == 0:
            os.remove(path)
    for is_seen, node in sees:
        if not is_seen:
            raise OptionError(f"--save {folder}: node {node} does not see it; use a file system that all nodes share")


def _make_mark(folder: str) -> str:
    descriptor, path = tempfile.mkstemp(prefix=".seen_by_all_", dir=folder)
    os.close(descriptor)
    return path


def _patient_group() -> distributed.ProcessGroup:
    return _patient_group_of(distributed.group.WORLD)


@functools.cache
def _patient_group_of(world: distributed.ProcessGroup) -> distributed.ProcessGroup:
    """One for each world: a process may leave one and join another."""
    return distributed.new_group(backend="gloo", timeout=LONGEST_WAIT)


STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What launchers send to end a run, and what SLURM's ``--signal=USR1@600`` sends before the time limit."""


class StopRequest:
    """Takes note of signals from now on, instead of dying of them, and of the time that has passed.

    Args:
        device: where the ranks' notes are compared.
        minutes: how long the run may take (``--exit-duration-in-mins``); None: as long as it needs.
    """

    def __init__(self, device: torch.device, minutes: int | None) -> None:
        self._device = device
        self._end = None if minutes is None else time.monotonic() + 60 * minutes
        self._signal = 0
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: Any) -> None:
        self._signal = number

    def agreed(self) -> tuple[int, bool]:
        """What any rank has noted. Call it on all ranks at the same step: it costs a reduction of two numbers.

        Returns:
            The number of a signal, 0 for none; whether the time is up.
        """
        time_is_up = self._end is not None and time.monotonic() >= self._end
        noted = torch.tensor([self._signal, int(time_is_up)], device=self._device)
        distributed.all_reduce(noted, op=distributed.ReduceOp.MAX)
        number, time_is_up = noted.tolist()
        return number, bool(time_is_up)


def leave_signals_to_the_trainer(worker: int) -> None:
    """Make a process that reads samples ignore the signals: launchers send them to whole trees of processes, and the
    steps before the checkpoint still need samples. The kernel kills it when its trainer ends, however that ends.

    Args:
        worker: its number, which DataLoader gives.
    """
    trainer = multiprocessing.parent_process()
    if trainer is not None:
        die_with_parent(trainer.pid)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
