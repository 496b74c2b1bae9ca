"""Watching the functions by which attention layers rotate queries and keys. torch only.

They are replaced where an attention's own code looks them up, in the globals of its modules, so what is watched is what
the layer calls: whatever kernel that is, and whoever replaced it before.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

ROTATIONS = {
    "apply_rotary_pos_emb": 1,
    "fused_apply_mla_rope_for_q": 1,
    "fused_apply_mla_rope_for_kv": 2,
    "fused_mla_rope_inplace": 1,
    "fused_mla_rope_out_of_place": 1,
    "fused_mla_rope_kv_split": 2,
}
"""Names of functions that rotate, in megatron-core, Megatron-DeepSpeed and DeepSpeed -> how many of their first
arguments are tensors to be rotated."""


class WatchedRotations:
    """Functions that rotate, each called once more with a vector that is the same at every position.

    Args:
        note: gets what was made of it, shaped as the queries or keys.
    """

    def __init__(self, note: Callable[[Tensor], None]) -> None:
        self._note = note
        self._originals: dict[tuple[str, str], Callable] = {}  # names of module and function -> function
        self._is_inside = False  # a function may call another that is watched too

    def watch(self, attention: nn.Module) -> None:
        """Watch the functions that an attention layer, and what it is made of, may call."""
        classes = {base for module in attention.modules() for base in type(module).__mro__}
        for module in {base.__module__ for base in classes} & sys.modules.keys():
            members = vars(sys.modules[module])
            for name, num_tensors in ROTATIONS.items():
                original = getattr(members.get(name), "unwatched", members.get(name))  # a watch may have been left
                if callable(original) and (module, name) not in self._originals:
                    self._originals[module, name] = original
                    members[name] = functools.update_wrapper(
                        functools.partial(self._call, original, num_tensors), original
                    )
                    members[name].unwatched = original

    def _call(self, rotate: Callable, num_tensors: int, *arguments: Any, **keywords: Any) -> Any:
        if self._is_inside:
            return rotate(*arguments, **keywords)
        self._is_inside = True
        try:
            if len(arguments) >= num_tensors:
                constants = [torch.ones_like(tensor) for tensor in arguments[:num_tensors]]
                with torch.no_grad():
                    rotated = rotate(*constants, *arguments[num_tensors:], **keywords)
                self._note(rotated[0] if isinstance(rotated, tuple) else rotated)
            return rotate(*arguments, **keywords)
        finally:
            self._is_inside = False

    def remove(self) -> None:
        """Put the functions back."""
        for (module, name), original in self._originals.items():
            setattr(sys.modules[module], name, original)
        self._originals.clear()
