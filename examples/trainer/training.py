"""Pre-train a GPT model with megatron-core and DeepSpeed on best-fit packed documents.

    deepspeed examples/pretrain_gpt.py --data-impl bfp --data-path PREFIX --tokenizer-model tokenizer.json ...

The same command runs on GPUs (NCCL) and on CPUs (gloo). The loss of a step is the mean over all target tokens of the
global batch: packed sequences differ in their number of targets, so a mean of micro-batch means would weight documents
unevenly. The order of samples follows from the seed and the number of samples consumed, which a checkpoint records.
"""

import dataclasses
import math
import os
import signal
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
import torch
from megatron.core import parallel_state
from torch import distributed
from torch.utils.data import Dataset

from megatron_bfp.megatron_core.attention import document_boundaries
from megatron_bfp.tokenizers.registry import load_tokenizer

from .arguments import parse_arguments
from .checkpoints.history import DataHistory, describe_run
from .checkpoints.loading import continue_history, convert_for_ranks, find_checkpoint, load_checkpoint
from .checkpoints.save_folder import check_save
from .checkpoints.saving import NotSaved, check_writer, save_checkpoint, smallest_of
from .config import TrainerConfig
from .data import (
    EvaluationSampler,
    GlobalOrderSampler,
    WholeSplits,
    build_train_dataset,
    build_valid_dataset,
    micro_batches,
)
from .engine import (
    build_engine,
    check_first_step,
    deepspeed_config,
    gradient_norm,
    initialize_distributed,
    num_parameters,
    num_weights,
    with_batch_sizes,
)
from .evaluation import Evaluation, evaluate, summed_loss
from .log import ComputeClock, Log, RankSeconds, SpikeDetector, Work
from .model import attention_kernel, way_to_share
from .pretrained import open_pretrained
from .process import complete_environment, end_process, run_rank
from .profile import StepProfile
from .ranks import StopRequest, check_shared, log, on_each_node, on_first_rank, replicas
from .reports import Meter, StepResult, open_logs, report_evaluation, report_step, stop_training


