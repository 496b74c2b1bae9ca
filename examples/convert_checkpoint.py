"""DeepSpeed's conversion into a universal checkpoint, for models of megatron-core. The trainer runs it where it must.

Usage: python convert_checkpoint.py --input_folder CKPT/iter_0001000 --output_folder CKPT/iter_0001000_universal
"""

import os
from typing import Any

from pretrain_process import die_with_parent

if trainer := os.environ.get("CONVERTED_FOR"):  # process id of the rank that waits: nothing is left of its run
    die_with_parent(int(trainer))
    os.register_at_fork(after_in_child=lambda: die_with_parent(os.getppid()))

import torch  # noqa: E402
from deepspeed.checkpoint import ds_to_universal  # noqa: E402

load = torch.load


def load_tensors_of_model(*arguments: Any, **keywords: Any) -> Any:
    """torch.load without the entries of a model that are no tensors: megatron-core's layers have a place for the state
    of FP8 that is None elsewhere, and the conversion takes all entries for tensors."""
    state = load(*arguments, **keywords)
    if isinstance(state, dict) and isinstance(state.get("module"), dict):
        state["module"] = {name: entry for name, entry in state["module"].items() if torch.is_tensor(entry)}
    return state


if __name__ == "__main__":
    torch.load = load_tensors_of_model
    ds_to_universal.main(ds_to_universal.parse_arguments())
