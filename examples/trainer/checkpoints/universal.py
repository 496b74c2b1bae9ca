"""DeepSpeed's conversion into a universal checkpoint, for models of megatron-core. It runs as a process of its own.

Imports torch only after this process is tied to its trainer: that takes seconds, and nothing may be left behind.
"""

import os
from collections.abc import Callable
from typing import Any

from ..lifeline import die_with_parent


def main() -> None:
    """Convert ``--input_folder`` into ``--output_folder``; if the trainer is killed, end with all children."""
    if trainer := os.environ.get("CONVERTED_FOR"):  # process id of the rank that waits
        die_with_parent(int(trainer))
        os.register_at_fork(after_in_child=lambda: die_with_parent(os.getppid()))
    import torch
    from deepspeed.checkpoint import ds_to_universal

    torch.load = tensors_only(torch.load)
    ds_to_universal.main(ds_to_universal.parse_arguments())


def tensors_only(load: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.load`` without those entries of a model that are not tensors, which the conversion cannot handle.

    megatron-core's layers have an entry for the state of FP8, which is None without FP8.
    """
    import torch

    def load_tensors_of_model(*arguments: Any, **keywords: Any) -> Any:
        state = load(*arguments, **keywords)
        if isinstance(state, dict) and isinstance(state.get("module"), dict):
            state["module"] = {name: entry for name, entry in state["module"].items() if torch.is_tensor(entry)}
        return state

    return load_tensors_of_model
