"""Where the trainer writes its numbers, how its work is counted and timed, and which losses stop it.

Work is counted as a model needs it, whatever kernel or recomputation runs: 6 floating-point operations per token and
weight of a matrix product, and for attention 6 s^2 h per layer and document chunk of s tokens, with hidden size h (two
products of s x s / 2 x h, each a multiplication and an addition, once forward and twice backward). Model FLOP/s
utilisation (MFU) is this divided by what the GPU's datasheet promises for dense bf16.
"""

import contextlib
import json
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from megatron_bfp.errors import BFPError, InputError

from .ranks import log
from .tracking.journal import Journal, row_of
from .tracking.tracker import Direct, Follower, Tracker

PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}
"""Dense bf16 FLOP/s by a part of the device's name (SXM boards)."""
REMEMBERED_LOSSES = 50
FEWEST_LOSSES = 10
"""How many losses are needed before one can be called a spike."""
CLOSE_SECONDS, FAILED_SECONDS = 10.0, 2.0
"""How long trackers may take for their last steps. Launchers kill ranks 30 seconds after SIGTERM, and other ranks end
one 3 seconds after an error of theirs (``lifeline.GRACE_SECONDS``)."""


class TrainingStopped(BFPError):
    """A step's loss is NaN, infinite or a spike; the run must not continue from it."""

    on_every_rank = True  # they stop at the mean over all


class Work(NamedTuple):
    """What a step computed, over all ranks."""

    tokens: int
    squares: int
    """Sum of the squared lengths of the chunks."""


class RankSeconds(NamedTuple):
    """How long the ranks that hold the same weights computed in a step, without waiting for each other."""

    slowest: float
    mean: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "RankSeconds":
        """Of the seconds of each rank."""
        return cls(max(seconds), math.fsum(seconds) / len(seconds))


class ComputeClock:
    """How long this rank computes in one step, without what it waits for other ranks. Adds no synchronisation.

    On a GPU it is the time of the forward passes, between CUDA events. Backward passes take a fixed multiple of it, or
    slightly more for attention, and are left out because the reduction of gradients, and so waiting, is inside them.
    With ZeRO 3 a forward pass gathers weights from the other ranks: its time includes waiting, and ranks look more even
    than they are. With context parallelism the ranks that share sequences wait for each other in each layer, so they
    look alike; groups of them do not.

    On the CPU it is the processor time that this thread takes for forward and backward passes. Waiting takes none, and
    ranks that share cores do not count each other's. Further threads of an operation work as long as this one does.

    Args:
        device: where the rank computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._processor_seconds = 0.0

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Measure a forward pass."""
        if not self._on_gpu:
            with self._processor_time():
                yield
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._events.append((begin, end))

    def backward(self) -> contextlib.AbstractContextManager[None]:
        """Measure a backward pass; on a GPU it is not measured."""
        return contextlib.nullcontext() if self._on_gpu else self._processor_time()

    @contextlib.contextmanager
    def _processor_time(self) -> Iterator[None]:
        start = time.thread_time()
        yield
        self._processor_seconds += time.thread_time() - start

    def seconds(self) -> float:
        """The sum. On a GPU this waits for the last forward pass: call it when a result of the step has been read."""
        if self._events:
            self._events[-1][1].synchronize()
        return self._processor_seconds + sum(begin.elapsed_time(end) for begin, end in self._events) / 1000


def model_flops(work: Work, num_weights: int, num_layers: int, hidden_size: int) -> float:
    """Floating-point operations of a step, forward and backward, by the formula above.

    Args:
        num_weights: parameters of matrix products: all but the embedding and the norms.
    """
    return 6.0 * work.tokens * num_weights + 6.0 * work.squares * num_layers * hidden_size


def peak_flops() -> float | None:
    """Peak bf16 FLOP/s of this rank's GPU; None without a GPU, or if it is not in ``PEAK_FLOPS``."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


class SpikeDetector:
    """Says which losses to stop at.

    Args:
        factor: a loss above this times the mean of the losses before it is a spike; 0: none is.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.losses: deque[float] = deque(maxlen=REMEMBERED_LOSSES)

    def reason(self, loss: float, grad_norm: float) -> str | None:
        """What is wrong with a step; None if nothing is."""
        for name, value in (("loss", loss), ("gradient norm", grad_norm)):
            if not math.isfinite(value):
                return f"the {name} is {value}"
        mean = sum(self.losses) / max(1, len(self.losses))
        if self.factor and len(self.losses) >= FEWEST_LOSSES and loss > self.factor * mean:
            return f"the loss is {loss:.4f}, the mean of the last {len(self.losses)} was {mean:.4f}"
        self.losses.append(loss)
        return None


class Log:
    """Writes events to a JSON Lines file and to trackers, if asked for. Make it on one rank only. None of them can end
    the run: a line says what has failed.

    Args:
        json_log: path of the file, which is appended to.
        local: trackers that get each event at once.
        remote: trackers that get events in the background.

    Raises:
        InputError: the file cannot be written.
    """

    def __init__(self, json_log: str | None = None, local: Sequence[Tracker] = (), remote: Sequence[Tracker] = ()):
        self._file, self._is_failing = None, False
        if json_log:
            try:
                self._file = open(json_log, "a", encoding="utf-8", buffering=1)
            except OSError as error:
                raise InputError(f"--json-log {json_log}: {error.strerror}") from None
        self._local, self._remote = local, remote
        self._direct: list[Direct] = []
        self._followers: list[Follower] = []
        self._journal: Journal | None = None

    @contextlib.contextmanager
    def of_run(self, folder: str | None, iteration: int) -> Iterator[None]:
        """Begin or go on with the trackers' runs, and complete them at the end.

        Args:
            folder: of ``--save``, which has the steps of before.
            iteration: steps of the checkpoint that the run resumed from.
        """
        self._direct = [Direct(tracker, iteration) for tracker in self._local]
        if self._remote:
            self._journal = Journal(folder, iteration)
            self._followers = [Follower(tracker, self._journal, iteration) for tracker in self._remote]
        for follower in self._followers:
            follower.start()
        failed = True
        try:
            yield
            failed = False
        finally:
            self._close(failed)

    def write(self, event: str, iteration: int, values: dict[str, Any]) -> None:
        """Write one event, such as "train", with its numbers. NaN and infinity are null in the file, as in JSON."""
        if self._file:
            known = {name: None if _is_not_finite(value) else value for name, value in values.items()}
            self._write_line(json.dumps({"event": event, "iteration": iteration, **known}))
        row = row_of(event, iteration, values)
        for direct in self._direct:
            direct.append(row)
        if self._journal:
            self._journal.append(row)
        for follower in self._followers:
            follower.notify()

    def _write_line(self, line: str) -> None:
        """Write a line to the file. Python keeps what it could not write, and writes it with a later line."""
        try:
            self._file.write(line + "\n")
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                log(f"--json-log {self._file.name}: {error.strerror}; the run goes on")
            self._is_failing = True

    def sync(self) -> None:
        """Force to disk what a resumed run needs of the events until now."""
        if self._journal:
            self._journal.sync()

    def _close(self, failed: bool) -> None:
        """Complete the trackers' runs. After an error other ranks end too and cannot wait long."""
        for direct in self._direct:
            direct.close(failed)
        for follower in self._followers:
            follower.finish(failed)
        end = time.monotonic() + (FAILED_SECONDS if failed else CLOSE_SECONDS)
        for follower in self._followers:
            follower.wait(max(0.0, end - time.monotonic()))


def _is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
