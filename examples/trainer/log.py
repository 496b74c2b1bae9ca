"""What the trainer tells: lines for people, JSON lines and TensorBoard for programs, and when to stop.

Work is counted as a model needs it, whatever kernel or recomputation runs: 6 floating-point operations for each token
and each weight of a matrix product, and for attention 6 s^2 h in each layer for a document chunk of s tokens and hidden
size h (two products of s x s / 2 x h, each a multiplication and an addition, once forward and twice backward). Model
FLOP/s utilisation is this over what the GPU's datasheet promises for dense bf16.
"""

import json
import math
from collections import deque
from typing import Any, NamedTuple

import torch

from megatron_bfp.errors import BFPError, InputError, OptionError
from megatron_bfp.optional import pip_command

PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}
"""Dense bf16 FLOP/s by a part of the device's name (SXM boards)."""
REMEMBERED_LOSSES = 50
FEWEST_LOSSES = 10
"""So many losses are needed before one can be called a spike."""


class TrainingStopped(BFPError):
    """A step gave a loss that no run should go on from."""


class Work(NamedTuple):
    """What a step computed, over all ranks."""

    tokens: int
    squares: int
    """Sum of the squared lengths of the chunks."""


def model_flops(work: Work, num_weights: int, num_layers: int, hidden_size: int) -> float:
    """Floating-point operations of a step, forward and backward; the formula is in the module's text.

    Args:
        num_weights: parameters of matrix products: all but the embedding and the norms.
    """
    return 6.0 * work.tokens * num_weights + 6.0 * work.squares * num_layers * hidden_size


def peak_flops() -> float | None:
    """What this rank's GPU can do in bf16; None if there is none or it is not known."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


class SpikeDetector:
    """Tells whether a loss is one to stop at.

    Args:
        factor: how many times the mean of the losses before it a loss may be; 0: any finite one may be.
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
    """Writes each event to a file of JSON lines and to TensorBoard, where asked for. Make it on one rank alone.

    Args:
        json_log: path of the file, which is appended to.
        tensorboard_dir: folder of TensorBoard's events.

    Raises:
        InputError: the file or the folder cannot be written.
        OptionError: TensorBoard is not installed.
    """

    def __init__(self, json_log: str | None, tensorboard_dir: str | None) -> None:
        self._file = self._writer = None
        if json_log:
            try:
                self._file = open(json_log, "a", encoding="utf-8", buffering=1)
            except OSError as error:
                raise InputError(f"--json-log {json_log}: {error.strerror}") from None
        if tensorboard_dir:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise OptionError(f"--tensorboard-dir needs tensorboard: {pip_command('tensorboard')}") from None
            try:
                self._writer = SummaryWriter(tensorboard_dir)
            except OSError as error:
                raise InputError(f"--tensorboard-dir {tensorboard_dir}: {error.strerror}") from None

    def write(self, event: str, iteration: int, values: dict[str, Any]) -> None:
        """One event, such as "train": its numbers. What is not a number is null in the file, as JSON has it."""
        if self._file:
            known = {name: None if _is_not_a_number(value) else value for name, value in values.items()}
            self._file.write(json.dumps({"event": event, "iteration": iteration, **known}) + "\n")
        if self._writer:
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self._writer.add_scalar(f"{event}/{name}", value, iteration)
            self._writer.flush()


def _is_not_a_number(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
