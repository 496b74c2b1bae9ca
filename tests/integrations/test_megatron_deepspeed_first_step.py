"""The check in Megatron-DeepSpeed's first training step, with stand-ins for its modules."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from megatron_bfp import IntegrationError
from megatron_bfp.integrations.megatron_deepspeed import first_step
from megatron_bfp.integrations.megatron_deepspeed import model as deepspeed_model
from megatron_bfp.integrations.megatron_deepspeed.changes import HOOKS

CU_SEQLENS = torch.tensor([[0, 3, 5, 8, 8, 8, 8, 8, 8], [0, 8, 8, 8, 8, 8, 8, 8, 8]])
MASK = torch.cat([CU_SEQLENS, CU_SEQLENS[:, :1]], dim=1).to(torch.int32)
"""As it travels in place of the attention mask."""


apply_rotary_pos_emb = deepspeed_model.rotate_by_table(None)


class ParallelAttention(nn.Module):
    def __init__(self, use_flash_attn=False):
        super().__init__()
        self.use_flash_attn = use_flash_attn

    def forward(self, hidden_states, attention_mask, rotary_pos_emb=None):
        if rotary_pos_emb is not None:
            apply_rotary_pos_emb(hidden_states[:, :, None], rotary_pos_emb)
        return hidden_states


class Layers(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.weight = nn.Parameter(torch.ones(1))


@pytest.fixture
def printed(monkeypatch):
    lines = []
    monkeypatch.setitem(sys.modules, "megatron", SimpleNamespace(print_rank_0=lines.append))
    ranks = SimpleNamespace(get_data_parallel_rank=lambda: 0, get_pipeline_model_parallel_rank=lambda: 0)
    monkeypatch.setitem(sys.modules, "megatron.core", SimpleNamespace(mpu=ranks))
    yield lines
    deepspeed_model.readers.clear()


def train_once(layers, *masks, rotary_pos_emb=None, watched=None):
    """A training step in which each layer gets the next of ``masks``; returns the step."""
    optimizer = torch.optim.SGD(layers.parameters(), lr=1.0)
    engine = SimpleNamespace(named_modules=layers.named_modules, modules=layers.modules, optimizer=optimizer)

    def train_step(forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config):
        for read in deepspeed_model.readers:
            read(CU_SEQLENS)
        for layer, mask in zip(layers.layers, masks, strict=True):
            layer(torch.zeros(8, 2, 4), mask, rotary_pos_emb=rotary_pos_emb)
        layers.weight.grad = torch.ones(1)
        model[0].optimizer.step()

    watched = watched or first_step.watch_first_step(train_step)
    watched(None, None, [engine], None, None, None)
    return watched


TURNS = torch.arange(8.0)[:, None, None, None] * torch.tensor([1.0, 0.1, 1.0, 0.1])
TABLE = [TURNS.cos(), TURNS.sin()]


@pytest.mark.parametrize(
    "flash, rotary, expected",
    [
        (False, None, "2 x ParallelAttention by torch's softmax with a mask; no positions; "),
        (
            True,
            TABLE,
            "2 x ParallelAttention by flash-attn's varlen kernel; rotary positions run on through the sequence; ",
        ),
    ],
)
def test_fault_A14_the_line_comes_from_what_the_first_step_saw(printed, flash, rotary, expected):
    layers = Layers(ParallelAttention(flash), ParallelAttention(flash))
    train_once(layers, MASK, MASK.clone(), rotary_pos_emb=rotary)
    (line,) = printed
    assert f"best-fit packing: attention inside documents, as the first step showed: {expected}" in line
    assert "megatron_bfp " in line and "torch " in line
    assert layers.weight.item() == 0 and not deepspeed_model.readers
    assert not any(module._forward_pre_hooks for module in layers.modules())


OTHER = MASK.clone()
OTHER[0, 1] = 2
WRONG = {"none": None, "float mask": torch.zeros(2, 10), "another micro-batch's": OTHER, "row by row": MASK[:1]}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_fault_A01_one_layer_with_wrong_boundaries_stops_before_the_update(printed, wrong):
    layers = Layers(ParallelAttention(), ParallelAttention())
    with pytest.raises(IntegrationError, match=r"rank 0: layers.1 \(ParallelAttention.*before the first update"):
        train_once(layers, MASK, wrong)
    assert layers.weight.item() == 1 and not printed


def test_fault_A04_a_layer_that_is_not_known_is_refused(printed):
    class FPDTAttention(nn.Module):
        pass

    with pytest.raises(IntegrationError, match=r"layers.1 \(FPDTAttention\) is not known"):
        train_once(Layers(ParallelAttention(), FPDTAttention()), MASK, MASK)


def test_batches_are_read_where_masks_are_made(monkeypatch):
    seen = []
    monkeypatch.setattr(deepspeed_model, "readers", [seen.append])
    tokens = torch.ones(2, 8, dtype=torch.int64)
    deepspeed_model._pending.put(CU_SEQLENS, torch.ones(2, 8, dtype=torch.int64))
    deepspeed_model.masks_from_boundaries(None)(tokens, 0, False, False, False)
    assert seen == [CU_SEQLENS] or torch.equal(seen[0], CU_SEQLENS)


def test_megatron_lms_package_of_the_same_name_is_left_alone():
    package = ModuleType("megatron.training")
    package.__path__ = []
    HOOKS["megatron.training"](package)
    with pytest.raises(IntegrationError, match="no megatron.training.train_step"):
        HOOKS["megatron.training"](ModuleType("megatron.training"))
