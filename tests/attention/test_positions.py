"""What single layers and micro-batches show of positions. ``test_boundary_check`` has whole models."""

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch

from megatron_bfp.attention.context_parallel import Shards
from megatron_bfp.attention.positions import PositionsSeen, rotates


def test_each_layer_has_its_own_entry_of_no_rope_freq():
    config = SimpleNamespace(no_rope_freq=[0, 1, 1])
    layers = [SimpleNamespace(config=config, layer_number=number) for number in (1, 2, 3, 4)]
    assert [rotates(layer, {"rotary_pos_emb": 1}) for layer in layers] == [True, False, False, True]
    assert not any(rotates(layer, {}) for layer in layers)


def test_documents_of_one_token_are_seen_to_restart():
    """Their position ids repeat and do not fall: 0, 0, 0."""
    for ids, row_length, restarts in (
        ([0, 0, 0, 0], None, True),
        ([0, 1, 2, 2], None, True),
        ([0, 1, 2, 3], None, False),
        ([0, 1, 0, 1], 2, False),
        ([0, 0, 0, 1], 2, True),
    ):
        positions = PositionsSeen(row_length)
        positions.note_embedding(torch.tensor([ids]))
        assert positions.restarts == {restarts}, ids


def test_position_ids_of_a_share_of_the_rows_are_compared_with_its_places():
    """Two rows of 8, joined and split over two ranks: rank 1 holds positions 4 to 7 of the first and 0 to 3 of the
    second, which fall and yet run on."""
    for ids, restarts in (([4, 5, 6, 7, 0, 1, 2, 3], False), ([4, 5, 0, 1, 0, 1, 2, 3], True)):
        positions = PositionsSeen(8, lambda number: Shards(2, 1, 2 * number).positions(1))
        positions.note_embedding(torch.tensor([ids]))
        assert positions.restarts == {restarts}, ids
