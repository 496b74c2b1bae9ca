"""Whether boundaries reach attention in the first training step of Megatron-DeepSpeed."""

import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from ..._version import __version__
from ...attention.boundary_check import BoundaryCheck, before_first_update
from ..hooks import prepare_first_call
from .model import readers


def boundaries_among(arguments: tuple, keywords: dict[str, Any]) -> Tensor | None:
    """The boundaries that a layer got in place of the attention mask, int32 [b, L + 1]; None if it got none."""
    for value in (*arguments, *keywords.values()):
        if isinstance(value, Tensor) and value.dtype == torch.int32 and value.dim() == 2:
            return value[:, :-1]  # the last column is the number of targets
    return None


def watch_first_step(train_step: Callable) -> Callable:
    """Megatron-DeepSpeed's ``train_step``, the first time with a check of boundaries, which rank 0 reports."""
    return prepare_first_call(train_step, lambda arguments: watch(arguments["model"], arguments["optimizer"]))


def watch(model: list[Any], optimizer: Any) -> None:
    """Before the first update, all ranks agree that attention got the boundaries of the batches.

    Args:
        model: DeepSpeed's engine alone, or the model chunks of this rank.
        optimizer: used if the engine has none.

    Raises:
        IntegrationError: a module of the model is not known to keep to boundaries. If they do not arrive, the first
            update raises it, on all ranks.
    """
    from megatron import print_rank_0
    from megatron.core import mpu

    stage = getattr(model[0], "stage_id", None)  # of DeepSpeed's pipelines
    check = BoundaryCheck(
        model,
        replica=mpu.get_data_parallel_rank(),
        stage=mpu.get_pipeline_model_parallel_rank() if stage is None else stage,
        boundaries_of=boundaries_among,
    )
    check.refuse_unknown()
    readers.append(check.read)

    def conclude() -> None:
        readers.remove(check.read)
        seen = check.conclude()
        print_rank_0(f"best-fit packing: attention inside documents, as the first step showed: {seen}; {versions()}")

    before_first_update(getattr(model[0], "optimizer", None) or optimizer, conclude)


def versions() -> str:
    """The versions of what computes attention."""
    flash_attn = getattr(sys.modules.get("flash_attn"), "__version__", None)
    flash = f", flash-attn {flash_attn}" if flash_attn else ""
    return f"megatron_bfp {__version__}, DeepSpeed {version('deepspeed')}, torch {version('torch')}{flash}"
