"""Pre-train a GPT model with megatron-core and DeepSpeed on best-fit packed documents.

    deepspeed examples/pretrain_gpt.py --data-impl bfp --data-path PREFIX --tokenizer-model tokenizer.json ...

The same command runs on GPUs (NCCL) and on CPUs (gloo). The loss of a step is the mean over all target tokens of the
global batch: packed sequences have different numbers of targets, so a mean of micro-batch means would weigh documents
unevenly. The order of samples follows from the seed and the number of samples consumed, which a checkpoint records.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from pretrain_arguments import parse_arguments
from pretrain_data import GlobalOrderSampler, build_train_dataset, micro_batches
from pretrain_engine import (
    build_engine,
    engine_config,
    gradient_norm,
    initialize_distributed,
    num_parameters,
    set_batch_sizes,
)
from pretrain_model import attention_kernel
from torch import distributed

from megatron_bfp.attention import document_boundaries
from megatron_bfp.command_line import run
from megatron_bfp.errors import OptionError
from megatron_bfp.preprocessing.tokenizers import load_tokenizer


@dataclass(frozen=True)
class StepResult:
    """What a training step did."""

    loss: float
    """Mean over the target tokens of the global batch."""
    grad_norm: float
    """Of the gradient of that mean, before clipping."""
    num_targets: int


def main() -> None:
    """Train, or resume, as the command line says.

    Raises:
        BFPError: bad options or data.
    """
    options = parse_arguments()
    tokenizer = load_tokenizer(options.tokenizer_type, options.tokenizer_model, options.eod_token)
    device = initialize_distributed(options)
    accumulation = set_batch_sizes(options)
    config = engine_config(options, accumulation)
    dataset = build_train_dataset(options, tokenizer)
    engine = build_engine(options, tokenizer.vocab_size, config)
    iteration, consumed_samples = load_checkpoint(engine, options.load)
    log(f"samples: {len(dataset):,}; parameters: {num_parameters(engine):,}")
    log(f"attention kernel: {attention_kernel(engine.module)}")
    sampler = GlobalOrderSampler(
        consumed_samples,
        options.train_iters * options.global_batch_size,
        options.micro_batch_size,
        options.global_batch_size,
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
    )
    train(options, engine, micro_batches(dataset, sampler, options.num_workers, device), iteration, accumulation)


def log(line: str) -> None:
    """Print a line from rank 0."""
    if distributed.get_rank() == 0:
        print(line, flush=True)


def load_checkpoint(engine: Any, folder: str | None) -> tuple[int, int]:
    """Resume from the latest checkpoint of a folder.

    Returns:
        Iterations done and samples consumed; 0 and 0 where there is no checkpoint.

    Raises:
        OptionError: the folder names a checkpoint that is not there, or one of another global batch size.
    """
    if folder is None:
        return 0, 0
    latest = os.path.join(folder, "latest")
    if not os.path.isfile(latest):
        log(f"--load {folder}: no checkpoint there, starting from the beginning")
        return 0, 0
    with open(latest, encoding="utf-8") as file:
        checkpoint = os.path.join(folder, file.read().strip())
    if not os.path.isdir(checkpoint):
        raise OptionError(f"--load {folder}: its file 'latest' names {checkpoint}, which is not there")
    _, state = engine.load_checkpoint(folder)
    if state["consumed_samples"] != state["iteration"] * engine.train_batch_size():
        raise OptionError(
            f"--load {checkpoint}: it was saved with --global-batch-size "
            f"{state['consumed_samples'] // state['iteration']}, not {engine.train_batch_size()}; resume with that"
        )
    log(f"resumed from {checkpoint} at iteration {state['iteration']}")
    return state["iteration"], state["consumed_samples"]


def save_checkpoint(engine: Any, options: argparse.Namespace, iteration: int) -> None:
    """Save everything a run needs to go on as if it had not stopped."""
    state = {"iteration": iteration, "consumed_samples": iteration * options.global_batch_size}
    engine.save_checkpoint(options.save, tag=f"iter_{iteration:07d}", client_state=state)
    log(f"saved {os.path.join(options.save, f'iter_{iteration:07d}')}")


def train(
    options: argparse.Namespace,
    engine: Any,
    batches: Iterator[dict[str, torch.Tensor]],
    iteration: int,
    accumulation: int,
) -> None:
    """Run steps until ``--train-iters`` or ``--exit-interval``."""
    since, since_iteration = time.perf_counter(), iteration
    while iteration < options.train_iters:
        lr = learning_rate(options, iteration)
        for group in engine.optimizer.param_groups:
            group["lr"] = lr
        result = train_step(engine, [next(batches) for _ in range(accumulation)])
        iteration += 1
        if iteration % options.log_interval == 0:
            seconds = (time.perf_counter() - since) / (iteration - since_iteration)
            since, since_iteration = time.perf_counter(), iteration
            tokens_per_second = options.global_batch_size * options.seq_length / seconds
            log(
                f"iteration {iteration}/{options.train_iters} | loss {result.loss:.6f} | learning rate {lr:.4e} | "
                f"grad norm {result.grad_norm:.4f} | target tokens {result.num_targets} | "
                f"consumed samples {iteration * options.global_batch_size} | tokens/s {tokens_per_second:,.0f}"
            )
        stop = options.exit_interval is not None and iteration % options.exit_interval == 0
        due = options.save_interval is not None and iteration % options.save_interval == 0
        if options.save and (due or stop or iteration == options.train_iters):
            save_checkpoint(engine, options, iteration)
        if stop:
            return


def train_step(engine: Any, batches: list[dict[str, torch.Tensor]]) -> StepResult:
    """One optimizer step on the micro-batches of this rank."""
    replicas = parallel_state.get_data_parallel_group()
    sums = torch.stack([batch["loss_mask"].sum(dtype=torch.float64) for batch in batches]).sum()
    distributed.all_reduce(sums, group=replicas)
    num_targets = max(1.0, sums.item())
    # DeepSpeed divides by the number of micro-batches and averages over replicas; what is wanted is a sum
    scale = len(batches) * replicas.size() / num_targets
    loss_sum = torch.zeros((), dtype=torch.float64, device=sums.device)
    for batch in batches:
        losses = engine(
            batch["tokens"],
            batch["position_ids"],
            None,
            labels=batch["labels"],
            packed_seq_params=document_boundaries(batch["cu_seqlens"], batch["tokens"].device),
        )
        micro_batch_sum = (losses.float() * batch["loss_mask"]).sum()
        engine.backward(micro_batch_sum * scale)
        grad_norm = gradient_norm(engine)
        engine.step()
        loss_sum += micro_batch_sum.detach()
    distributed.all_reduce(loss_sum, group=replicas)
    if grad_norm is None:
        grad_norm = float(engine.get_global_grad_norm())
    return StepResult(loss_sum.item() / num_targets, grad_norm, int(sums.item()))


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


if __name__ == "__main__":
    rank, local_rank = (os.environ.get(name, "0") for name in ("RANK", "LOCAL_RANK"))
    status = run(main, "pretrain_gpt" if rank == "0" else f"pretrain_gpt (rank {rank})", quiet=local_rank != "0")
    if distributed.is_initialized():
        distributed.destroy_process_group()
    sys.exit(status)
