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

import deepspeed
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from pretrain_arguments import parse_arguments
from pretrain_data import GlobalOrderSampler, build_train_dataset, micro_batches
from pretrain_model import attention_kernel, build_model
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
    dataset = build_train_dataset(options, tokenizer)
    engine = build_engine(options, tokenizer.vocab_size, accumulation)
    iteration, consumed_samples = load_checkpoint(engine, options.load)
    log(f"samples: {len(dataset):,}; parameters: {sum(p.numel() for p in engine.module.parameters()):,}")
    log(f"attention kernel: {attention_kernel(engine.module)}")
    sampler = GlobalOrderSampler(
        consumed_samples,
        options.train_iters * options.global_batch_size,
        options.micro_batch_size,
        options.global_batch_size,
        distributed.get_rank(),
        distributed.get_world_size(),
    )
    train(options, engine, micro_batches(dataset, sampler, options.num_workers, device), iteration, accumulation)


def log(line: str) -> None:
    """Print a line from rank 0."""
    if distributed.get_rank() == 0:
        print(line, flush=True)


def initialize_distributed(options: argparse.Namespace) -> torch.device:
    """Join the process groups, seed, and choose this rank's device."""
    on_gpu = torch.cuda.is_available()
    local_rank = int(os.environ.get("LOCAL_RANK", options.local_rank))
    if on_gpu:
        torch.cuda.set_device(local_rank)
    else:
        # DeepSpeed would compile a shared-memory operator for minutes; gloo works without it
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(options.distributed_backend or ("nccl" if on_gpu else "gloo"))
    parallel_state.initialize_model_parallel()
    torch.manual_seed(options.seed)
    model_parallel_cuda_manual_seed(options.seed, inference_rng_tracker=not on_gpu)
    return torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")


def set_batch_sizes(options: argparse.Namespace) -> int:
    """Complete ``options.global_batch_size``.

    Returns:
        Micro-batches a rank runs for a step.

    Raises:
        OptionError: the sizes do not divide.
    """
    samples_at_once = options.micro_batch_size * distributed.get_world_size()
    if options.global_batch_size is None:
        options.global_batch_size = samples_at_once
    if options.global_batch_size % samples_at_once:
        raise OptionError(
            f"--global-batch-size {options.global_batch_size} must be a multiple of --micro-batch-size "
            f"{options.micro_batch_size} times {distributed.get_world_size()} ranks"
        )
    return options.global_batch_size // samples_at_once


def build_engine(options: argparse.Namespace, vocab_size: int, accumulation: int) -> Any:
    """The model and AdamW in a DeepSpeed engine. Norms and biases are not decayed."""
    model = build_model(options, vocab_size)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=0.0,  # set before every step
        betas=(options.adam_beta1, options.adam_beta2),
        eps=options.adam_eps,
    )
    config = {
        "train_batch_size": options.global_batch_size,
        "train_micro_batch_size_per_gpu": options.micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": options.clip_grad,
        "bf16": {"enabled": options.bf16},
        "zero_optimization": {"stage": options.zero_stage},
        "steps_per_print": sys.maxsize,
    }
    if options.bf16 and options.zero_stage == 1:  # without ZeRO, DeepSpeed accumulates in bf16 only
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    # For bf16 without ZeRO, DeepSpeed allocates the state by a step on zero gradients, which Adam must not count
    if options.bf16 and not options.zero_stage:
        optimizer.state.clear()
    return engine


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
    sums = torch.stack([batch["loss_mask"].sum(dtype=torch.float64) for batch in batches]).sum()
    distributed.all_reduce(sums)
    num_targets = max(1.0, sums.item())
    # DeepSpeed divides by the number of micro-batches and averages over ranks; what is wanted is a sum
    scale = len(batches) * distributed.get_world_size() / num_targets
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
        grad_norm = plain_grad_norm(engine)
        engine.step()
        loss_sum += micro_batch_sum.detach()
    distributed.all_reduce(loss_sum)
    if grad_norm is None:
        grad_norm = float(engine.get_global_grad_norm())
    return StepResult(loss_sum.item() / num_targets, grad_norm, int(sums.item()))


def plain_grad_norm(engine: Any) -> float | None:
    """The gradient's norm before a step, where DeepSpeed keeps none: in fp32 without ZeRO. None elsewhere."""
    if engine.zero_optimization() or engine.bfloat16_enabled() or not engine.is_gradient_accumulation_boundary():
        return None
    gradients = [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]
    return torch.nn.utils.get_total_norm(gradients).item()


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
