"""What a run reports: a line for people and an event for programs, for steps, evaluations, and a loss that stops it."""

import dataclasses
import datetime
import os
import shlex
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import distributed

from .config import TrainerConfig, flag
from .data import origin_of
from .evaluation import Evaluation
from .log import Log, RankSeconds, TrainingStopped, Work, model_flops, peak_flops
from .ranks import log, on_first_rank, timestamp
from .tracking.mlflow_runs import MLflow
from .tracking.run_ids import RunIds
from .tracking.tensorboard import TensorBoard
from .tracking.tracker import Tracker
from .tracking.weights_and_biases import WeightsAndBiases

REMEMBERED_REPORTS = 20
"""The time left is estimated from this many lines of the log."""


@dataclass(frozen=True)
class StepResult:
    """What a training step did."""

    loss: float
    """Mean over the target tokens of the global batch; NaN if there are none."""
    grad_norm: float
    """Of the gradient of that mean, before clipping."""
    num_targets: int
    work: Work
    seconds: RankSeconds


def open_logs(config: TrainerConfig) -> Log:
    """Open the log's files on rank 0, before anything is built. Call it on all ranks.

    Raises:
        OptionError: one cannot be written, or the library of a tracker is missing.
    """
    opened = []

    def open_on_first_rank() -> None:
        opened.append(Log(config.json_log, *trackers(config)))

    on_first_rank(open_on_first_rank)
    return opened[0] if opened else Log()


def trackers(config: TrainerConfig) -> tuple[list[Tracker], list[Tracker]]:
    """The trackers that the options ask for: those that write to a local disk at once, and the others.

    Raises:
        OptionError: the library of one is missing.
        InputError: ``--tensorboard-dir`` cannot be written.
    """
    local: list[Tracker] = [TensorBoard(config.tensorboard_dir)] if config.tensorboard_dir else []
    remote: list[Tracker] = []
    ids, save = RunIds(config.save), config.save and os.path.abspath(config.save)
    options, name = dataclasses.asdict(config), save and os.path.basename(save)
    if config.wandb_project:
        names = config.wandb_project, config.wandb_entity, config.wandb_exp_name or name
        folder = config.wandb_save_dir or (save and os.path.join(save, "wandb"))
        remote.append(WeightsAndBiases(names, folder, options, ids))
    if config.mlflow_experiment:
        uri = config.mlflow_tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        uri = uri or os.path.join(save or os.getcwd(), "mlruns")
        remote.append(MLflow(uri, config.mlflow_experiment, config.mlflow_run_name or name, options, ids))
    return local, remote


class Meter:
    """Speed since the last report, and the time left. Checkpoints and evaluations do not count.

    Args:
        weights: parameters of matrix products, for the FLOP/s.
    """

    def __init__(self, config: TrainerConfig, weights: int) -> None:
        self.config, self.weights, self.peak = config, weights, peak_flops()
        self._reports: deque[tuple[int, float]] = deque(maxlen=REMEMBERED_REPORTS)
        self.restart()

    def restart(self) -> None:
        """Start over: forget the steps since the last report."""
        self.start = time.perf_counter()
        self.work: list[Work] = []
        self.seconds: list[RankSeconds] = []
        self.data_seconds = 0.0

    def add(self, work: Work, seconds: RankSeconds, data_seconds: float = 0.0) -> None:
        """Count a step.

        Args:
            data_seconds: how long this rank waited for its samples.
        """
        self.work.append(work)
        self.seconds.append(seconds)
        self.data_seconds += data_seconds

    def read(self, iteration: int) -> dict[str, float]:
        """The speed, and start over.

        Returns:
            Seconds per step, seconds of them that this rank waited for samples, seconds left until the last step,
            tokens per second and device, the computing time of the slowest rank over the mean of all, and on a GPU
            TFLOP/s per device and MFU.
        """
        elapsed = max(1e-9, time.perf_counter() - self.start)
        self._reports.append((len(self.work), elapsed))
        recent = sum(seconds for _, seconds in self._reports) / sum(steps for steps, _ in self._reports)
        seconds = elapsed * distributed.get_world_size()
        speed = {
            "seconds_per_step": elapsed / len(self.work),
            "data_seconds_per_step": self.data_seconds / len(self.work),
            "seconds_left": recent * (self.config.train_iters - iteration),
            "tokens_per_second_per_device": sum(work.tokens for work in self.work) / seconds,
            "slowest_over_mean": sum(step.slowest for step in self.seconds) / sum(step.mean for step in self.seconds),
        }
        if torch.cuda.is_available():
            shape = (self.weights, self.config.num_layers, self.config.hidden_size)
            flops = sum(model_flops(work, *shape) for work in self.work) / seconds
            speed["tflops_per_device"] = flops / 1e12
            if self.peak:
                speed["mfu"] = flops / self.peak
        self.restart()
        return speed


