"""Megatron-Bridge without Transformer Engine, as far as it can be had.

One module of Megatron-Bridge, its LoRA layers, imports Transformer Engine whatever the model is. ``install`` gives this
module, and no other, a stand-in. All others find that Transformer Engine is missing, and use what they have for that.
"""

import builtins
from unittest.mock import MagicMock

LORA = "megatron.bridge.peft.lora_layers"


def install():
    """Change imports of this process."""
    original = builtins.__import__

    def import_or_stand_in(name, globals=None, *rest, **keywords):
        if name.startswith("transformer_engine") and (globals or {}).get("__name__") == LORA:
            return MagicMock()
        return original(name, globals, *rest, **keywords)

    builtins.__import__ = import_or_stand_in
