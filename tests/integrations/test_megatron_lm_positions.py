"""Rotary positions of joined rows with ``--data-impl bfp``: those of the rows, in megatron-core's own models."""

import argparse
import inspect

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core.models.gpt")

import torch
from helpers.megatron_helpers import initialize_megatron
from megatron.core.fusions import fused_mla_yarn_rope_apply
from megatron.core.models.common.embeddings import rope_utils, rotary_pos_embedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import attention, multi_latent_attention
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_bfp.attention.boundary_check import BoundaryCheck
from megatron_bfp.errors import IntegrationError
from megatron_bfp.integrations.megatron_lm import options
from megatron_bfp.integrations.megatron_lm.changes import HOOKS
from megatron_bfp.integrations.megatron_lm.positions import rotate_by_rows
from megatron_bfp.megatron_core.attention import document_boundaries, with_document_attention

LENGTH, VOCAB = 16, 32
CU_SEQLENS = torch.tensor(
    [[0, 5, 9, *[LENGTH] * (LENGTH - 2)], [0, 1, 3, 10, *[LENGTH] * (LENGTH - 3)]], dtype=torch.int32
)
MLA = {"multi_latent_attention": True, "q_lora_rank": 16, "kv_lora_rank": 8}
KINDS = {
    "RoPE": {},
    "partial": {"rotary_percent": 0.5},
    "interleaved": {"rotary_interleaved": True},
    "YaRN": {"position_embedding_type": "yarn"},
    "MLA": MLA | {"rope_type": "rope"},
    "MLA with YaRN": MLA | {"rope_type": "yarn", "rotary_scaling_factor": 4.0},
}
YARN = {
    "rotary_scaling_factor": 4.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
    "correction_range_round_to_int": True,
}
ARGS = argparse.Namespace(seq_length=LENGTH, reset_position_ids=False)


@pytest.fixture
def hooked(monkeypatch):
    """Rotation as after the hooks: what importing the modules anew would give; gets other options by ``args``."""
    args = argparse.Namespace(**vars(ARGS))
    monkeypatch.setattr(options, "parsed_options", lambda: args)
    for module in (rope_utils, fused_mla_yarn_rope_apply):
        for name in [name for name in vars(module) if "rotary" in name or name.startswith("fused_")]:
            monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(rotary_pos_embedding, "_change", None, raising=False)
    HOOKS[rope_utils.__name__](rope_utils)
    HOOKS[fused_mla_yarn_rope_apply.__name__](fused_mla_yarn_rope_apply)
    for module in (attention, multi_latent_attention, rotary_pos_embedding):
        monkeypatch.setattr(module, "apply_rotary_pos_emb", rope_utils.apply_rotary_pos_emb)
    embedding = rotary_pos_embedding.RotaryEmbedding
    for name in ("get_emb", "get_rotary_seq_len"):
        monkeypatch.setattr(embedding, name, getattr(embedding, name))
    HOOKS[rotary_pos_embedding.__name__](rotary_pos_embedding)
    return args


def make_model(monkeypatch, position_embedding_type="rope", rotary_percent=1.0, **changes):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")  # where angles are
    monkeypatch.setattr(multi_latent_attention, "HAVE_TE", False)  # true in 0.16 even where it is not installed
    initialize_megatron()
    torch.manual_seed(3)
    config_class = MLATransformerConfig if "multi_latent_attention" in changes else TransformerConfig
    if config_class is MLATransformerConfig:
        changes |= {"qk_head_dim": 8, "qk_pos_emb_head_dim": 8, "v_head_dim": 8}
    config = config_class(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=2,
        normalization="RMSNorm",
        add_bias_linear=False,
        use_cpu_initialization=True,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **changes,
    )
    for name, value in YARN.items():  # Megatron-LM gives them to the configuration in the same way
        setattr(config, f"yarn_{name}", value)
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", multi_latent_attention="multi_latent_attention" in changes)
    return GPTModel(
        config,
        with_document_attention(spec, kernel="sdpa"),
        VOCAB,
        LENGTH,
        position_embedding_type=position_embedding_type,
        rotary_percent=rotary_percent,
    )


def joined(cu_seqlens=CU_SEQLENS):
    """As Megatron-LM joins rows."""
    offsets = LENGTH * torch.arange(len(cu_seqlens), dtype=torch.int32)[:, None]
    flat = torch.unique_consecutive((cu_seqlens + offsets).flatten())
    longest = int(flat.diff().max())
    return PackedSeqParams("thd", flat, flat, max_seqlen_q=longest, max_seqlen_kv=longest)


def run(model, is_joined):
    """Logits by rows, what attention got as queries and keys, and what was seen of positions."""
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH) % VOCAB
    positions = torch.arange(LENGTH).expand(2, LENGTH)
    boundaries = document_boundaries(CU_SEQLENS)
    if is_joined:
        tokens, positions, boundaries = tokens.view(1, -1), positions.reshape(1, -1), joined()
    got = []
    core = model.decoder.layers[0].self_attention.core_attention
    handle = core.register_forward_pre_hook(lambda _, arguments: got.extend(arguments[:2]))
    check = BoundaryCheck([model], row_length=LENGTH if is_joined else None)
    logits = model(tokens, positions, None, packed_seq_params=boundaries)
    handle.remove()
    by_rows = [tensor if is_joined else tensor.transpose(0, 1).flatten(0, 1) for tensor in got]
    return logits.view(2, LENGTH, -1), by_rows, check.conclude().split("; ")[1]


@pytest.mark.parametrize("kind", KINDS)
def test_joined_rows_are_rotated_as_rows_that_are_not_joined(hooked, monkeypatch, kind):
    model = make_model(monkeypatch, **KINDS[kind])
    (logits, expected, text), (joined_logits, got, joined_text) = run(model, False), run(model, True)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    assert torch.allclose(joined_logits, logits, atol=1e-5)
    assert text == joined_text and text.endswith("rotary positions run on through the sequence")


@pytest.mark.parametrize("kind", KINDS)
def test_control_without_the_hook_positions_restart_and_are_seen_to(monkeypatch, kind):
    model = make_model(monkeypatch, **KINDS[kind])
    (_, expected, text), (_, got, joined_text) = run(model, False), run(model, True)
    assert not any(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    assert text.endswith("run on through the sequence")
    assert joined_text.endswith("rotary positions restart in each document")
