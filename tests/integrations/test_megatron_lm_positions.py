"""Rotary positions of joined rows with ``--data-impl bfp``: those of the rows, in megatron-core's own models."""

import argparse
import functools
import inspect

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core.models.gpt")

import torch
from helpers.rotary_models import KINDS, LENGTH, hook_rotations, joined, make_model, run
from megatron.core.fusions import fused_mla_yarn_rope_apply
from megatron.core.models.common.embeddings import rope_utils, rotary_pos_embedding

from megatron_bfp.attention.boundary_check import BoundaryCheck
from megatron_bfp.errors import IntegrationError
from megatron_bfp.integrations.megatron_lm.changes import HOOKS
from megatron_bfp.integrations.megatron_lm.positions import rotate_by_rows


@pytest.fixture
def hooked(monkeypatch):
    return hook_rotations(monkeypatch)


@pytest.mark.parametrize("kind", KINDS)
def test_joined_rows_are_rotated_as_rows_that_are_not_joined(hooked, monkeypatch, kind):
    model = make_model(monkeypatch, kind)
    (logits, expected, text), (joined_logits, got, joined_text) = run(model, False), run(model, True)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    assert torch.allclose(joined_logits, logits, atol=1e-5)
    assert text == joined_text and text.endswith("rotary positions run on through the sequence")


@pytest.mark.parametrize("kind", KINDS)
def test_control_without_the_hook_positions_restart_and_are_seen_to(monkeypatch, kind):
    model = make_model(monkeypatch, kind)
    (_, expected, text), (_, got, joined_text) = run(model, False), run(model, True)
    assert not any(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    assert text.endswith("run on through the sequence")
    assert joined_text.endswith("rotary positions restart in each document")


def test_positions_restart_with_reset_position_ids(hooked, monkeypatch):
    hooked.reset_position_ids = True
    _, _, text = run(make_model(monkeypatch, "RoPE"), True)
    assert text == "rotary positions restart in each document"


@pytest.mark.parametrize(
    "is_hooked, course", [(False, "restart in each document"), (True, "run on through the sequence")]
)
def test_layers_that_predict_later_tokens_are_rotated_alike(monkeypatch, is_hooked, course):
    if is_hooked:
        hook_rotations(monkeypatch)
    model = make_model(monkeypatch, "RoPE", later_tokens=True).eval()
    tokens = torch.arange(2 * LENGTH)[None] % 8
    check = BoundaryCheck([model], LENGTH)
    model(tokens, tokens, None, labels=tokens, packed_seq_params=joined())
    assert check.report().positions == {f"rotary positions {course}": 2}
    check.remove()


def rotation(length, *, fused=False):
    """The function that rotates, its first arguments and its keywords, for so many joined positions in one document."""
    config = argparse.Namespace(apply_rope_fusion=fused, rotary_interleaved=False, mrope_section=None)
    config.multi_latent_attention = False
    table = torch.arange(float(LENGTH))[:, None, None, None] * torch.tensor([1.0, 0.1, 1.0, 0.1])
    boundaries = torch.tensor([0, length], dtype=torch.int32)
    return torch.randn(length, 2, 4), table, {"config": config, "cu_seqlens": boundaries}


def rotated(tensor, table, mscale=1.0):
    """By megatron-core's own function for rows, of which ``tensor`` is one."""
    return rope_utils._apply_rotary_pos_emb_bshd(tensor[:, None], table[: len(tensor)], mscale=mscale)[:, 0]


def test_other_scripts_and_other_lengths_are_left_alone(hooked):
    """A document alone, shorter than a row, is rotated as without the hooks; so is what is no run of ours."""
    for length, args in (5, hooked), (LENGTH, None):
        tensor, table, given = rotation(length)
        calls = []

        def recorded(t, freqs, config, cu_seqlens=None, calls=calls):
            calls.append(cu_seqlens)

        rotate_by_rows(recorded, lambda args=args: args)(tensor, table, **given)
        assert calls[0] is given["cu_seqlens"]


def test_the_scale_of_yarn_is_not_lost_where_rotation_is_fused(hooked, monkeypatch):
    """megatron-core 0.16 and 0.19 hand joined rows to a kernel without their scale, and others not."""

    def lose_scale(tensor, cu_seqlens, freqs, **_):
        raise AssertionError("no scale")

    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb_thd", lose_scale)
    tensor, table, given = rotation(2 * LENGTH, fused=True)
    got = rope_utils.apply_rotary_pos_emb(tensor, table, mscale=1.5, **given)
    assert torch.equal(got, torch.cat([rotated(row, table, 1.5) for row in tensor.split(LENGTH)]))
    with pytest.raises(AssertionError, match="no scale"):
        rope_utils.apply_rotary_pos_emb(tensor, table, **given)  # without a scale, the kernel


@pytest.mark.parametrize("name, tensors", [("fused_apply_mla_rope_for_q", 1), ("fused_apply_mla_rope_for_kv", 2)])
def test_fused_rotations_get_the_boundaries_of_rows(hooked, monkeypatch, name, tensors):
    """Their kernels need a GPU; this is what they are called with, by position as multi-latent attention does."""
    original = inspect.unwrap(getattr(fused_mla_yarn_rope_apply, name))
    calls = []

    @functools.wraps(original)
    def recorded(*arguments):
        calls.append(arguments)

    rotate = rotate_by_rows(recorded, lambda: hooked)
    given, tables = [torch.zeros(2 * LENGTH, 2, 8)] * tensors, [torch.zeros(LENGTH, 1, 1, 4)] * 2
    sizes = [4] * (len(inspect.signature(original).parameters) - tensors - len(tables) - 4)
    rotate(*given, *tables, *sizes, joined().cu_seqlens_q, 0, 1)
    (call,) = calls
    assert call[tensors + len(tables) + len(sizes)].tolist() == [0, LENGTH, 2 * LENGTH]
    assert getattr(fused_mla_yarn_rope_apply, name).rotates_by_rows
    with pytest.raises(
        IntegrationError, match="rotary angles of 9 positions for rows of 16; give --reset-position-ids"
    ):
        rotate(*given, tables[0][:9], tables[1][:9], *sizes, joined().cu_seqlens_q, 0, 1)
    rotate(*given, *tables, *sizes, None, 0, 1)  # rows that are not joined
    assert calls[-1][tensors + len(tables) + len(sizes)] is None


def test_a_table_of_rows_is_never_made_for_a_rotation_that_would_take_it_amiss(hooked, monkeypatch):
    """Megatron-LM's main takes a table longer than the longest document for one of all joined positions."""
    embedding, before = rotary_pos_embedding.RotaryEmbedding, rotary_pos_embedding.RotaryEmbedding.get_rotary_seq_len
    for rotate in (lambda t, freqs: t, None):  # of another version
        monkeypatch.setattr(rotary_pos_embedding, "apply_rotary_pos_emb", rotate)
        HOOKS[rotary_pos_embedding.__name__](rotary_pos_embedding)
        assert embedding.get_rotary_seq_len is before
