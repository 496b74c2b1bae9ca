"""Pre-train a GPT model with megatron-core and DeepSpeed on best-fit packed documents.

    deepspeed examples/pretrain_gpt.py --data-impl bfp --data-path PREFIX --tokenizer-model tokenizer.json ...

The same command runs on GPUs (NCCL) and on CPUs (gloo). The loss of a step is the mean over all target tokens of the
global batch: packed sequences have different numbers of targets, so a mean of micro-batch means would weigh documents
unevenly. The order of samples follows from the seed and the number of samples consumed, which a checkpoint records.
"""

import argparse
import datetime
import math
import os
import shlex
import signal
import socket
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from megatron.core import parallel_state
from torch import distributed

from megatron_bfp.megatron_core.attention import document_boundaries
from megatron_bfp.tokenizers.registry import load_tokenizer

from .arguments import parse_arguments
from .checkpoints import (
    continue_history,
    convert_for_ranks,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
    smallest_of,
)
from .data import (
    EvaluationSampler,
    GlobalOrderSampler,
    build_train_dataset,
    build_valid_dataset,
    micro_batches,
    origin_of,
)
from .engine import (
    build_engine,
    check_first_step,
    engine_config,
    gradient_norm,
    initialize_distributed,
    num_parameters,
    num_weights,
    set_batch_sizes,
)
from .evaluation import Evaluation, evaluate, summed_loss
from .log import Log, SpikeDetector, TrainingStopped, Work, model_flops, peak_flops
from .model import attention_kernel
from .process import complete_environment, run_rank
from .ranks import StopRequest, check_shared, log, on_each_node, on_first_rank, timestamp
from .resume import DataHistory, describe_run
from .save_folder import check_save

REMEMBERED_REPORTS = 20
"""The time that is left is estimated from so many lines of the log."""


@dataclass(frozen=True)
class StepResult:
    """What a training step did."""

    loss: float
    """Mean over the target tokens of the global batch; not a number where there are none."""
    grad_norm: float
    """Of the gradient of that mean, before clipping."""
    num_targets: int
    work: Work


def main() -> int:
    """Train, or resume, as the command line says.

    Returns:
        The exit status: 0, or 128 and the number of the signal that stopped the run after a checkpoint.

    Raises:
        BFPError: bad options or data.
    """
    options = parse_arguments()
    complete_environment(options.local_rank)
    tokenizer = load_tokenizer(options.tokenizer_type, options.tokenizer_model, options.eod_token)
    device = initialize_distributed(options)
    accumulation = set_batch_sizes(options)
    config = engine_config(options, accumulation)
    if options.save:
        on_each_node(lambda: check_save(options.save, smallest_of(options, tokenizer.vocab_size)))
        check_shared(options.save)
    files = open_logs(options)
    description = on_first_rank(lambda: describe_run(options, tokenizer))
    checkpoint = find_checkpoint(options, description)
    dataset = build_train_dataset(options, tokenizer)
    valid = build_valid_dataset(options, tokenizer) if options.eval_interval else None
    history = continue_history(options, description, dataset, checkpoint)
    checkpoint = convert_for_ranks(options, checkpoint)
    if checkpoint and checkpoint.universal:
        config.setdefault("checkpoint", {})["load_universal"] = True
    engine = build_engine(options, tokenizer.vocab_size, config)
    if checkpoint:
        load_checkpoint(engine, checkpoint)
    iteration = checkpoint.saved.iteration if checkpoint else 0
    log(f"samples: {len(dataset):,}; parameters: {num_parameters(engine):,}")
    log(f"attention kernel: {attention_kernel(engine.module)}")
    if options.save:
        log(f"SIGTERM and SIGUSR1 save and end the run; rank 0 is process {os.getpid()} on {socket.gethostname()}")
    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    sampler = GlobalOrderSampler(
        iteration * options.global_batch_size,
        options.train_iters * options.global_batch_size,
        options.micro_batch_size,
        options.global_batch_size,
        replica,
        replicas,
    )
    batches = micro_batches(dataset, sampler, options.num_workers, device)
    if options.data_impl == "bfp" or options.dataloader_inter_document_masking:
        batches = check_first_step(engine, batches)

    def evaluate_valid() -> Evaluation | None:
        if valid is None:
            return None
        limit = (options.eval_iters or len(valid)) * options.global_batch_size
        sampler = EvaluationSampler(min(len(valid), limit), options.micro_batch_size, replica, replicas)
        return evaluate(engine, micro_batches(valid, sampler, 0, device))

    stopped_by = train(options, engine, batches, iteration, accumulation, history, evaluate_valid, files)
    return 128 + stopped_by if stopped_by else 0


def open_logs(options: argparse.Namespace) -> Log:
    """Open the files of the log on rank 0, before anything is built. Call it on all ranks.

    Raises:
        OptionError: one cannot be written.
    """
    opened = []

    def open_on_first_rank() -> None:
        opened.append(Log(options.json_log, options.tensorboard_dir))

    on_first_rank(open_on_first_rank)
    return opened[0] if opened else Log(None, None)


