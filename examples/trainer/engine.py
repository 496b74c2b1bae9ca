"""Process groups, and the model and optimizer in a DeepSpeed engine: ZeRO 0 to 3, tensor parallelism."""

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import deepspeed
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import distributed

from megatron_bfp.attention.boundary_check import BoundaryCheck, WatchedIterator, before_first_update
from megatron_bfp.errors import InputError, OptionError

from .model import build_model
from .process import Lifeline
from .ranks import log, on_first_rank


class ModelParallelUnit:
    """megatron-core's process groups under the names that DeepSpeed asks for, old ones and new ones.

    A rank's model-parallel group are the ranks that hold the other parts of its tensors; its data-parallel group those
    that hold the same parts and see other samples.
    """

    get_model_parallel_group = staticmethod(parallel_state.get_tensor_model_parallel_group)
    get_model_parallel_rank = staticmethod(parallel_state.get_tensor_model_parallel_rank)
    get_model_parallel_world_size = staticmethod(parallel_state.get_tensor_model_parallel_world_size)
    get_tensor_model_parallel_rank = staticmethod(parallel_state.get_tensor_model_parallel_rank)
    get_tensor_model_parallel_world_size = staticmethod(parallel_state.get_tensor_model_parallel_world_size)
    get_data_parallel_group = staticmethod(parallel_state.get_data_parallel_group)
    get_data_parallel_rank = staticmethod(parallel_state.get_data_parallel_rank)
    get_data_parallel_world_size = staticmethod(parallel_state.get_data_parallel_world_size)


def initialize_distributed(options: argparse.Namespace) -> torch.device:
    """Join the process groups, seed, and choose this rank's device.

    Raises:
        OptionError: the ranks cannot be divided by ``--tensor-model-parallel-size``.
    """
    on_gpu = torch.cuda.is_available()
    local_rank = int(os.environ.get("LOCAL_RANK", options.local_rank))
    if on_gpu:
        torch.cuda.set_device(local_rank)
    else:
        # DeepSpeed would compile a shared-memory operator for minutes; gloo works without it
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(options.distributed_backend or ("nccl" if on_gpu else "gloo"))
    Lifeline.start(distributed.get_rank(), distributed.get_world_size(), on_first_rank)
    size = options.tensor_model_parallel_size
    if distributed.get_world_size() % size:
        raise OptionError(f"--tensor-model-parallel-size {size} does not divide {distributed.get_world_size()} ranks")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
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
    replicas = parallel_state.get_data_parallel_world_size()
    samples_at_once = options.micro_batch_size * replicas
    if options.global_batch_size is None:
        options.global_batch_size = samples_at_once
    if options.global_batch_size % samples_at_once:
        raise OptionError(
            f"--global-batch-size {options.global_batch_size} must be a multiple of --micro-batch-size "
            f"{options.micro_batch_size} times {replicas} data-parallel ranks"
        )
    return options.global_batch_size // samples_at_once


def engine_config(options: argparse.Namespace, accumulation: int) -> dict[str, Any]:
    """DeepSpeed's configuration: the file of ``--deepspeed_config``, completed by the options. Completes
    ``options.zero_stage``.

    Raises:
        InputError: the file is not JSON.
        OptionError: the file contradicts an option.
    """
    config = _read_config(options.deepspeed_config) if options.deepspeed_config else {}
    zero = config.setdefault("zero_optimization", {})
    if options.zero_stage is not None and zero.setdefault("stage", options.zero_stage) != options.zero_stage:
        raise OptionError(
            f"--zero-stage {options.zero_stage}: {options.deepspeed_config} has zero_optimization.stage {zero['stage']}"
        )
    options.zero_stage = zero.setdefault("stage", 0)
    ours = {
        "train_batch_size": options.global_batch_size,
        "train_micro_batch_size_per_gpu": options.micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": options.clip_grad,
        "bf16": {"enabled": options.bf16},
    }
    for name, value in ours.items():
        found = config.get(name, "auto")
        found = found.get("enabled", "auto") if isinstance(found, dict) else found
        wanted = value["enabled"] if isinstance(value, dict) else value
        if found != "auto" and found != wanted:
            raise OptionError(f"{options.deepspeed_config}: {name} is {found}, the options say {wanted}")
        config[name] = {**config[name], **value} if isinstance(config.get(name), dict) else value
    for name in ("optimizer", "scheduler", "fp16"):
        if config.get(name, {}).get("enabled", name != "fp16" and name in config):
            raise OptionError(
                f"{options.deepspeed_config}: take out {name}; the trainer has its own, under its options"
            )
    config.setdefault("steps_per_print", sys.maxsize)
    if options.bf16 and zero["stage"] == 1:  # without ZeRO, DeepSpeed accumulates in bf16 only
        config.setdefault("data_types", {"grad_accum_dtype": "fp32"})
    return config