def start() -> NoReturn:
    """Run ``main`` on this rank, and end the process with its exit status."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    status = run_rank(main, "pretrain_gpt")
    if distributed.is_initialized():
        distributed.destroy_process_group()
    end_process(status)


def main() -> int:
    """Train, or resume, as the command line says.

    Returns:
        The exit status: 0, or 128 plus the number of the signal that stopped the run after a checkpoint.

    Raises:
        BFPError: bad options or data.
    """
    config = parse_arguments()
    complete_environment(config.local_rank)
    tokenizer = load_tokenizer(config.tokenizer_type, config.tokenizer_model, config.eod_token)
    device = initialize_distributed(config)
    config, accumulation = with_batch_sizes(config)
    settings = deepspeed_config(config, accumulation)
    config = dataclasses.replace(config, zero_stage=settings["zero_optimization"]["stage"])
    if config.save:
        check_writer(config, settings)
        on_each_node(lambda: check_save(config.save, smallest_of(config, tokenizer.vocab_size)))
        check_shared(config.save)
    files = open_logs(config)
    description = on_first_rank(lambda: describe_run(config, tokenizer))
    checkpoint = find_checkpoint(config, description)
    pretrained = None if checkpoint else open_pretrained(config, tokenizer.vocab_size)
    dataset = build_train_dataset(config, tokenizer)
    valid = build_valid_dataset(config, tokenizer) if config.eval_interval else None
    history = continue_history(config, description, dataset, checkpoint)
    checkpoint = convert_for_ranks(config, checkpoint)
    if checkpoint and checkpoint.universal:
        settings.setdefault("checkpoint", {})["load_universal"] = True
    engine = build_engine(config, tokenizer.vocab_size, settings, pretrained)
    if checkpoint:
        load_checkpoint(engine, checkpoint)
    iteration = checkpoint.saved.iteration if checkpoint else 0
    log(f"samples: {len(dataset):,}; parameters: {num_parameters(engine):,}")
    log(f"attention kernel: {attention_kernel(engine.module)}")
    if config.context_parallel_size > 1:
        way = way_to_share(engine.module)
        log(f"{config.context_parallel_size} context-parallel ranks share each sequence: {way}")
    if config.save:
        log(f"SIGTERM and SIGUSR1 save and end the run; rank 0 is process {os.getpid()} on {socket.gethostname()}")
    batches = training_batches(config, engine, dataset, iteration, device)

    def evaluate_valid() -> Evaluation:
        return evaluate(engine, evaluation_batches(config, valid, device))

    with StepProfile(config) as profile, files.of_run(config.save, iteration):
        stopped_by = train(config, engine, batches, iteration, accumulation, history, evaluate_valid, files, profile)
    distributed.barrier()  # a rank that ended before could make its launcher kill rank 0
    return 128 + stopped_by if stopped_by else 0


def training_batches(
    config: TrainerConfig, engine: Any, dataset: Dataset, iteration: int, device: torch.device
) -> Iterator[dict[str, torch.Tensor]]:
    """This rank's micro-batches from step ``iteration`` on. If attention has boundaries, the first step checks them."""
    sampler = GlobalOrderSampler(
        consumed_samples=iteration * config.global_batch_size,
        total_samples=config.train_iters * config.global_batch_size,
        micro_batch_size=config.micro_batch_size,
        global_batch_size=config.global_batch_size,
        rank=parallel_state.get_data_parallel_rank(),
        world_size=parallel_state.get_data_parallel_world_size(),
    )
    batches = micro_batches(dataset, sampler, config.num_workers, device)
    if config.data_impl == "bfp" or config.dataloader_inter_document_masking:
        return check_first_step(engine, batches)
    return batches


def evaluation_batches(
    config: TrainerConfig, valid: WholeSplits, device: torch.device
) -> Iterator[dict[str, torch.Tensor]]:
    """This rank's micro-batches of one evaluation: ``--eval-iters`` global batches, or the whole split."""
    limit = (config.eval_iters or len(valid)) * config.global_batch_size
    sampler = EvaluationSampler(
        total_samples=min(len(valid), limit),
        micro_batch_size=config.micro_batch_size,
        rank=parallel_state.get_data_parallel_rank(),
        world_size=parallel_state.get_data_parallel_world_size(),
    )
    return micro_batches(valid, sampler, 0, device)


def train(
    config: TrainerConfig,
    engine: Any,
    batches: Iterator[dict[str, torch.Tensor]],
    iteration: int,
    accumulation: int,
    history: DataHistory,
    evaluate_valid: Callable[[], Evaluation],
    files: Log,
    profile: StepProfile,
) -> int:
    """Run steps until ``--train-iters``, ``--exit-interval``, ``--exit-duration-in-mins`` or a signal.

    Args:
        batches: micro-batches of this rank.
        iteration: steps done before.
        accumulation: micro-batches per step.

    Returns:
        The number of the signal, or 0.

    Raises:
        TrainingStopped: a loss is NaN, infinite or a spike.
    """
    spikes, meter = SpikeDetector(config.loss_spike_factor), Meter(config, num_weights(engine))
    request = StopRequest(engine.device, config.exit_duration_in_mins) if config.save else None
    while iteration < config.train_iters:
        lr = learning_rate(config, iteration)
        for group in engine.optimizer.param_groups:
            group["lr"] = lr
        with profile.step(iteration + 1):
            start = time.perf_counter()
            samples = [next(batches) for _ in range(accumulation)]
            data_seconds = time.perf_counter() - start
            result = train_step(engine, samples)
        meter.add(result.work, result.seconds, data_seconds)
        reason = spikes.reason(result.loss, result.grad_norm)
        if reason:
            stop_training(config, history.dataset, iteration, reason)
        iteration += 1
        if iteration % config.log_interval == 0:
            report_step(config, files, iteration, lr, result, meter)
        stopped_by, time_is_up = request.agreed() if request else (0, False)
        stop = stopped_by or time_is_up or (config.exit_interval and iteration % config.exit_interval == 0)
        last = iteration == config.train_iters
        due = config.save_interval and iteration % config.save_interval == 0
        if config.save and (due or stop or last):
            files.sync()
            reason = save_checkpoint(engine, config, iteration, history)
            if reason and (stop or last):
                raise NotSaved(f"--save {config.save}: the last iteration, {iteration}, could not be saved: {reason}")
            stopped_by = stopped_by or request.agreed()[0]  # a signal during the checkpoint, which is saved now
            meter.restart()
        if config.eval_interval and (last or not stopped_by and iteration % config.eval_interval == 0):
            report_evaluation(files, iteration, evaluate_valid())
            meter.restart()
        if stopped_by and not last:
            name = signal.Signals(stopped_by).name
            log(f"stopped by {name} after iteration {iteration}, which is saved: the same command goes on from there")
            return stopped_by
        if stop:
            break
    return 0


