"""Rotary positions in Megatron-DeepSpeed: by the position in the whole sequence, the same for queries and keys."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch
from helpers.megatron_deepspeed_stand_ins import LENGTH, Attention, boundaries_of_rows, module_with

from megatron_bfp.errors import IntegrationError
from megatron_bfp.integrations.megatron_deepspeed import changes, model


def stock_table(length, head_size):
    """Cosines and sines as Megatron-DeepSpeed's RotaryEmbedding gives them: [length, 1, 1, head size] each."""
    angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, head_size, 2) / head_size)
    angles = torch.cat((angles, angles), dim=-1)[:, None, None]
    return angles.cos(), angles.sin()


rotate = model.rotate_by_table(None)


@pytest.mark.parametrize("rotated", [8, 4], ids=["whole heads", "half of each head"])
def test_fault_B18_rotation_is_by_positions_and_relative(rotated):
    """Pair (i, i + d / 2) of a head is a complex number, turned by its position's angle."""
    torch.manual_seed(1)
    tensor = torch.randn(LENGTH, 2, 3, 8, dtype=torch.float64)
    table = [part.double() for part in stock_table(LENGTH + 5, rotated)]
    output = rotate(tensor, table)
    pairs = torch.complex(tensor[..., : rotated // 2], tensor[..., rotated // 2 : rotated])
    speeds = 10000.0 ** (-torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    turns = torch.arange(LENGTH)[:, None, None, None] * speeds
    turned = pairs * torch.complex(turns.cos(), turns.sin())
    assert torch.allclose(output[..., :rotated], torch.cat((turned.real, turned.imag), dim=-1), atol=1e-6)
    assert torch.equal(output[..., rotated:], tensor[..., rotated:])
    # what a query makes of a key depends on the distance alone, so a document is the same at any offset
    moved = [part[3:] for part in table]
    scores = torch.einsum("qbhd,kbhd->bhqk", rotate(tensor, table), rotate(tensor, table))
    shifted = torch.einsum("qbhd,kbhd->bhqk", rotate(tensor, moved), rotate(tensor, moved))
    assert torch.allclose(scores, shifted, atol=1e-6)
    assert not torch.allclose(scores, torch.einsum("qbhd,kbhd->bhqk", tensor, tensor), atol=1e-2)
    with pytest.raises(IntegrationError, match="rotary positions came as a tensor"):
        rotate(tensor, table[0])


def test_fault_B18_a_table_of_another_length_or_precision_is_not_kept():
    tensor = torch.randn(LENGTH, 1, 1, 8)
    table = stock_table(LENGTH, 8)
    whole = rotate(tensor, table)
    assert torch.equal(rotate(tensor[:5], table), whole[:5])
    assert torch.equal(rotate(tensor, table), whole)
    assert torch.allclose(rotate(tensor, stock_table(2 * LENGTH, 8)), whole)
    halves = rotate(tensor.bfloat16(), table)
    assert halves.dtype == torch.bfloat16 and torch.allclose(halves.float(), whole, atol=5e-2)


class Rotating(Attention):
    """ParallelAttention as it takes rotary positions: one of a pair for queries, the other for keys."""

    def forward(self, hidden_states, attention_mask, encoder_output=None, inference_params=None, rotary_pos_emb=None):
        self.received = rotary_pos_emb
        if not self.enable_ds_sequence_parallel:
            of_queries, of_keys = rotary_pos_emb
            hidden_states = rotate(hidden_states.unflatten(-1, (2, -1)), of_queries).flatten(2)
            assert all(torch.equal(one, other) for one, other in zip(of_queries, of_keys, strict=True))
        return super().forward(hidden_states, attention_mask)


class AttendingAndRotating(Rotating):
    forward = model.attend_inside_documents(Rotating.forward)


def test_fault_B18_queries_and_keys_get_the_same_table():
    table = stock_table(LENGTH, 4)
    attention = AttendingAndRotating()
    attention.enable_ds_sequence_parallel = False
    attention.forward(torch.randn(LENGTH, 1, 8), boundaries_of_rows((5, 11)), rotary_pos_emb=table)
    assert attention.received == (table, table)
    attention.enable_ds_sequence_parallel = True  # DeepSpeed rotates there, by cosines and sines
    attention.forward(torch.randn(LENGTH, 1, 8), boundaries_of_rows((5, 11)), rotary_pos_emb=table)
    assert attention.received is table


def test_fault_B18_a_pipeline_s_layers_get_the_table_too(monkeypatch):
    class RotaryEmbedding:
        def __init__(self, dim, theta):
            self.dim, self.theta = dim, theta

        def __call__(self, length):
            assert self.theta == 5000
            return list(stock_table(length, self.dim))

    rotary = module_with("megatron.model.rotary_pos_embedding", RotaryEmbedding=RotaryEmbedding)
    rotary.apply_rotary_pos_emb = lambda t, freqs: None
    changes.HOOKS["megatron.model.rotary_pos_embedding"](rotary)
    assert rotary.apply_rotary_pos_emb.__qualname__.startswith("rotate_by_table")
    args = SimpleNamespace(hidden_size=64, num_attention_heads=4, kv_channels=None, rotary_percent=0.5, rope_theta=5000)
    args.params_dtype = torch.bfloat16
    for name, module in (("megatron", ModuleType("megatron")), ("megatron.model", ModuleType("megatron.model"))):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, rotary.__name__, rotary)
    monkeypatch.setattr(model, "parsed_options", lambda: args)
    model.keep_rotary_table(None)(LENGTH)
    assert isinstance(args.rotary_pos_emb, tuple)
    for kept, expected in zip(args.rotary_pos_emb, stock_table(LENGTH, 8), strict=True):
        assert kept.dtype == torch.bfloat16 and torch.equal(kept, expected.bfloat16())
    args.kv_channels = 8
    model.keep_rotary_table(None)(LENGTH)
    assert args.rotary_pos_emb[0].shape == (LENGTH, 1, 1, 4)
