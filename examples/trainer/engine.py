"""DeepSpeed around the model: process groups, its configuration, the engine, and what can be asked of an engine.

In the order of a run: ``initialize_distributed``, ``with_batch_sizes``, ``deepspeed_config``, ``build_engine``,
``check_first_step``. ZeRO 0 to 3, tensor parallelism and context parallelism are supported.
"""

import dataclasses
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
from megatron_bfp.huggingface.pretrained import PretrainedLlama

from .config import TrainerConfig
from .lifeline import Lifeline
from .model import build_model
from .pretrained import load_pretrained
from .ranks import log, on_first_rank, replicas


class ModelParallelUnit:
    """megatron-core's process groups under the names that DeepSpeed asks for, old and new.

    A rank's model-parallel group holds the other parts of its tensors. What DeepSpeed calls its data-parallel group
    holds the same parts and sees other tokens: other samples, or with context parallelism other parts of a sample.
    """

    get_model_parallel_group = staticmethod(parallel_state.get_tensor_model_parallel_group)
    get_model_parallel_rank = staticmethod(parallel_state.get_tensor_model_parallel_rank)
    get_model_parallel_world_size = staticmethod(parallel_state.get_tensor_model_parallel_world_size)
    get_tensor_model_parallel_rank = staticmethod(parallel_state.get_tensor_model_parallel_rank)
    get_tensor_model_parallel_world_size = staticmethod(parallel_state.get_tensor_model_parallel_world_size)
    get_data_parallel_group = staticmethod(replicas)
    get_data_parallel_rank = staticmethod(lambda: replicas().rank())
    get_data_parallel_world_size = staticmethod(lambda: replicas().size())


def initialize_distributed(config: TrainerConfig) -> torch.device:
    """Join the process groups, seed, and choose this rank's device.

    Raises:
        OptionError: ``--tensor-model-parallel-size`` times ``--context-parallel-size`` does not divide the ranks.
    """
    on_gpu = torch.cuda.is_available()
    local_rank = int(os.environ.get("LOCAL_RANK", config.local_rank))
    if on_gpu:
        torch.cuda.set_device(local_rank)
    else:
        # DeepSpeed would compile a shared-memory operator for minutes; gloo works without it
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(config.distributed_backend or ("nccl" if on_gpu else "gloo"))
    Lifeline.start(distributed.get_rank(), distributed.get_world_size(), on_first_rank)
    tensor, context = config.tensor_model_parallel_size, config.context_parallel_size
    if distributed.get_world_size() % (tensor * context):
        sizes = f"--tensor-model-parallel-size {tensor}"
        sizes += f" times --context-parallel-size {context}" if context > 1 else ""
        raise OptionError(f"{sizes} does not divide {distributed.get_world_size()} ranks")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor, context_parallel_size=context)
    torch.manual_seed(config.seed)
    model_parallel_cuda_manual_seed(config.seed, inference_rng_tracker=not on_gpu)
    return torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")


def with_batch_sizes(config: TrainerConfig) -> tuple[TrainerConfig, int]:
    """The configuration with ``global_batch_size``, and the micro-batches that a rank runs per step.

    Raises:
        OptionError: the sizes do not divide.
    """
    ranks = parallel_state.get_data_parallel_world_size()
    samples_at_once = config.micro_batch_size * ranks
    global_batch_size = samples_at_once if config.global_batch_size is None else config.global_batch_size
    if global_batch_size % samples_at_once:
        raise OptionError(
            f"--global-batch-size {global_batch_size} must be a multiple of --micro-batch-size "
            f"{config.micro_batch_size} times {ranks} data-parallel ranks"
        )
    return dataclasses.replace(config, global_batch_size=global_batch_size), global_batch_size // samples_at_once


