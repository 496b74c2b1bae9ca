"""The check in the first training step, for layers that are no attention: state space layers and delta nets."""

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from megatron_bfp.attention.boundary_check import BoundaryCheck
from megatron_bfp.attention.mixers import JOINED_ROWS_ONLY

ROWS = torch.tensor([[0, 3, 5, 8, 8, 8, 8, 8, 8], [0, 8, 8, 8, 8, 8, 8, 8, 8]], dtype=torch.int32)
JOINED = torch.tensor([0, 3, 5, 8, 16], dtype=torch.int32)
NUMBERS = torch.tensor([[0] * 3 + [1] * 2 + [2] * 3 + [7] * 8])


def faults(kind, **packed):
    """What the check says of a layer of a class of this name, after it was called with these boundaries."""
    forward = {"forward": lambda self, states, packed_seq_params=None: states}
    layer = nn.Module()
    layer.mixer = type(kind, (nn.Module,), forward)()
    check = BoundaryCheck([layer])
    check.read(ROWS)
    values = {"qkv_format": "thd", "cu_seqlens_q": JOINED, "cu_seqlens_kv": JOINED, "max_seqlen_q": 8}
    layer.mixer(torch.zeros(16, 1, 4), packed_seq_params=SimpleNamespace(**(values | packed)))
    return check.report().faults


@pytest.mark.parametrize(
    "seq_idx, fault",
    [
        (NUMBERS, None),
        (None, "have no seq_idx"),  # pretrain_gpt.py makes none
        (torch.zeros(1, 16), "seq_idx of other documents"),
        (torch.arange(16)[None], "seq_idx of other documents"),
        (NUMBERS.roll(1), "seq_idx of other documents"),
        (NUMBERS[:, :-1], "seq_idx of other documents"),
    ],
)
def test_fault_A04_a_state_space_layer_begins_anew_in_each_document(seq_idx, fault):
    said = faults("MambaMixer", seq_idx=seq_idx)
    assert len(said) == (fault is not None) and (fault is None or fault in said[0])


@pytest.mark.parametrize("seq_idx, is_fault", [(NUMBERS, False), (NUMBERS.roll(1), True)])
def test_a_state_space_layer_goes_by_numbers_in_either_form(seq_idx, is_fault):
    said = faults("MambaMixer", qkv_format="sbhd", seq_idx=seq_idx)
    assert bool(said) == is_fault and all("seq_idx of other documents" in line for line in said)


@pytest.mark.parametrize("kind", sorted(JOINED_ROWS_ONLY))
def test_classes_that_know_joined_rows_alone_get_joined_rows(kind):
    assert faults(kind, seq_idx=NUMBERS) == ()
    numbers = None if kind == "MambaMixer" else NUMBERS  # by which it would go
    assert "have the form sbhd, which it ignores" in faults(kind, qkv_format="sbhd", seq_idx=numbers)[0]
    assert (
        "other boundaries than those of the batches"
        in faults(
            kind, cu_seqlens_q=torch.tensor([0, 16]), cu_seqlens_kv=None, max_seqlen_q=16, seq_idx=torch.zeros(1, 16)
        )[0]
    )
