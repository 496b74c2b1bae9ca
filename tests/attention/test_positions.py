"""What single layers and micro-batches show of positions. ``test_positions_of_models`` has whole models."""

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import numpy as np
import torch

from megatron_bfp.attention.context_parallel import Shards
from megatron_bfp.attention.positions import IRREGULAR, RESTART, RUN_ON, PositionsSeen, course_of, rotates
from megatron_bfp.attention.rotations import WatchedRotations


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
        positions = PositionsSeen(8, 2, 1)
        positions.note_embedding(torch.tensor([ids]))
        assert positions.restarts == {restarts}, ids


# Rotations, seen as what they make of a vector that is the same everywhere


def rotated_by(positions, size, dtype=torch.float32, base=10_000.0, scale=1.0):
    """A vector of ones, rotated by these positions: float32 [n, size]."""
    speeds = scale * base ** -(torch.arange(0, size, 2) / size)
    angles = (positions[:, None] * speeds).float()
    cosines, sines = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat([cosines - sines, cosines + sines], dim=-1).float()


def random_rows(generator, num_rows, length):
    """Boundaries of joined rows, and the position of each token in its row and in its document."""
    cuts = generator.integers(1, length, (num_rows, 3))
    joined = np.unique(np.concatenate([[0], *(row * length + np.append(cut, length) for row, cut in enumerate(cuts))]))
    places = np.arange(num_rows * length)
    starts = joined[np.searchsorted(joined, places, side="right") - 1]
    return torch.from_numpy(joined), torch.from_numpy(places % length), torch.from_numpy(places - starts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size, base, scale", [(8, 1e4, 1.0), (64, 1e4, 1.0), (128, 1e6, 1.0), (64, 1e4, 0.125)])
def test_what_positions_do_is_seen_from_rotations(size, base, scale, dtype):
    generator = np.random.default_rng(size)
    for length in (8, 100, 1000):
        for num_rows in (1, 3):
            joined, in_row, in_document = random_rows(generator, num_rows, length)
            places = torch.arange(num_rows * length)

            def seen(positions, places=places, joined=joined, length=length):
                return course_of(rotated_by(positions, size, dtype, base, scale), places, joined, length)

            assert seen(in_row) == seen(in_row + 7) == RUN_ON
            assert seen(in_document) == RESTART
            skipped = in_row + 3 * torch.searchsorted(joined, places, right=True)  # some are left out at boundaries
            assert seen(skipped) == IRREGULAR
            clamped = in_row.clamp(max=length // 2)
            assert seen(clamped) != RUN_ON or clamped.equal(in_row)
            assert seen(in_row * 0) is None
            assert course_of(rotated_by(in_row, size), places, torch.arange(0, len(places) + 1, length), length) is None


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("as_one_row", [False, True])
def test_a_rank_s_share_of_the_rows_shows_the_same(ranks, as_one_row):
    """However the rows are split: each by zigzag, or joined to one row and that by zigzag."""
    joined, in_row, _ = random_rows(np.random.default_rng(ranks), 2, 64)
    jumps = in_row + 2 * torch.searchsorted(joined, torch.arange(128), right=True)
    seen = {RUN_ON: set(), IRREGULAR: set()}
    for rank in range(ranks):
        shards = Shards(ranks, 1, 128) if as_one_row else Shards(ranks, 2, 64)
        own = shards.positions(rank)
        for expected, positions in ((RUN_ON, in_row), (IRREGULAR, jumps)):
            noted = PositionsSeen(64 if as_one_row else None, ranks, rank)
            noted.enter("layer", "rotary positions", joined)
            rows = rotated_by(positions[own], 16).view(shards.num_rows, -1, 1, 16)
            noted.note_rotation(rows.transpose(0, 1))
            seen[expected] |= noted.courses["layer"]
        noted.note_embedding(in_row[own].view(shards.num_rows, -1))
        assert noted.restarts == {False}
    assert seen == {RUN_ON: {RUN_ON}, IRREGULAR: {IRREGULAR}}


@pytest.mark.parametrize("form", ["joined", "sequence first", "batch first"])
def test_rotations_are_seen_in_each_form(form):
    joined, in_row, in_document = random_rows(np.random.default_rng(5), 2, 16)
    for positions, course in ((in_row, RUN_ON), (in_document, RESTART)):
        noted = PositionsSeen(16 if form == "joined" else None)
        noted.enter("layer", "rotary positions", joined)
        rotated = rotated_by(positions, 8)[:, None].expand(-1, 3, -1)
        if form != "joined":
            rotated = rotated.unflatten(0, (2, 16))
        noted.note_rotation(rotated.transpose(0, 1) if form == "sequence first" else rotated)
        assert noted.counts(True) == {f"rotary positions {course}": 1}


# Watching functions


class FusedAttention(torch.nn.Module):
    pass


def fused_apply_mla_rope_for_q(t, angles):
    """In place, as megatron-core's kernel."""
    return t.mul_(angles)


def fused_apply_mla_rope_for_kv(kv, k_pos_emb, angles):
    """Calls another function that is watched."""
    return fused_apply_mla_rope_for_q(k_pos_emb, angles) + kv, kv


def test_functions_that_work_in_place_or_call_each_other_are_watched_once():
    seen = []
    watched = WatchedRotations(seen.append)
    watched.watch(FusedAttention())
    tensor = torch.full((4, 1, 2), 3.0, requires_grad=True)
    angles = torch.arange(4.0)[:, None, None]
    key, value = fused_apply_mla_rope_for_kv(tensor, tensor * 1, angles)
    assert torch.equal(key, tensor * angles + tensor) and value is tensor and key.requires_grad
    assert len(seen) == 1 and torch.equal(seen[0], (angles + 1).expand(4, 1, 2)) and not seen[0].requires_grad
    watched.remove()
    fused_apply_mla_rope_for_kv(tensor, tensor * 1, angles)
    assert len(seen) == 1
