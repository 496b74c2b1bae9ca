"""The check in the first training step that boundaries reach attention: with stand-ins, and with a small real model."""

import pytest

pytest.importorskip("torch")

import torch
from helpers.attention_stand_ins import (
    ANGLES,
    JOINED,
    ROWS,
    Attention,
    Model,
    TEDotProductAttention,
    TransformerLayer,
    packed,
)
from torch import nn

from megatron_bfp import IntegrationError
from megatron_bfp.attention.boundary_check import BoundaryCheck, WatchedIterator, before_first_update, digest
from megatron_bfp.attention.first_step_report import Report, agree


def report_of(*packed_seq_params, model=None, batches=(ROWS,), **keywords):
    """The report of a step of a model with two layers, of which each gets the next of ``packed_seq_params``."""
    model = model or Model(TransformerLayer(), TransformerLayer())
    check = BoundaryCheck([model], row_length=8)
    for batch in batches:
        check.read(batch)
    model(torch.zeros(16, 1, 4), *packed_seq_params, **keywords)
    return check.report()


def test_fault_A01_right_boundaries_are_described():
    text = agree([report_of(packed(), rotary_pos_emb=ANGLES)])
    assert text == "2 x TEDotProductAttention; rotary positions restart in each document"


WRONG = {
    "none": (None, "got no document boundaries"),
    "rows leak": (torch.tensor([0, 3, 5, 16], dtype=torch.int32), "got other boundaries than those of the batches"),
    "whole rows": (torch.tensor([0, 8, 16], dtype=torch.int32), "got other boundaries than those of the batches"),
    "another micro-batch's": (torch.tensor([0, 2, 5, 8, 16], dtype=torch.int32), "got other boundaries"),
    "too few positions": (torch.tensor([0, 3, 5, 8], dtype=torch.int32), "got other boundaries"),
    "not from 0": (torch.tensor([1, 3, 5, 8, 16], dtype=torch.int32), "got boundaries that do not rise from 0"),
    "falling": (torch.tensor([0, 5, 3, 8, 16], dtype=torch.int32), "got boundaries that do not rise from 0"),
    "empty": (torch.tensor([0, 0], dtype=torch.int32), "got boundaries that hold no position"),
}


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("wrong, message", WRONG.values(), ids=WRONG)
def test_fault_A01_wrong_boundaries_in_one_layer_stop_the_run(wrong, message, layer):
    given = [packed(), packed()]
    given[layer] = None if wrong is None else packed(wrong)
    with pytest.raises(IntegrationError, match=rf"rank 0: layers\.{layer}\.self_attention\.core_attention.*{message}"):
        agree([report_of(*given)])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"max_seqlen_q": 7}, "have max_seqlen 7, where a document has 8 positions"),
        ({"cu_seqlens_kv": JOINED[[0, 1, 3, 4]]}, "differ between queries and keys"),
        ({"qkv_format": "sbhd"}, "have the form sbhd, which it ignores"),
    ],
)
def test_fault_A01_boundaries_that_a_kernel_would_misread_stop_the_run(changes, message):
    with pytest.raises(IntegrationError, match=message):
        agree([report_of(packed(**changes))])


def test_fault_A01_boundaries_of_several_micro_batches_are_all_compared():
    model = Model(TransformerLayer())
    other = ROWS.flip(0)
    check = BoundaryCheck([model])
    check.read(ROWS)
    check.read(other)
    model(torch.zeros(16, 1, 4), packed())
    assert "got other boundaries" in check.report().faults[0]  # those of the second never came
    model(torch.zeros(16, 1, 4), packed(torch.tensor([0, 8, 11, 13, 16], dtype=torch.int32)))
    model(torch.zeros(16, 1, 4), packed())  # recomputed
    assert check.report().faults == ()
    swapped = BoundaryCheck([model])
    swapped.read(other)
    swapped.read(ROWS)
    model(torch.zeros(16, 1, 4), packed())
    model(torch.zeros(16, 1, 4), packed(torch.tensor([0, 8, 11, 13, 16], dtype=torch.int32)))
    assert "got other boundaries" in swapped.report().faults[0]  # each micro-batch got those of the other


def test_fault_A01_boundaries_changed_in_place_are_read_again():
    model, boundaries = Model(TransformerLayer(), TransformerLayer()), packed(JOINED.clone())
    check = BoundaryCheck([model])
    check.read(ROWS)
    model.layers[0](torch.zeros(16, 1, 4), packed_seq_params=boundaries)
    boundaries.cu_seqlens_q[1] = 2
    model.layers[1](torch.zeros(16, 1, 4), packed_seq_params=boundaries)
    assert check.report().faults[0].startswith("layers.1.")


def test_fault_A01_a_layer_that_was_not_called_as_a_module_stops_the_run():
    model = Model(TransformerLayer(), TransformerLayer())
    check = BoundaryCheck([model])
    model.layers[0](torch.zeros(16, 1, 4), packed_seq_params=packed())
    model.layers[1].self_attention.core_attention.forward(torch.zeros(16, 1, 4))
    (fault,) = check.report().faults
    assert fault.startswith("layers.1.self_attention.core_attention") and "was not called as a module" in fault