def report_step(config: TrainerConfig, files: Log, iteration: int, lr: float, result: StepResult, meter: Meter) -> None:
    """Report a step, and the speed since the last report.

    Args:
        iteration: steps done, this one included.
    """
    speed = meter.read(iteration)
    tokens_per_second = speed["tokens_per_second_per_device"]
    text = "".join(f" | {name} {speed[name]:,.3f}" for name in ("tflops_per_device", "mfu") if name in speed)
    consumed_samples = iteration * config.global_batch_size
    log(
        f"iteration {iteration}/{config.train_iters} | loss {result.loss:.6f} | lr {lr:.4e} | "
        f"grad norm {result.grad_norm:.4f} | target tokens {result.num_targets} | "
        f"consumed samples {consumed_samples} | tokens/s per device {tokens_per_second:,.0f}{text} | "
        f"slowest/mean {speed['slowest_over_mean']:.2f} | data wait {speed['data_seconds_per_step']:.2g} s | "
        f"{speed['seconds_per_step']:.3g} s/step | "
        f"ETA {duration(speed['seconds_left'])} | {timestamp()}"
    )
    values: dict[str, Any] = {"loss": result.loss, "learning_rate": lr, "grad_norm": result.grad_norm}
    values |= {"target_tokens": result.num_targets, "consumed_samples": consumed_samples, "time": timestamp()}
    files.write("train", iteration, values | speed)


def duration(seconds: float) -> str:
    """Days, hours, minutes and seconds, as "2 days, 3:04:05"."""
    return str(datetime.timedelta(seconds=round(seconds)))


def report_evaluation(files: Log, iteration: int, evaluation: Evaluation) -> None:
    """Report an evaluation of the valid split."""
    log(
        f"validation at iteration {iteration} | loss {evaluation.loss:.6f} | perplexity {evaluation.perplexity:.4f} | "
        f"target tokens {evaluation.num_targets} | {timestamp()}"
    )
    if not evaluation.num_targets:
        log("the evaluation's samples have no target tokens, so they have no loss: see --split and --eod-mask-loss")
    values: dict[str, Any] = {"loss": evaluation.loss, "perplexity": evaluation.perplexity}
    values |= {"target_tokens": evaluation.num_targets, "time": timestamp()}
    files.write("valid", iteration, values)


def stop_training(config: TrainerConfig, dataset: Any, iteration: int, reason: str) -> NoReturn:
    """List the samples of a step with their documents, and raise.

    Args:
        iteration: steps done before this one.

    Raises:
        TrainingStopped: always.
    """
    first = iteration * config.global_batch_size
    for sample in range(first, first + config.global_batch_size):
        origin = origin_of(dataset, sample)
        sequence = "" if origin.sequence is None else f", sequence {origin.sequence}"
        log(f"sample {sample}: {origin.prefix}{sequence}, documents {', '.join(map(str, origin.documents))}")
    raise TrainingStopped(
        f"iteration {iteration + 1}: {reason}. It was made of the samples {first} to "
        f"{first + config.global_batch_size - 1}, listed above with their documents; "
        f"`{show_command(config)}` shows one"
    )


def show_command(config: TrainerConfig) -> str:
    """The command that shows a sequence of the training set, with PREFIX and N to be filled in."""
    words = ["megatron-bfp", "show", "PREFIX", "--seq-length", str(config.seq_length)]
    words += ["--split", config.split]
    for name in ("max_documents_per_sequence", "data_cache_path"):
        value = getattr(config, name)
        words += [] if value is None else [flag(name), str(value)]
    if config.fim_rate is not None:
        words += ["--fim-rate", str(config.fim_rate), "--seed", str(config.seed)]
        words += ["--tokenizer-type", config.tokenizer_type, "--tokenizer-model", config.tokenizer_model]
    words += ["--even-sequences"] * config.even_sequences + ["--targets-only"] * config.targets_only
    return shlex.join([*words, "--sequence", "N", "--html", "page.html"])
