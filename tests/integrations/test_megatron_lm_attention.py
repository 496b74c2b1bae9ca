"""What ``--data-impl bfp`` does to attention in Megatron-LM: local layers, layer specs, the first step."""

import argparse
import dataclasses
import functools
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core.models.gpt")

import torch
from helpers.megatron_helpers import initialize_megatron, model_options
from megatron.core.models import backends
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from trainer.model import build_model

from megatron_bfp import IntegrationError, OptionError
from megatron_bfp.integrations.megatron_lm.changes import HOOKS
from megatron_bfp.integrations.megatron_lm.first_step import watch, watch_first_step
from megatron_bfp.megatron_core.attention import DocumentAttention, with_document_attention

LENGTH = 16
HETEROGENEOUS = "megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs"


# Local layers and layer specs


def core_attention_of(spec):
    return spec.submodules.self_attention.submodules.core_attention


def test_fault_B02_local_layers_get_attention_inside_documents(monkeypatch):
    stock = gpt_layer_specs.get_gpt_layer_local_spec()
    assert core_attention_of(stock).__name__ == "DotProductAttention"
    monkeypatch.setattr(backends.LocalSpecProvider, "core_attention", backends.LocalSpecProvider.core_attention)
    HOOKS["megatron.core.models.backends"](backends)
    assert core_attention_of(gpt_layer_specs.get_gpt_layer_local_spec()) is DocumentAttention
    assert core_attention_of(gpt_layer_specs.get_gpt_layer_local_spec(multi_latent_attention=True)) is DocumentAttention


def test_fault_B02_heterogeneous_layers_get_it_too():
    layers = SimpleNamespace(__name__="layers", DotProductAttention=object)
    HOOKS[HETEROGENEOUS](layers)
    assert layers.DotProductAttention is DocumentAttention
    with pytest.raises(IntegrationError, match="no layers.DotProductAttention"):
        HOOKS[HETEROGENEOUS](SimpleNamespace(__name__="layers"))


@dataclasses.dataclass
class Layer:
    self_attention: object = IdentityOp
    cross_attention: object = IdentityOp
    mlp: object = IdentityOp


@dataclasses.dataclass
class MambaLayer:
    mixer: object


@dataclasses.dataclass
class Parts:
    in_proj: object = None


@dataclasses.dataclass
class Block:
    layer_specs: list


@dataclasses.dataclass
class AttentionParts:
    core_attention: object


class GatedDeltaNet:
    pass


class DSAttention:
    pass


class Linear:
    pass


def spec_of(**parts):
    return ModuleSpec(module=object, submodules=Layer(**parts))


DOT_PRODUCT = core_attention_of(gpt_layer_specs.get_gpt_layer_local_spec())
NOT_TAKEN = {
    "gated delta net": spec_of(self_attention=ModuleSpec(module=GatedDeltaNet, submodules=Parts())),
    "class alone": spec_of(self_attention=GatedDeltaNet),
    "builder": spec_of(self_attention=functools.partial(GatedDeltaNet, submodules=Parts())),
    "path": spec_of(self_attention=ModuleSpec(module=("somewhere", "GatedDeltaNet"))),
    "state space": ModuleSpec(module=object, submodules=MambaLayer(ModuleSpec(module=GatedDeltaNet))),
    "sparse": spec_of(self_attention=ModuleSpec(object, submodules=AttentionParts(ModuleSpec(module=DSAttention)))),
    "cross": spec_of(
        self_attention=ModuleSpec(object, submodules=AttentionParts(DOT_PRODUCT)),
        cross_attention=ModuleSpec(GatedDeltaNet, submodules=AttentionParts(DOT_PRODUCT)),
    ),
}


@pytest.mark.parametrize("where", ["alone", "in a block", "in a stack"])
@pytest.mark.parametrize("layer", NOT_TAKEN.values(), ids=NOT_TAKEN)
def test_fault_A04_layers_that_would_not_get_the_boundaries_are_refused(layer, where):
    usual = gpt_layer_specs.get_gpt_layer_local_spec()
    spec = {"alone": layer, "in a block": Block([usual, layer]), "in a stack": {"a": usual, "b": [layer]}}[where]
    with pytest.raises(OptionError, match="GatedDeltaNet|DSAttention"):
        with_document_attention(spec)


def test_fault_A04_every_layer_of_a_block_gets_it():
    usual = gpt_layer_specs.get_gpt_layer_local_spec()
    built = spec_of(self_attention=functools.partial(object, submodules=AttentionParts(DOT_PRODUCT)))
    none, linear = spec_of(), spec_of(self_attention=ModuleSpec(module=Linear))
    block = with_document_attention(Block([usual, built, none, linear]), kernel="sdpa")
    first = core_attention_of(block.layer_specs[0])
    assert (first.module, first.params) == (DocumentAttention, {"kernel": "sdpa"})
    assert block.layer_specs[1].submodules.self_attention.keywords["submodules"].core_attention.module is (
        DocumentAttention
    )
    assert block.layer_specs[2].submodules.self_attention is IdentityOp
    assert core_attention_of(usual) is DOT_PRODUCT  # the original is as it was
    with pytest.raises(OptionError, match="has no self attention"):
        with_document_attention(none)


