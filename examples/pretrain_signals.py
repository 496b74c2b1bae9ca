"""Stopping when a cluster says so: after SIGTERM or SIGUSR1 on any rank, all ranks end after the same step."""

import multiprocessing
import signal
import time
from typing import Any

import torch
from pretrain_process import die_with_parent
from torch import distributed

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