def test_a_pass_without_gradients_is_no_training():
    model = Model(TransformerLayer())
    check = BoundaryCheck([model])
    check.read(ROWS)
    with torch.no_grad():
        model(torch.zeros(16, 1, 4), packed(torch.tensor([0, 16], dtype=torch.int32)))
        model(torch.zeros(16, 1, 4), None)
    model(torch.zeros(16, 1, 4), packed())
    assert check.report().faults == ()


def test_several_ranks_agree_or_all_stop():
    seen = report_of(packed())
    of_tensor_parallel_peer = report_of(packed(), batches=())
    assert agree([seen, of_tensor_parallel_peer]).startswith("2 x ")
    with_other = report_of(packed(torch.tensor([0, 16], dtype=torch.int32)), batches=())
    with pytest.raises(IntegrationError, match="rank 1: attention got other boundaries than those of the batches"):
        agree([seen, with_other])
    another_replica = Report((), replica=1, layers=with_other.layers, seen=with_other.seen)
    assert agree([seen, another_replica])
    with pytest.raises(IntegrationError, match=r"rank 1: layers.0.*no document boundaries \(and 1 more like this\)"):
        agree([seen, report_of(None)])
    with pytest.raises(IntegrationError, match="no attention layer was called"):
        agree([Report(())])


def test_layers_are_counted_once_for_each_stage():
    rotated = {"rotary positions restart in each document": 2}
    reports = [Report((), stage=stage, layers={"A": 2}, positions=rotated) for stage in (0, 0, 1, 1)]
    assert agree(reports) == "4 x A; rotary positions restart in each document"


def test_hooks_are_gone_afterwards():
    model = Model(TransformerLayer())
    check = BoundaryCheck([model])
    assert sum(len(module._forward_pre_hooks) for module in model.modules()) == 2
    check.read(ROWS)
    model(torch.zeros(16, 1, 4), packed())
    assert check.conclude().startswith("1 x ")
    assert not any(module._forward_pre_hooks for module in model.modules())
    check.read(ROWS.flip(0))
    assert len(check.batches) == 1


# Modules that are not known


class CSAttention(nn.Module):
    pass


class GatedDeltaNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1d = nn.Conv1d(4, 4, 4)


class DotProductAttention(nn.Module):
    pass


class CrossAttention(Attention):
    pass


class Shift(nn.Module):
    pass


class IdentityOp(nn.Module):
    pass


class ColumnParallelLinearGathered(nn.Linear):
    pass


def layer_with(**children):
    layer = TransformerLayer()
    for name, child in children.items():
        setattr(layer, name, child)
    return layer


REFUSED = {
    "core attention": TransformerLayer(DotProductAttention()),
    "self attention": layer_with(self_attention=CSAttention()),
    "of any name in a slot": layer_with(self_attention=Shift()),
    "mixer": layer_with(mixer=Shift()),
    "cross attention": layer_with(cross_attention=CrossAttention(TEDotProductAttention())),
    "known class in the wrong slot": layer_with(cross_attention=TEDotProductAttention()),
    "convolution in an MLP": layer_with(mlp=nn.Sequential(nn.Linear(4, 4), nn.Conv1d(4, 4, 2))),
    "recurrent": layer_with(mlp=nn.GRU(4, 4)),
    "torch's attention": layer_with(mlp=nn.MultiheadAttention(4, 1)),
    "layer": Shift(),
}


@pytest.mark.parametrize("layer", REFUSED.values(), ids=REFUSED)
def test_fault_A04_a_layer_that_is_not_known_is_refused(layer):
    check = BoundaryCheck([Model(TransformerLayer(), layer)])
    assert check.unknown and all(line.startswith("layers.1") for line in check.unknown)
    with pytest.raises(IntegrationError, match="rank 0: layers.1.*is not known to keep to document boundaries"):
        check.refuse_unknown()


def test_fault_A04_layers_without_mixing_are_fine():
    names = {"self_attention": IdentityOp(), "cross_attention": IdentityOp()}
    replaced = layer_with(self_attention=ColumnParallelLinearGathered(4, 4), cross_attention=IdentityOp())
    gated = layer_with(self_attention=GatedDeltaNet())
    check = BoundaryCheck([Model(TransformerLayer(), layer_with(**names), replaced, gated, nn.ReLU())])
    check.refuse_unknown()
    assert list(check.mixers) == ["layers.0.self_attention.core_attention", "layers.3.self_attention"]


# The ways in


def test_batches_are_watched_and_handed_on():
    check = BoundaryCheck([Model(TransformerLayer())])

    class Iterator:
        advance = "of the iterator"

        def __next__(self):
            return {"cu_seqlens": ROWS}

    watched = WatchedIterator(Iterator(), check)
    assert next(watched)["cu_seqlens"] is ROWS and watched.advance == "of the iterator"
    assert list(check.batches) == [digest(JOINED.long())]


def test_an_update_waits_for_the_check():
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    calls = []

    def refuse():
        calls.append(1)
        raise IntegrationError("boundaries")

    before_first_update(optimizer, refuse)
    with pytest.raises(IntegrationError):
        optimizer.step()
    assert weight.item() == 1 and calls == [1]
    before_first_update(optimizer, lambda: calls.append(2))
    optimizer.step()
    optimizer.step()
    assert weight.item() == -1 and calls == [1, 2]
