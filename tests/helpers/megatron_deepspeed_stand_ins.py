"""Stand-ins for Megatron-DeepSpeed's modules and attention, and boundaries as they travel through it."""

from types import ModuleType

import numpy as np
import torch

LENGTH = 16


def cu_seqlens_of(*lengths, length=LENGTH):
    """The cu_seqlens of a row with chunks of these lengths, and padding after them."""
    ends = np.cumsum(lengths)
    return [0, *ends.tolist(), *([length] * (length - len(lengths)))]


def boundaries_of_rows(*rows, targets=1):
    """int32 [b, L + 2], as they travel in place of the attention mask."""
    return torch.tensor([[*cu_seqlens_of(*row), targets] for row in rows], dtype=torch.int32)


class Attention:
    """The part of ParallelAttention that matters: [s, b, h] to its kernel and back."""

    enable_ds_sequence_parallel = False

    def __init__(self, flash=None, heads=2):
        self.use_flash_attn, self.flash, self.heads = flash is not None, flash, heads

    def forward(self, hidden_states, attention_mask, encoder_output=None, inference_params=None, rotary_pos_emb=None):
        query = hidden_states.unflatten(-1, (self.heads, -1)).transpose(0, 1)
        if self.use_flash_attn:
            assert attention_mask is None
            return self.flash.forward(query, query, query).transpose(0, 1).flatten(2), None
        scores = torch.einsum("bqhd,bkhd->bhqk", query, query) / query.shape[-1] ** 0.5
        weights = scores.masked_fill(attention_mask, -10000.0).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, query).transpose(0, 1).flatten(2), None


def module_with(name, **members):
    """A module with these members."""
    module = ModuleType(name)
    module.__dict__.update(members)
    return module
