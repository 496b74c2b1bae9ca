"""DeepSpeed's conversion into a universal checkpoint, for models of megatron-core."""

import os
from typing import Any

from .process import die_with_parent


def main() -> None:
    """Convert as ``--input_folder`` and ``--output_folder`` say, and leave nothing behind if the trainer is killed."""
    if trainer := os.environ.get("CONVERTED_FOR"):  # process id of the rank that waits
        die_with_parent(int(trainer))
        os.register_at_fork(after_in_child=lambda: die_with_parent(os.getppid()))
    import torch  # after that: it takes seconds
    from deepspeed.checkpoint import ds_to_universal

    torch.load = without_other_entries(torch.load)
    ds_to_universal.main(ds_to_universal.parse_arguments())


def without_other_entries(load: Any) -> Any:
    """torch.load without the entries of a model that are no tensors: megatron-core's layers have an entry for the state
    of FP8 that is None elsewhere, and the conversion takes all entries for tensors."""
    import torch

    def load_tensors_of_model(*arguments: Any, **keywords: Any) -> Any:
        state = load(*arguments, **keywords)
        if isinstance(state, dict) and isinstance(state.get("module"), dict):
            state["module"] = {name: entry for name, entry in state["module"].items() if torch.is_tensor(entry)}
        return state

    return load_tensors_of_model
