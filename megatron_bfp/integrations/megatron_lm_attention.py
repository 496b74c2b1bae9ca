"""Attention in Megatron-LM: which one local layers get, and whether boundaries reach it in the first training step."""

import argparse
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..attention.boundary_check import BoundaryCheck, WatchedIterator, stopped
from ..errors import IntegrationError


def local_core_attention(_: Callable) -> Callable:
    """LocalSpecProvider: attention inside documents for ``--transformer-impl local``, whose own takes no boundaries."""

    def core_attention(self: Any) -> type:
        from ..megatron_core.attention import DocumentAttention  # later: it imports the module that this hook changes

        return DocumentAttention

    return core_attention


def change_heterogeneous_layers(module: ModuleType) -> None:
    """The same for ``--heterogeneous-layers-config-path``, whose local layers name their core attention themselves.

    Raises:
        IntegrationError: they do not.
    """
    from ..megatron_core.attention import DocumentAttention

    if not hasattr(module, "DotProductAttention"):
        raise IntegrationError(f"this Megatron has no {module.__name__}.DotProductAttention; see the README's versions")
    module.DotProductAttention = DocumentAttention


def watch_first_step(train_step: Callable, options: Callable[[], argparse.Namespace | None]) -> Callable:
    """Megatron-LM's ``train_step``, the first time with a check of boundaries, after which rank 0 says what was seen.

    Args:
        train_step: Megatron-LM's, which runs forward and backward passes and then updates the weights.
        options: gives what Megatron-LM parsed; None if this is no run of ours.
    """
    is_first = True

    def watched_train_step(
        forward_step_func: Callable,
        data_iterator: Any,
        model: list[Any],
        optimizer: Any,
        opt_param_scheduler: Any,
        config: Any,
        forward_backward_func: Callable,
        *others: Any,
        **keywords: Any,
    ) -> Any:
        nonlocal is_first
        args = options() if is_first else None
        is_first = False
        if args is not None:
            forward_backward_func = watch(forward_backward_func, model, args)
        arguments = (data_iterator, model, optimizer, opt_param_scheduler, config, forward_backward_func)
        return train_step(forward_step_func, *arguments, *others, **keywords)

    return watched_train_step


def watch(forward_backward: Callable, models: list[Any], args: argparse.Namespace) -> Callable:
    """Forward and backward passes of one step, after which all ranks agree that boundaries reached attention.

    Args:
        forward_backward: a schedule of megatron-core.
        models: the chunks of this rank.

    Raises:
        IntegrationError: they did not, on all ranks; or a module of the model is not known to keep to them.
    """
    from megatron.core import parallel_state
    from torch import distributed

    check = BoundaryCheck(
        models,
        args.seq_length,
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    check.refuse_unknown()
    was_checked = False

    def watched_forward_backward(*, forward_step_func: Callable, **keywords: Any) -> Any:
        nonlocal was_checked
        if was_checked or keywords.get("forward_only"):  # a step may run again to tell whether it is reproducible
            return forward_backward(forward_step_func=forward_step_func, **keywords)
        was_checked = True
        try:
            losses = forward_backward(forward_step_func=_read_watched(forward_step_func, check), **keywords)
        except Exception as error:
            if check.faults:  # the reason, where an attention stops by itself
                raise stopped(check.faults[0], distributed.get_rank()) from error
            raise
        _say(check.conclude())
        return losses

    return watched_forward_backward


def _read_watched(forward_step: Callable, check: BoundaryCheck) -> Callable:
    @functools.wraps(forward_step)
    def watched_forward_step(data_iterator: Any, *arguments: Any, **keywords: Any) -> Any:
        if data_iterator is not None:
            data_iterator = WatchedIterator(data_iterator, check)
        return forward_step(data_iterator, *arguments, **keywords)

    return watched_forward_step


def _say(what_was_seen: str) -> None:
    import torch
    from megatron.core import __version__ as core_version

    from .. import __version__

    if torch.distributed.get_rank() == 0:
        print(
            f"best-fit packing: attention inside documents, as the first step showed: {what_was_seen}; "
            f"megatron_bfp {__version__}, megatron-core {core_version}, torch {torch.__version__}",
            flush=True,
        )
