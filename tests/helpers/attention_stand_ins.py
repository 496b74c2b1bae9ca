"""Stand-ins for megatron-core's layers, with boundaries as Megatron-LM gives them and a rotation of their own."""

from types import SimpleNamespace

import torch
from torch import nn

ROWS = torch.tensor([[0, 3, 5, 8, 8, 8, 8, 8, 8], [0, 8, 8, 8, 8, 8, 8, 8, 8]], dtype=torch.int32)
JOINED = torch.tensor([0, 3, 5, 8, 16], dtype=torch.int32)


def packed(cu_seqlens=JOINED, **changes):
    """As Megatron-LM's PackedSeqParams of joined rows."""
    values = {"qkv_format": "thd", "cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens, "max_seqlen_q": 16}
    return SimpleNamespace(**(values | changes))


class TEDotProductAttention(nn.Module):
    """Of a class whose name is known."""

    def forward(self, query, packed_seq_params=None):
        return query


ANGLES = torch.tensor([1.0, 0.1])
"""Of a position, for the pairs of a head."""


def apply_rotary_pos_emb(t, freqs, cu_seqlens=None):
    """Rotate by the position in the row, or in the document if boundaries are given."""
    positions = torch.arange(len(t), dtype=torch.int32)
    if cu_seqlens is not None:
        positions = positions - cu_seqlens[torch.searchsorted(cu_seqlens, positions, right=True) - 1]
    turns = (positions[:, None] * freqs).view(len(t), *[1] * (t.dim() - 2), len(freqs))
    first, second = t.chunk(2, dim=-1)
    return torch.cat([first * turns.cos() - second * turns.sin(), first * turns.sin() + second * turns.cos()], dim=-1)


class Attention(nn.Module):
    def __init__(self, core, number=1, config=None):
        super().__init__()
        self.core_attention, self.layer_number, self.config = core, number, config

    def forward(self, states, rotary_pos_emb=None, packed_seq_params=None):
        if self.config and self.config.no_rope_freq[self.layer_number - 1]:
            rotary_pos_emb = None
        if getattr(self, "rotary_pos_emb", None):
            rotary_pos_emb = ANGLES
        if rotary_pos_emb is not None and packed_seq_params is not None:
            is_joined = packed_seq_params.qkv_format == "thd"
            heads = states if is_joined else states[:, :, None]
            apply_rotary_pos_emb(heads, rotary_pos_emb, packed_seq_params.cu_seqlens_q if is_joined else None)
        return self.core_attention(states, packed_seq_params=packed_seq_params)


class SelfAttention(Attention):
    pass


class TransformerLayer(nn.Module):
    def __init__(self, core=None, **keywords):
        super().__init__()
        self.self_attention = SelfAttention(core or TEDotProductAttention(), **keywords)
        self.mlp = nn.Linear(4, 4)

    def forward(self, states, packed_seq_params=None, rotary_pos_emb=None):
        given = {"packed_seq_params": packed_seq_params, "rotary_pos_emb": rotary_pos_emb}
        return states + self.mlp(self.self_attention(states, **given))


class Model(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, states, *packed_seq_params, rotary_pos_emb=None):
        for number, layer in enumerate(self.layers):
            given = packed_seq_params[number % len(packed_seq_params)]
            states = layer(states, packed_seq_params=given, rotary_pos_emb=rotary_pos_emb)
        return states
