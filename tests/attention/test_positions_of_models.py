"""What the first step says of a whole model's positions: with stand-ins that rotate."""

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch
from helpers import attention_stand_ins
from helpers.attention_stand_ins import (
    ANGLES,
    ROWS,
    Model,
    SelfAttention,
    TEDotProductAttention,
    TransformerLayer,
    packed,
)
from torch import nn

from megatron_bfp.attention.boundaries import join_rows
from megatron_bfp.attention.boundary_check import BoundaryCheck
from megatron_bfp.attention.first_step_report import Report, agree


class YarnRotaryEmbedding(nn.Module):
    pass


class MultimodalRotaryEmbedding(nn.Module):
    pass


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.position_embeddings = nn.Embedding(16, 4)

    def forward(self, input_ids, position_ids):
        return self.position_embeddings(position_ids)


def described(model, positions=None, rotary_pos_emb=None, rows=ROWS, **changes):
    check = BoundaryCheck([model], row_length=8)
    check.read(rows)
    if positions is not None:
        model.embedding(None, position_ids=positions)
    for layer in model.layers:
        layer(
            torch.zeros(16, 1, 4),
            packed_seq_params=packed(join_rows(rows), **changes),
            rotary_pos_emb=rotary_pos_emb,
        )
    return check.conclude().split("; ", 1)[1]


class DocumentAttention(nn.Module):
    kernel_name = "sdpa"

    def forward(self, query, packed_seq_params=None):
        return query


def test_fault_A14_what_is_said_of_positions_is_true():
    rotary, two_rows = ANGLES, torch.arange(8).repeat(2)[None]
    assert described(Model(TransformerLayer())) == "no positions"
    assert described(Model(TransformerLayer()), rotary_pos_emb=rotary) == "rotary positions restart in each document"
    model = Model(TransformerLayer(DocumentAttention()))
    in_rows = described(model, rotary_pos_emb=rotary, qkv_format="sbhd")
    assert in_rows == "rotary positions run on through the sequence"
    for embedding, kind in ((YarnRotaryEmbedding, "YaRN"), (MultimodalRotaryEmbedding, "multimodal")):
        model = Model(TransformerLayer())
        model.rotary_pos_emb = embedding()
        assert described(model, rotary_pos_emb=rotary) == f"{kind} rotary positions restart in each document"
    model = Model(TransformerLayer())
    model.embedding = Embedding()
    assert described(model, two_rows) == "learned positions run on through the sequence"
    restarted = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, *range(8)]])
    assert described(model, restarted) == "learned positions restart in each document"
    one_each = described(model, two_rows, rows=ROWS[[1, 1]])  # nothing can be told from these
    assert one_each == "learned positions, in rows of one document each"
    config = SimpleNamespace(no_rope_freq=[0, 1])
    model = Model(TransformerLayer(number=1, config=config), TransformerLayer(number=2, config=config))
    some = described(model, rotary_pos_emb=rotary)
    assert some == "rotary positions restart in each document (1 of 2 layers)"


def test_fault_A14_a_rotation_that_was_not_seen_is_not_guessed():
    class Unknown(SelfAttention):
        def forward(self, states, rotary_pos_emb=None, packed_seq_params=None):
            return self.core_attention(states, packed_seq_params=packed_seq_params)

    layer = TransformerLayer()
    layer.self_attention = Unknown(TEDotProductAttention())
    assert described(Model(layer), rotary_pos_emb=ANGLES) == "rotary positions that were not seen"
    one_each = described(Model(TransformerLayer()), rotary_pos_emb=ANGLES, rows=ROWS[[1, 1]])
    assert one_each == "rotary positions, in rows of one document each"


def test_fault_A14_ranks_whose_rows_show_nothing_leave_it_to_others():
    shown, not_shown = "rotary positions restart in each document", "rotary positions, in rows of one document each"
    reports = [Report((), layers={"A": 2}, positions={text: 2}) for text in (not_shown, shown, not_shown)]
    assert agree(reports) == f"2 x A; {shown}"


def test_functions_are_put_back_after_the_first_step():
    rotate = attention_stand_ins.apply_rotary_pos_emb
    check = BoundaryCheck([Model(TransformerLayer()), Model(TransformerLayer())], row_length=8)
    assert attention_stand_ins.apply_rotary_pos_emb is not rotate
    check.remove()
    assert attention_stand_ins.apply_rotary_pos_emb is rotate


def test_fault_A14_multi_latent_attention_rotates_by_itself():
    layer = TransformerLayer()
    layer.self_attention.rotary_pos_emb = YarnRotaryEmbedding()
    assert described(Model(layer)) == "YaRN rotary positions restart in each document"
