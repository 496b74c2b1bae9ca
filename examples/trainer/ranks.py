"""What ranks do together: rank 0 prints, one rank works while the others wait, and all agree on when to stop.

Every function that takes part in a collective says "call it on all ranks".
"""

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

from megatron_bfp.console import tell
from megatron_bfp.errors import BFPError, OptionError

from .lifeline import die_with_parent

LONGEST_WAIT = datetime.timedelta(days=1)
"""How long others wait for rank 0. DeepSpeed's process groups give up after ten minutes, but building an index or
converting a checkpoint can take longer."""


def replicas() -> distributed.ProcessGroup:
    """The ranks that hold the same weights as this one: they sum gradients, and ZeRO divides its state among them."""
    from megatron.core import parallel_state  # here, as processes that only read samples import this module too

    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def log(line: str) -> None:
    """Print a line from rank 0. If the reader is gone, such as a launcher that was killed, training goes on."""
    if distributed.get_rank() == 0:
        try:
            tell(line, sys.stdout)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def timestamp() -> str:
    """The time, as it ends the lines of the log."""
    return datetime.datetime.now().strftime("%Y-%m-%d %H:%M:%S")


def on_first_rank(work: Callable[[], Any]) -> Any:
    """Run a function on rank 0 while the others wait, and return its result on all ranks. Call it on all ranks.

    Args:
        work: its result must be picklable.

    Raises:
        OptionError: on all ranks, if the function raised one of the project's errors.
    """
    answer: list[Any] = [None, None]  # result, error
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
    """Run a function on the first rank of each node. Call it on all ranks.

    Raises:
        OptionError: on all ranks, if the function raised one of the project's errors; the message names the node.
    """
    problem = None
    if os.environ.get("LOCAL_RANK", "0") == "0":
        try:
            work()
        except BFPError as error:
            problem = f"{error} (node {socket.gethostname()})"
    for problem in of_all_ranks(problem):
        if problem is not None:
            raise OptionError(problem)


def of_all_ranks(value: Any) -> list[Any]:
    """What each rank gives, which must be picklable. Call it on all ranks."""
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value, group=_patient_group())
    return values


def check_shared(folder: str) -> None:
    """Check that all ranks see the same folder as rank 0. Call it on all ranks.

    Raises:
        OptionError: one does not.
    """
    path = on_first_rank(lambda: _make_mark(folder))
    try:
        sees = of_all_ranks((os.path.exists(path), socket.gethostname()))
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
    """One per world: a process may leave one and join another."""
    return distributed.new_group(backend="gloo", timeout=LONGEST_WAIT)


STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Launchers end a run with SIGTERM; SLURM's ``--signal=USR1@600`` sends SIGUSR1 before the time limit."""


class StopRequest:
    """Remembers signals from now on, instead of ending the process, and whether the time is up.

    Args:
        device: where the ranks compare what they remember.
        minutes: how long the run may take (``--exit-duration-in-mins``); None: no limit.
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
        """What any rank remembers, at the cost of a reduction of two numbers. Call it on all ranks at the same step.

        Returns:
            The number of a signal, 0 for none; whether the time is up.
        """
        time_is_up = self._end is not None and time.monotonic() >= self._end
        noted = torch.tensor([self._signal, int(time_is_up)], device=self._device)
        distributed.all_reduce(noted, op=distributed.ReduceOp.MAX)
        number, time_is_up = noted.tolist()
        return number, bool(time_is_up)


def leave_signals_to_the_trainer(worker: int) -> None:
    """Make a dataloader process ignore the signals, and die with its trainer.

    Launchers send signals to whole process trees, but the steps until the checkpoint still need samples.

    Args:
        worker: its number, which DataLoader passes.
    """
    trainer = multiprocessing.parent_process()
    if trainer is not None:
        die_with_parent(trainer.pid)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