def _read_config(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, ValueError) as error:
        raise InputError(f"--deepspeed_config {path}: {error}") from None
    if not isinstance(config, dict):
        raise InputError(f"--deepspeed_config {path}: not a JSON object")
    return config


def build_engine(options: argparse.Namespace, vocab_size: int, config: dict[str, Any]) -> Any:
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
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=ModelParallelUnit())[0]
    # For bf16 without ZeRO, DeepSpeed allocates the state by a step on zero gradients, which Adam must not count
    if options.bf16 and config["zero_optimization"]["stage"] == 0:
        optimizer.state.clear()
    return engine


def num_parameters(engine: Any) -> int:
    """Parameters of the whole model, over all parts of tensors."""
    return _count(engine, engine.module.parameters())


def num_weights(engine: Any) -> int:
    """Parameters of the whole model that are in matrix products: not those of norms and the embedding."""
    named = engine.module.named_parameters()
    return _count(engine, [p for name, p in named if _dimensions(p) > 1 and "embedding" not in name])


def _dimensions(parameter: torch.nn.Parameter) -> int:
    """Dimensions of a parameter, also where ZeRO 3 has taken it away."""
    return len(getattr(parameter, "ds_shape", parameter.shape))


def _count(engine: Any, parameters: Iterable[torch.nn.Parameter]) -> int:
    group = parallel_state.get_tensor_model_parallel_group()
    counts = torch.zeros(2, dtype=torch.int64, device=engine.device)  # shared by the group, split over it
    for parameter in parameters:
        is_split = getattr(parameter, "tensor_model_parallel", False)
        counts[int(is_split)] += getattr(parameter, "ds_numel", parameter.numel())
    distributed.all_reduce(counts[1:], group=group)
    return int(counts.sum())


def gradient_norm(engine: Any) -> float | None:
    """The gradient's norm before a step, where DeepSpeed keeps none: in fp32 without ZeRO. None elsewhere."""
    if engine.zero_optimization() or engine.bfloat16_enabled() or not engine.is_gradient_accumulation_boundary():
        return None
    group = parallel_state.get_tensor_model_parallel_group()
    squares = torch.zeros(2, dtype=torch.float64, device=engine.device)  # shared by the group, split over it
    for parameter in engine.module.parameters():
        if parameter.grad is not None:
            is_split = getattr(parameter, "tensor_model_parallel", False)
            squares[int(is_split)] += parameter.grad.double().square().sum()
    distributed.all_reduce(squares[1:], group=group)
    return squares.sum().sqrt().item()


def check_first_step(engine: Any, batches: Iterator[dict[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    """The same micro-batches; before the engine's first update all ranks agree that attention got their boundaries.

    Raises:
        IntegrationError: a module of the model is not known to keep to boundaries. If they do not arrive, the first
            update raises it, on all ranks.
    """
    check = BoundaryCheck([engine.module], replica=parallel_state.get_data_parallel_rank())
    check.refuse_unknown()
    before_first_update(
        engine.optimizer, lambda: log(f"attention inside documents, as the first step showed: {check.conclude()}")
    )
    return WatchedIterator(batches, check)
