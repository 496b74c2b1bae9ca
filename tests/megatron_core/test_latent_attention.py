"""Multi-latent attention with boundaries that keep the batch dimension."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core.models.gpt")

import torch
from helpers.megatron_helpers import initialize_megatron
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.transformer_config import MLATransformerConfig

from megatron_bfp.megatron_core.attention import document_boundaries, with_document_attention

LENGTH, VOCAB_SIZE = 24, 64
ON_CPU = {"use_cpu_initialization": True, "apply_rope_fusion": False, "gradient_accumulation_fusion": False}
ON_CPU |= {"persist_layer_norm": False, "masked_softmax_fusion": False, "bias_dropout_fusion": False}


@pytest.fixture(scope="module")
def model():
    initialize_megatron()
    torch.manual_seed(5)
    heads = {"qk_head_dim": 8, "qk_pos_emb_head_dim": 8, "v_head_dim": 8, "q_lora_rank": 16, "kv_lora_rank": 16}
    shape = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "init_method_std": 0.1}
    config = MLATransformerConfig(**shape, **heads, **ON_CPU, rope_type="rope", normalization="RMSNorm")
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", multi_latent_attention=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: "cpu")
        if not isinstance(getattr(multi_latent_attention, "TELinear", None), type):
            patch.setattr(multi_latent_attention, "TELinear", torch.nn.Identity, raising=False)
        made = GPTModel(config, with_document_attention(spec), VOCAB_SIZE, LENGTH, position_embedding_type="rope")
        yield made.eval()


def logits(model, tokens, *ends):
    cu_seqlens = torch.full((len(tokens), LENGTH + 1), LENGTH, dtype=torch.int32)
    cu_seqlens[:, 0] = 0
    for row, end in zip(cu_seqlens, ends, strict=True):
        row[1] = end
    positions = torch.arange(tokens.shape[1])[None]
    with torch.no_grad():
        return model(tokens, positions, None, packed_seq_params=document_boundaries(cu_seqlens))


def test_a_single_row_is_computed_as_one_of_several(model):
    tokens = torch.randint(0, VOCAB_SIZE, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    together = logits(model, tokens, 9, LENGTH)
    assert logits(model, tokens[:1], 9) == pytest.approx(together[:1], abs=1e-6)
    assert float((logits(model, tokens[:1], 10) - together[:1]).abs().max()) > 1e-2  # the control: other documents


def test_megatron_core_would_drop_the_dimension_of_a_single_row(model, monkeypatch):
    attention = multi_latent_attention.MLASelfAttention
    original = attention.get_query_key_value_tensors.__wrapped__
    monkeypatch.setattr(attention, "get_query_key_value_tensors", original)
    with pytest.raises((RuntimeError, TypeError)):
        logits(model, torch.zeros(1, LENGTH, dtype=torch.int64), 9)
