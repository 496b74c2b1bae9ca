"""Whether boundaries reach attention in the first training step of Megatron-LM."""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import __version__ as core_version
from megatron.core import parallel_state
from torch import distributed

from ..._version import __version__
from ...attention.boundary_check import BoundaryCheck, WatchedIterator
from ...attention.first_step_report import stopped
from ...console import say
from ..hooks import prepare_first_call


def watch_first_step(train_step: Callable, options: Callable[[], argparse.Namespace | None]) -> Callable:
    """Megatron-LM's ``train_step``, the first time with a check of boundaries, after which rank 0 says what was seen.

    Args:
        train_step: Megatron-LM's, which runs forward and backward passes and then updates the weights.
        options: gives what Megatron-LM parsed; None if the run is none of ours.
    """

    def watch_schedule(arguments: dict[str, Any]) -> None:
        args = options()
        if args is not None:
            schedule = arguments["forward_backward_func"]
            arguments["forward_backward_func"] = watch(schedule, arguments["model"], args)

    return prepare_first_call(train_step, watch_schedule)


def watch(forward_backward: Callable, models: list[Any], args: argparse.Namespace) -> Callable:
    """Forward and backward passes of one step, after which all ranks agree that boundaries reached attention.

    Args:
        forward_backward: a schedule of megatron-core.
        models: the model chunks of this rank.
        args: Megatron-LM's options.

    Raises:
        IntegrationError: they did not, on all ranks; or a module of the model is not known to keep to them.
    """
    check = BoundaryCheck(
        models,
        args.seq_length,
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        context_ranks=parallel_state.get_context_parallel_world_size(),
        context_rank=parallel_state.get_context_parallel_rank(),
    )
    return report_first_step(forward_backward, check)


def report_first_step(forward_backward: Callable, check: BoundaryCheck) -> Callable:
    """As ``watch``, with the check of another trainer that has megatron-core's schedules.

    Args:
        forward_backward: a schedule of megatron-core.
        check: of the model chunks of this rank.

    Raises:
        IntegrationError: as ``watch``.
    """
    check.refuse_unknown()
    was_checked = False

    def watched_forward_backward(*, forward_step_func: Callable, **keywords: Any) -> Any:
        nonlocal was_checked
        if was_checked or keywords.get("forward_only"):  # a step may be repeated to see whether it is reproducible
            return forward_backward(forward_step_func=forward_step_func, **keywords)
        was_checked = True
        try:
            losses = forward_backward(forward_step_func=_read_watched(forward_step_func, check), **keywords)
        except Exception as error:
            if check.faults:  # an attention stopped by itself; this is why
                raise stopped(check.faults[0], distributed.get_rank()) from error
            raise
        _report(check.conclude())
        return losses

    return watched_forward_backward


def _read_watched(forward_step: Callable, check: BoundaryCheck) -> Callable:
    @functools.wraps(forward_step)
    def watched_forward_step(data_iterator: Any, *arguments: Any, **keywords: Any) -> Any:
        if data_iterator is not None:
            data_iterator = WatchedIterator(data_iterator, check)
        return forward_step(data_iterator, *arguments, **keywords)

    return watched_forward_step


def _report(what_was_seen: str) -> None:
    if distributed.get_rank() == 0:
        say(
            f"best-fit packing: attention inside documents, as the first step showed: {what_was_seen}; "
            f"megatron_bfp {__version__}, megatron-core {core_version}, torch {torch.__version__}"
        )
