"""Megatron-LM's pipeline schedules with ``--data-impl bfp``: shapes of joined rows, and boundaries in schedule plans.

Document masking joins the b rows of a micro-batch, so pipeline stages send each other [b * L, 1, hidden] and not
[L, b, hidden]. Schedules use the sequence length and the micro-batch size for these shapes alone, so they are told
b * L and 1. Stages then know all shapes beforehand and need not exchange them, which any token dispatcher of a mixture
of experts allows.

With ``--overlap-moe-expert-parallel-comm`` a schedule asks for a plan of the forward pass instead of its output.
pretrain_gpt.py makes the plan without boundaries; here it makes it with the arguments of an ordinary forward call.
Multi-token prediction in a plan passes them on, but asserts that there are none; here they are out of its sight then.
"""

import argparse
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

Options = Callable[[], argparse.Namespace | None]


def of_joined_rows(get_forward_backward_func: Callable, options: Options) -> Callable:
    """Megatron-LM's ``get_forward_backward_func``, whose schedules know that rows are joined.

    Args:
        options: gives what Megatron-LM parsed; None if the run is none of ours.
    """

    @functools.wraps(get_forward_backward_func)
    def get_schedule(*arguments: Any, **keywords: Any) -> Callable:
        schedule = get_forward_backward_func(*arguments, **keywords)
        return schedule if options() is None else join_rows_in(schedule)

    return get_schedule


def join_rows_in(schedule: Callable) -> Callable:
    """A schedule of megatron-core that gets the shapes of joined rows, in training and evaluation."""

    @functools.wraps(schedule)
    def schedule_of_joined_rows(
        *, forward_step_func: Callable, seq_length: int, micro_batch_size: int, **keywords: Any
    ) -> Any:
        return schedule(
            forward_step_func=plan_with_boundaries(forward_step_func),
            seq_length=seq_length * micro_batch_size,
            micro_batch_size=1,
            **keywords,
        )

    return schedule_of_joined_rows


def plan_with_boundaries(forward_step: Callable) -> Callable:
    """A script's ``forward_step``; if it is asked for a plan, the plan is of what it would call the model with."""

    @functools.wraps(forward_step)
    def step(data_iterator: Any, model: Any, *others: Any, return_schedule_plan: bool = False, **keywords: Any) -> Any:
        return forward_step(data_iterator, PlannedModel(model) if return_schedule_plan else model, *others, **keywords)

    return step


class PlannedModel:
    """A model that returns the plan of a forward call instead of its output; otherwise the model itself."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._model.build_schedule_plan(*arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def plan_later_tokens(build: Callable, options: Options) -> Callable:
    """``build_mtp_layer_callables``, whose first function, up to the layer's experts, takes boundaries."""

    @functools.wraps(build)
    def build_with_boundaries(layer: Any) -> tuple[list[Callable | None], Any]:
        from ...attention.boundary_check import note_boundaries  # with torch, when Megatron-LM has imported it

        (first, *others), backward = build(layer)

        @functools.wraps(first)
        def first_with_boundaries(node: Any, hidden_states: Any) -> Any:
            boundaries = node.chunk_state.packed_seq_params
            if boundaries is None or options() is None:
                return first(node, hidden_states)
            note_boundaries(layer, boundaries)
            with _out_of_sight(node.chunk_state, layer):
                return first(node, hidden_states)

        return [first_with_boundaries, *others], backward

    return build_with_boundaries


@contextlib.contextmanager
def _out_of_sight(state: Any, layer: Any) -> Iterator[None]:
    """Take the boundaries off a plan's state until the layer has looked up later tokens by them. What comes next is
    joining the two, after which its attention gets them from the state."""
    boundaries, look_up, join = state.packed_seq_params, layer._get_embeddings, layer._concat_embeddings

    def look_up_in_documents(*arguments: Any, **keywords: Any) -> Any:
        return look_up(*arguments, **(keywords | {"packed_seq_params": boundaries}))

    def put_back_and_join(*arguments: Any, **keywords: Any) -> Any:
        state.packed_seq_params = boundaries
        return join(*arguments, **keywords)

    state.packed_seq_params = None
    layer._get_embeddings, layer._concat_embeddings = look_up_in_documents, put_back_and_join
    try:
        yield
    finally:
        del layer._get_embeddings, layer._concat_embeddings
        state.packed_seq_params = boundaries
