"""Deterministic gated delta nets inside documents, with stand-ins for Megatron-LM's functions."""

import argparse
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch
from torch.nn.functional import silu

from megatron_bfp.integrations.megatron_lm.delta_nets import (
    accept_boundaries,
    convolution_in_documents,
    rule_in_documents,
)

BOUNDS = torch.tensor([0, 3, 4, 4, 9, 9], dtype=torch.int32)
DOCUMENTS = [(0, 3), (3, 4), (4, 9)]
DETERMINISTIC = argparse.Namespace(deterministic_mode=True)


def rule(q, k, v, g, beta, *, cu_seqlens=None, scale=1.0):
    """A state that sums up, as far as the hooks look at it."""
    assert cu_seqlens is None, "not supported"
    return (k * v * beta + g).cumsum(1) * q * scale, None


def test_the_state_of_a_deterministic_rule_begins_anew_in_each_document():
    torch.manual_seed(0)
    inputs = [torch.randn(1, 9, 2) for _ in range(5)]
    inside = rule_in_documents(rule, lambda: DETERMINISTIC)
    alone = torch.cat([rule(*(x[:, start:end] for x in inputs), scale=2.0)[0] for start, end in DOCUMENTS], dim=1)
    q, k, v, g, beta = inputs
    result, _ = inside(q=q, k=k, v=v, g=g, beta=beta, cu_seqlens=BOUNDS, scale=2.0)
    assert torch.equal(result, alone)
    assert not torch.allclose(inside(*inputs, scale=2.0)[0], alone)  # the control: one document
    with pytest.raises(AssertionError, match="not supported"):
        rule_in_documents(rule, lambda: None)(*inputs, cu_seqlens=BOUNDS)


def test_a_deterministic_convolution_begins_anew_in_each_document():
    def of_library(**keywords):
        return keywords

    torch.manual_seed(0)
    x, weight, bias = torch.randn(1, 9, 4), torch.randn(4, 3), torch.randn(4)
    keywords = {"x": x, "weight": weight, "bias": bias, "cu_seqlens": BOUNDS, "activation": "silu"}
    result, _ = convolution_in_documents(of_library, lambda: DETERMINISTIC)(**keywords)
    for start, end in DOCUMENTS:
        for position in range(start, end):
            first = max(start, position - 2)
            seen = x[0, first : position + 1] * weight[:, 2 - (position - first) :].T
            assert torch.allclose(result[0, position], silu(seen.sum(0) + bias), atol=1e-6)
    for args in (argparse.Namespace(deterministic_mode=False), None):
        assert convolution_in_documents(of_library, lambda args=args: args)(**keywords) == keywords


@pytest.mark.parametrize("args, accepts", [(DETERMINISTIC, True), (None, False)])
def test_a_layer_of_ours_accepts_boundaries_and_keeps_its_rule(args, accepts):
    def set_up(self):
        self.rule = "deterministic" if self.config.deterministic_mode else "of the library"

    config = SimpleNamespace(deterministic_mode=True)
    layer = SimpleNamespace(config=config)
    accept_boundaries(set_up, lambda: args)(layer)
    assert layer.rule == "deterministic" and config.deterministic_mode
    assert layer.config.deterministic_mode is not accepts