def learning_rate(config: TrainerConfig, iteration: int) -> float:
    """The learning rate of a step: linear warm-up, then cosine decay from ``--lr`` to ``--min-lr``.

    Args:
        iteration: steps done before this one.
    """
    if iteration < config.lr_warmup_iters:
        return config.lr * (iteration + 1) / config.lr_warmup_iters
    if config.lr_decay_style == "constant":
        return config.lr
    decay_iters = max(1, (config.lr_decay_iters or config.train_iters) - config.lr_warmup_iters)
    done = min(1.0, (iteration - config.lr_warmup_iters) / decay_iters)
    return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1.0 + math.cos(math.pi * done))


def train_step(engine: Any, batches: list[dict[str, torch.Tensor]]) -> StepResult:
    """One optimizer step on the micro-batches of this rank. Call it on all ranks."""
    group = replicas()
    boundaries = [document_boundaries(batch["cu_seqlens"], batch["tokens"].device) for batch in batches]
    sums = torch.zeros(3, dtype=torch.float64, device=batches[0]["tokens"].device)  # targets, tokens, squared lengths
    for batch, where in zip(batches, boundaries):
        chunks = np.diff(where.joined.offsets).astype(np.float64)
        sums += torch.stack([batch["loss_mask"].sum(), *sums.new_tensor([chunks.sum(), (chunks**2).sum()])])
    distributed.all_reduce(sums, group=group)
    sums[1:] /= parallel_state.get_context_parallel_world_size()  # each rank of a row knows all its boundaries
    num_targets = sums[0].item()
    # DeepSpeed divides by the number of micro-batches and averages over replicas; we want the sum
    scale = len(batches) * group.size() / max(1.0, num_targets)
    results = torch.zeros(1 + group.size(), dtype=torch.float64, device=sums.device)  # loss, seconds of each rank
    clock = ComputeClock(sums.device)
    for batch, where in zip(batches, boundaries):
        with clock.forward():
            micro_batch_sum = summed_loss(engine, batch, where)
        with clock.backward():
            engine.backward(micro_batch_sum * scale)
        grad_norm = gradient_norm(engine)
        engine.step()
        results[0] += micro_batch_sum.detach()
    if grad_norm is None:
        grad_norm = float(engine.get_global_grad_norm())
    # once the norm has been read, the device has finished what the clock measured
    results[1 + group.rank()] = clock.seconds()
    distributed.all_reduce(results, group=group)
    loss_sum, *seconds = results.tolist()
    counts = [int(count) for count in sums.tolist()]
    loss = loss_sum / num_targets if num_targets else math.nan
    return StepResult(loss, grad_norm, counts[0], Work(*counts[1:]), RankSeconds.of(seconds))