def deepspeed_config(config: TrainerConfig, accumulation: int) -> dict[str, Any]:
    """DeepSpeed's configuration: the file of ``--deepspeed_config``, completed by the options.

    Args:
        accumulation: micro-batches that a rank runs per step.

    Raises:
        InputError: the file is not JSON.
        OptionError: the file contradicts an option.
    """
    path = config.deepspeed_config
    settings = _read_settings(path) if path else {}
    zero = settings.setdefault("zero_optimization", {})
    if config.zero_stage is not None and zero.setdefault("stage", config.zero_stage) != config.zero_stage:
        raise OptionError(f"--zero-stage {config.zero_stage}: {path} has zero_optimization.stage {zero['stage']}")
    zero.setdefault("stage", 0)
    ours = {
        # DeepSpeed counts a sample once for each rank that has a part of it
        "train_batch_size": config.global_batch_size * config.context_parallel_size,
        "train_micro_batch_size_per_gpu": config.micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": config.clip_grad,
        "bf16": {"enabled": config.bf16},
    }
    for name, value in ours.items():
        _complete(settings, name, value, path)
    for name in ("optimizer", "scheduler", "fp16"):
        if settings.get(name, {}).get("enabled", name != "fp16" and name in settings):
            raise OptionError(f"{path}: remove {name}; the trainer has its own, set by its options")
    settings.setdefault("steps_per_print", sys.maxsize)
    if config.bf16 and zero["stage"] == 1:  # without ZeRO, DeepSpeed accumulates in bf16 only
        settings.setdefault("data_types", {"grad_accum_dtype": "fp32"})
    return settings


def _complete(settings: dict[str, Any], name: str, value: Any, path: str | None) -> None:
    """Set an entry of DeepSpeed's configuration. Its file may leave it out, say "auto", or agree.

    Args:
        value: of the entry, or a dict with its "enabled".

    Raises:
        OptionError: the file says something else.
    """
    given = settings.get(name, "auto")
    said = given.get("enabled", "auto") if isinstance(given, dict) else given
    wanted = value["enabled"] if isinstance(value, dict) else value
    if said != "auto" and said != wanted:
        raise OptionError(f"{path}: {name} is {said}, the options say {wanted}")
    settings[name] = {**given, **value} if isinstance(given, dict) else value


def _read_settings(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            settings = json.load(file)
    except (OSError, ValueError) as error:
        raise InputError(f"--deepspeed_config {path}: {error}") from None
    if not isinstance(settings, dict):
        raise InputError(f"--deepspeed_config {path}: not a JSON object")
    return settings


def build_engine(
    config: TrainerConfig, vocab_size: int, settings: dict[str, Any], pretrained: PretrainedLlama | None = None
) -> Any:
    """The model and AdamW in a DeepSpeed engine. Norms and biases have no weight decay.

    Args:
        vocab_size: of the tokenizer.
        settings: DeepSpeed's configuration.
        pretrained: the model to start from; None for random weights.
    """
    model = build_model(config, vocab_size)
    if pretrained:
        load_pretrained(model, pretrained, config, vocab_size)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=0.0,  # set before every step
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
    )
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, mpu=ModelParallelUnit())[0]
    # For bf16 without ZeRO, DeepSpeed allocates the state by a step on zero gradients, which Adam must not count
    if config.bf16 and settings["zero_optimization"]["stage"] == 0:
        optimizer.state.clear()
    return engine


def num_parameters(engine: Any) -> int:
    """Parameters of the whole model, over all tensor-parallel ranks."""
    return _count(engine, engine.module.parameters())


def num_weights(engine: Any) -> int:
    """Parameters of the whole model that are in matrix products: all but norms and the embedding."""
    named = engine.module.named_parameters()
    return _count(engine, [p for name, p in named if _dimensions(p) > 1 and "embedding" not in name])


def _dimensions(parameter: torch.nn.Parameter) -> int:
    """Dimensions of a parameter, even if ZeRO 3 has partitioned it."""
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
    """The gradient's norm before a step, for fp32 without ZeRO, where DeepSpeed keeps none. None otherwise."""
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
    """The same micro-batches. Before the engine's first update, all ranks check that attention got their boundaries.

    Raises:
        IntegrationError: a module of the model is not known to respect boundaries. If boundaries do not arrive, the
            first update raises it, on all ranks.
    """
    check = BoundaryCheck(
        [engine.module],
        replica=parallel_state.get_data_parallel_rank(),
        context_ranks=parallel_state.get_context_parallel_world_size(),
        context_rank=parallel_state.get_context_parallel_rank(),
    )
    check.refuse_unknown()
    before_first_update(
        engine.optimizer, lambda: log(f"attention inside documents, as the first step showed: {check.conclude()}")
    )
    return WatchedIterator(batches, check)
