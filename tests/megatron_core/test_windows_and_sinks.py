"""Attention windows and sinks, as gpt-oss has them: as in megatron-core's own attention, and inside documents."""

import pytest

pytest.importorskip("megatron.core")

import torch
from helpers.megatron_helpers import initialize_megatron, model_options
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from trainer.model import transformer_config

from megatron_bfp.megatron_core.attention import DocumentAttention, document_boundaries

LENGTH = 24


def one_chunk(length):
    return torch.tensor([[0] + [length] * length], dtype=torch.int32)


@pytest.fixture
def settings(monkeypatch):
    """A configuration of a small model; megatron-core's own attention runs on the CPU."""

    class Buffer:
        def get_tensor(self, shape, dtype, name):
            return torch.empty(shape, dtype=dtype)  # the original allocates on a GPU

    def window_mask(num_queries, num_keys, window):
        before = torch.arange(num_queries)[:, None] - torch.arange(num_keys)
        return (before < 0) | (before > window[0])

    initialize_megatron()
    monkeypatch.setattr("megatron.core.parallel_state.get_global_memory_buffer", Buffer)
    monkeypatch.setattr("megatron.core.fusions.fused_softmax.get_sliding_window_causal_mask", window_mask)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    settings = transformer_config(model_options(group_query_attention=True, num_query_groups=2))
    settings.attention_softmax_in_fp32 = True
    return settings


@pytest.mark.parametrize("softmax_type", ["vanilla", "off-by-one", "learnable"])
@pytest.mark.parametrize("window, skipped, layer_number", [(None, None, 1), ((5, 0), 2, 1), ((5, 0), 2, 2)])
def test_windows_and_sinks_are_those_of_megatron_core(settings, softmax_type, window, skipped, layer_number):
    settings.softmax_type, settings.window_size, settings.window_attn_skip_freq = softmax_type, window, skipped
    arguments = (settings, layer_number, AttnMaskType.causal, "self")
    ours, theirs = DocumentAttention(*arguments), DotProductAttention(*arguments)
    theirs.load_state_dict(ours.state_dict())
    torch.manual_seed(layer_number)
    query, key, value = (torch.randn(LENGTH, 2, heads, 16) for heads in (4, 2, 2))
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
    expected = theirs(query, key, value, mask)
    boundaries = document_boundaries(one_chunk(LENGTH).expand(2, -1))
    assert torch.allclose(ours(query, key, value, None, packed_seq_params=boundaries), expected, atol=1e-5)
    settings.softmax_type, settings.window_size = "vanilla", None
    plain = DocumentAttention(*arguments)(query, key, value, None, packed_seq_params=boundaries)
    is_plain = softmax_type == "vanilla" and (window is None or layer_number == 2)
    assert torch.allclose(plain, expected, atol=1e-5) == is_plain  # the control


def test_documents_of_a_row_have_windows_and_sinks_of_their_own(settings):
    settings.softmax_type, settings.window_size = "learnable", (3, 0)
    attention = DocumentAttention(settings, 1, AttnMaskType.causal, "self")
    query, key, value = (torch.randn(LENGTH, 1, heads, 16) for heads in (4, 2, 2))
    cu_seqlens = torch.tensor([[0, 7, 8] + [LENGTH] * (LENGTH - 2)], dtype=torch.int32)
    row = attention(query, key, value, None, packed_seq_params=document_boundaries(cu_seqlens))
    row.sum().backward()
    gradient = attention.softmax_offset.grad.clone()
    attention.zero_grad()
    for start, end in [(0, 7), (7, 8), (8, LENGTH)]:
        part = [tensor[start:end] for tensor in (query, key, value)]
        alone = attention(*part, None, packed_seq_params=document_boundaries(one_chunk(end - start)))
        assert torch.allclose(row[start:end], alone, atol=1e-6)
        alone.sum().backward()
    assert torch.allclose(attention.softmax_offset.grad, gradient, atol=1e-5) and gradient.abs().min() > 1e-3