# The first step


@pytest.fixture(scope="module")
def model():
    initialize_megatron()
    return build_model(model_options(seq_length=LENGTH), 64)


CU_SEQLENS = torch.tensor([[0, 5, 9, *[LENGTH] * (LENGTH - 2)]], dtype=torch.int32)


def joined():
    boundaries, longest = CU_SEQLENS[0], 7
    return PackedSeqParams("thd", boundaries, boundaries, max_seqlen_q=longest, max_seqlen_kv=longest)


def schedule(*, forward_step_func, data_iterator, model, **_):
    """One micro-batch, as megatron-core's schedules."""
    loss = forward_step_func(data_iterator, model[0])
    loss.backward()
    return loss


def forward_step(data_iterator, model, boundaries=joined):
    next(data_iterator)
    tokens = torch.arange(LENGTH)[None]
    return model(tokens, tokens, None, labels=tokens, packed_seq_params=boundaries()).sum()


def train_once(model, step=forward_step, args=argparse.Namespace(seq_length=LENGTH), steps=1):
    """What was updated in ``steps`` training steps."""
    updated = []

    def train_step(
        forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config, forward_backward_func
    ):
        keywords = {"data_iterator": data_iterator, "model": model, "forward_only": False}
        updated.append(forward_backward_func(forward_step_func=forward_step_func, **keywords))

    watched = watch_first_step(train_step, lambda: args)
    try:
        for _ in range(steps):
            watched(step, iter([{"cu_seqlens": CU_SEQLENS}]), [model], None, None, None, schedule)
    finally:
        train_once.updated = len(updated)
    return len(updated)


def test_fault_A14_the_line_comes_from_what_the_first_step_saw(model, capsys):
    assert train_once(model, steps=2) == 2
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "best-fit packing" in line]
    expected = "attention inside documents, as the first step showed: 2 x DocumentAttention by sdpa; rotary positions"
    assert f"{expected} restart in each document; megatron_bfp " in line
    assert not any(
        hook for module in model.modules() for hook in module._forward_pre_hooks.values() if "boundary" in repr(hook)
    )


def test_fault_A14_positions_that_run_on_by_chance_are_seen_to(model, capsys):
    """megatron-core 0.16 and 0.19 take a table as long as the joined rows for one of their positions."""

    def with_long_table():
        boundaries = CU_SEQLENS[0]
        return PackedSeqParams("thd", boundaries, boundaries, max_seqlen_q=LENGTH, max_seqlen_kv=LENGTH)

    train_once(model, functools.partial(forward_step, boundaries=with_long_table))
    assert "rotary positions run on through the sequence; megatron_bfp " in capsys.readouterr().out


def shifted():
    boundaries = CU_SEQLENS[0].clone()
    boundaries[1] = 4
    return PackedSeqParams("thd", boundaries, boundaries, max_seqlen_q=LENGTH, max_seqlen_kv=LENGTH)


@pytest.mark.parametrize(
    "boundaries, message",
    [(lambda: None, "got no document boundaries"), (shifted, "got other boundaries than those of the batches")],
)
def test_fault_A01_a_schedule_that_loses_boundaries_stops_before_the_update(model, capsys, boundaries, message):
    lost = functools.partial(forward_step, boundaries=boundaries)
    with pytest.raises(IntegrationError, match=f"rank 0: decoder.layers.0.self_attention.core_attention.*{message}"):
        train_once(model, lost)
    assert train_once.updated == 0 and "attention inside documents" not in capsys.readouterr().out


def test_other_errors_are_left_alone(model):
    def broken(data_iterator, model):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train_once(model, broken)


def test_fault_A04_an_unknown_layer_is_refused_before_the_first_forward(model, monkeypatch):
    class Shift(torch.nn.Module):
        pass

    layer = model.decoder.layers[1]
    monkeypatch.setitem(layer._modules, "self_attention", Shift())
    with pytest.raises(IntegrationError, match=r"decoder.layers.1.self_attention \(Shift\) is not known"):
        train_once(model)
    assert train_once.updated == 0


def test_scripts_without_megatron_lms_options_are_left_alone(model, capsys):
    assert train_once(model, functools.partial(forward_step), args=None) == 1
    assert "best-fit packing" not in capsys.readouterr().out


def test_an_evaluation_before_the_first_backward_pass_is_not_the_first_step(model, capsys):
    """A schedule that runs forward only says nothing; the check waits for the pass that trains."""

    def one_pass(*, forward_step_func, data_iterator, model, forward_only):
        loss = forward_step_func(data_iterator, model[0])
        if not forward_only:
            loss.backward()

    watched = watch(one_pass, [model], argparse.Namespace(seq_length=LENGTH))

    def run(forward_only):
        batches = iter([{"cu_seqlens": CU_SEQLENS}])
        keywords = {"data_iterator": batches, "model": [model], "forward_only": forward_only}
        with torch.set_grad_enabled(not forward_only):
            watched(forward_step_func=forward_step, **keywords)
        return capsys.readouterr().out.count("attention inside documents, as the first step showed")

    assert [run(True), run(True), run(False), run(False)] == [0, 0, 1, 0]