def train(
    options: argparse.Namespace,
    engine: Any,
    batches: Iterator[dict[str, torch.Tensor]],
    iteration: int,
    accumulation: int,
    history: DataHistory,
    evaluate_valid: Callable[[], Evaluation | None],
    files: Log,
) -> int:
    """Run steps until ``--train-iters``, ``--exit-interval``, ``--exit-duration-in-mins`` or a signal.

    Returns:
        The number of the signal, or 0.

    Raises:
        TrainingStopped: a loss is no number or a spike.
    """
    spikes, meter = SpikeDetector(options.loss_spike_factor), Meter(options, num_weights(engine))
    request = StopRequest(engine.device, options.exit_duration_in_mins) if options.save else None
    while iteration < options.train_iters:
        lr = learning_rate(options, iteration)
        for group in engine.optimizer.param_groups:
            group["lr"] = lr
        result = train_step(engine, [next(batches) for _ in range(accumulation)])
        meter.add(result.work)
        reason = spikes.reason(result.loss, result.grad_norm)
        if reason:
            stop_training(options, history.dataset, iteration, reason)
        iteration += 1
        if iteration % options.log_interval == 0:
            report_step(options, files, iteration, lr, result, meter)
        stopped_by, time_is_up = request.agreed() if request else (0, False)
        stop = stopped_by or time_is_up or (options.exit_interval and iteration % options.exit_interval == 0)
        last = iteration == options.train_iters
        due = options.save_interval and iteration % options.save_interval == 0
        if options.save and (due or stop or last):
            save_checkpoint(engine, options, iteration, history)
            stopped_by = stopped_by or request.agreed()[0]  # a signal during the checkpoint, which is there now
            meter.restart()
        if options.eval_interval and (last or not stopped_by and iteration % options.eval_interval == 0):
            report_evaluation(files, iteration, evaluate_valid())
            meter.restart()
        if stopped_by and not last:
            name = signal.Signals(stopped_by).name
            log(f"stopped by {name} after iteration {iteration}, which is saved: the same command goes on from there")
            return stopped_by
        if stop:
            break
    return 0


class Meter:
    """Speed since the last report, and the time that is left. Checkpoints and evaluations are not counted."""

    def __init__(self, options: argparse.Namespace, weights: int) -> None:
        self.options, self.weights, self.peak = options, weights, peak_flops()
        self._reports: deque[tuple[int, float]] = deque(maxlen=REMEMBERED_REPORTS)
        self.restart()

    def restart(self) -> None:
        """Begin anew."""
        self.start, self.work = time.perf_counter(), []

    def add(self, work: Work) -> None:
        """Count a step."""
        self.work.append(work)

    def read(self, iteration: int) -> dict[str, float]:
        """Seconds per step and until the last one, tokens per second of one device, and on a GPU TFLOP/s and model
        FLOP/s utilisation. Begins anew."""
        elapsed = max(1e-9, time.perf_counter() - self.start)
        self._reports.append((len(self.work), elapsed))
        recent = sum(seconds for _, seconds in self._reports) / sum(steps for steps, _ in self._reports)
        seconds = elapsed * distributed.get_world_size()
        found = {
            "seconds_per_step": elapsed / len(self.work),
            "seconds_left": recent * (self.options.train_iters - iteration),
            "tokens_per_second_per_device": sum(work.tokens for work in self.work) / seconds,
        }
        if torch.cuda.is_available():
            shape = (self.weights, self.options.num_layers, self.options.hidden_size)
            flops = sum(model_flops(work, *shape) for work in self.work) / seconds
            found["tflops_per_device"] = flops / 1e12
            if self.peak:
                found["mfu"] = flops / self.peak
        self.restart()
        return found


def report_step(
    options: argparse.Namespace, files: Log, iteration: int, lr: float, result: "StepResult", meter: Meter
) -> None:
    """A line for people and an event for programs."""
    speed = meter.read(iteration)
    tokens_per_second = speed["tokens_per_second_per_device"]
    text = "".join(f" | {name} {speed[name]:,.3f}" for name in ("tflops_per_device", "mfu") if name in speed)
    consumed_samples = iteration * options.global_batch_size
    log(
        f"iteration {iteration}/{options.train_iters} | loss {result.loss:.6f} | learning rate {lr:.4e} | "
        f"grad norm {result.grad_norm:.4f} | target tokens {result.num_targets} | "
        f"consumed samples {consumed_samples} | tokens/s per device {tokens_per_second:,.0f}{text} | "
        f"{speed['seconds_per_step']:.3g} s/step | ETA {duration(speed['seconds_left'])} | {timestamp()}"
    )
    values = {"loss": result.loss, "learning_rate": lr, "grad_norm": result.grad_norm}
    values |= {"target_tokens": result.num_targets, "consumed_samples": consumed_samples, "time": timestamp()}
    files.write("train", iteration, values | speed)


def duration(seconds: float) -> str:
    """Days, hours, minutes and seconds, as "2 days, 3:04:05"."""
    return str(datetime.timedelta(seconds=round(seconds)))


def report_evaluation(files: Log, iteration: int, found: Evaluation) -> None:
    """A line for people and an event for programs."""
    log(
        f"validation at iteration {iteration} | loss {found.loss:.6f} | perplexity {found.perplexity:.4f} | "
        f"target tokens {found.num_targets} | {timestamp()}"
    )
    if not found.num_targets:
        log(
            "the samples of the evaluation have no target tokens, so they have no loss: see --split and --eod-mask-loss"
        )
    values = {
        "loss": found.loss,
        "perplexity": found.perplexity,
        "target_tokens": found.num_targets,
        "time": timestamp(),
    }
    files.write("valid", iteration, values)


def stop_training(options: argparse.Namespace, dataset: Any, iteration: int, reason: str) -> NoReturn:
    """Name the samples of the step and their documents, and raise.

    Raises:
        TrainingStopped: always.
    """
    first = iteration * options.global_batch_size
    for sample in range(first, first + options.global_batch_size):
        origin = origin_of(dataset, sample)
        sequence = "" if origin.sequence is None else f", sequence {origin.sequence}"
        log(f"sample {sample}: {origin.prefix}{sequence}, documents {', '.join(map(str, origin.documents))}")
    raise TrainingStopped(
        f"iteration {iteration + 1}: {reason}. It was made of the samples {first} to "
        f"{first + options.global_batch_size - 1}, listed above with their documents; "
        f"`{show_command(options)}` shows one"
    )


def show_command(options: argparse.Namespace) -> str:
    """The command that shows a sequence of the training set, with PREFIX and N to be filled in."""
    words = ["python", "-m", "megatron_bfp", "show", "PREFIX", "--seq-length", str(options.seq_length)]
    words += ["--split", options.split]
    for name in ("max_documents_per_sequence", "data_cache_path"):
        value = getattr(options, name)
        words += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join([*words, "--sequence", "N", "--html", "page.html"])


def train_step(engine: Any, batches: list[dict[str, torch.Tensor]]) -> StepResult:
    """One optimizer step on the micro-batches of this rank."""
    replicas = parallel_state.get_data_parallel_group()
    boundaries = [document_boundaries(batch["cu_seqlens"], batch["tokens"].device) for batch in batches]
    # targets, tokens, squared chunk lengths
    sums = torch.zeros(3, dtype=torch.float64, device=batches[0]["tokens"].device)
    for batch, where in zip(batches, boundaries):
        chunks = np.diff(where.segments.boundaries).astype(np.float64)
        sums += torch.stack([batch["loss_mask"].sum(), *sums.new_tensor([chunks.sum(), (chunks**2).sum()])])
    distributed.all_reduce(sums, group=replicas)
    num_targets = sums[0].item()
    # DeepSpeed divides by the number of micro-batches and averages over replicas; what is wanted is a sum
    scale = len(batches) * replicas.size() / max(1.0, num_targets)
    loss_sum = torch.zeros((), dtype=torch.float64, device=sums.device)
    for batch, where in zip(batches, boundaries):
        micro_batch_sum = summed_loss(engine, batch, where)
        engine.backward(micro_batch_sum * scale)
        grad_norm = gradient_norm(engine)
        engine.step()
        loss_sum += micro_batch_sum.detach()
    distributed.all_reduce(loss_sum, group=replicas)
    if grad_norm is None:
        grad_norm = float(engine.get_global_grad_norm())
    counts = [int(count) for count in sums.tolist()]
    loss = loss_sum.item() / num_targets if num_targets else math.nan
    return StepResult(loss, grad_norm, counts[0], Work(*counts[1:]))


def learning_rate(options: argparse.Namespace, iteration: int) -> float:
    """The learning rate of a step: linear warm-up, then cosine decay from ``--lr`` to ``--min-lr``.

    Args:
        iteration: steps done before this one.
    """
    if iteration < options.lr_warmup_iters:
        return options.lr * (iteration + 1) / options.lr_warmup_iters
    if options.lr_decay_style == "constant":
        return options.lr
    decay_iters = max(1, (options.lr_decay_iters or options.train_iters) - options.lr_warmup_iters)
    done = min(1.0, (iteration - options.lr_warmup_iters) / decay_iters)
    return options.min_lr + (options.lr - options.min_lr) * 0.5 * (1.0 + math.cos(math.pi * done))


def start() -> int:
    """Run ``main`` on this rank; returns its exit status. After an error the process ends here."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    status = run_rank(main, "pretrain_gpt")
    if distributed.is_initialized():
        distributed.destroy_process_group()
    return status
