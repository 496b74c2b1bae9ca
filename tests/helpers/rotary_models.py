"""Small models of megatron-core with rotary positions of each kind, run on rows that are joined and that are not."""

import argparse

import torch
from megatron.core.fusions import fused_mla_yarn_rope_apply
from megatron.core.models.common.embeddings import rope_utils, rotary_pos_embedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import attention, multi_latent_attention
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from helpers.megatron_helpers import initialize_megatron
from megatron_bfp.attention.boundary_check import BoundaryCheck
from megatron_bfp.integrations.megatron_lm import options
from megatron_bfp.integrations.megatron_lm.changes import HOOKS
from megatron_bfp.megatron_core.attention import DocumentAttention, document_boundaries, with_document_attention

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


def hook_rotations(monkeypatch):
    """Change what rotates as importing its modules with the hooks would; returns the options that the hooks read."""
    args = argparse.Namespace(seq_length=LENGTH, reset_position_ids=False)
    monkeypatch.setattr(options, "parsed_options", lambda: args)
    for module in (rope_utils, fused_mla_yarn_rope_apply):
        for name in [name for name in vars(module) if "rotary" in name or name.startswith("fused_")]:
            monkeypatch.setattr(module, name, getattr(module, name))
    HOOKS[rope_utils.__name__](rope_utils)
    HOOKS[fused_mla_yarn_rope_apply.__name__](fused_mla_yarn_rope_apply)
    for module in (attention, multi_latent_attention, rotary_pos_embedding):
        monkeypatch.setattr(module, "apply_rotary_pos_emb", rope_utils.apply_rotary_pos_emb)
    for name in ("fused_apply_mla_rope_for_q", "fused_apply_mla_rope_for_kv"):
        monkeypatch.setattr(multi_latent_attention, name, getattr(fused_mla_yarn_rope_apply, name))
    embedding = rotary_pos_embedding.RotaryEmbedding
    for name in ("get_emb", "get_rotary_seq_len"):
        monkeypatch.setattr(embedding, name, getattr(embedding, name))
    HOOKS[rotary_pos_embedding.__name__](rotary_pos_embedding)
    return args


def make_model(monkeypatch, kind, size=32, transformer_engine=False, fused=False, later_tokens=False):
    """A model of one layer: on the CPU in fp32, or of Transformer Engine's layers on a GPU in bf16.

    ``later_tokens`` adds a layer that predicts the token after the next.
    """
    changes = dict(KINDS[kind])
    model_options = {
        name: changes.pop(name) for name in ("position_embedding_type", "rotary_percent") if name in changes
    }
    is_multi_latent = "multi_latent_attention" in changes
    if is_multi_latent:
        changes |= {"qk_head_dim": size // 4, "qk_pos_emb_head_dim": size // 4, "v_head_dim": size // 2}
    if not transformer_engine:
        monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")  # where angles are
        monkeypatch.setattr(multi_latent_attention, "HAVE_TE", False)  # true in 0.16 even where it is not installed
    initialize_megatron()
    torch.manual_seed(3)
    config = (MLATransformerConfig if is_multi_latent else TransformerConfig)(
        num_layers=1,
        hidden_size=size,
        num_attention_heads=2,
        normalization="RMSNorm",
        add_bias_linear=False,
        use_cpu_initialization=not transformer_engine,
        apply_rope_fusion=fused,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=transformer_engine,
        params_dtype=torch.bfloat16 if transformer_engine else torch.float32,
        **changes,
    )
    for name, value in YARN.items():  # Megatron-LM gives them to the configuration in the same way
        setattr(config, f"yarn_{name}", value)
    if transformer_engine:
        spec = get_gpt_layer_with_transformer_engine_spec(multi_latent_attention=is_multi_latent)
    else:
        spec = get_gpt_layer_local_spec(normalization="RMSNorm", multi_latent_attention=is_multi_latent)
        spec = with_document_attention(spec, kernel="sdpa")
    if later_tokens:
        config.mtp_num_layers, config.mtp_loss_scaling_factor = 1, 0.1
        model_options["mtp_block_spec"] = get_gpt_mtp_block_spec(config, spec, transformer_engine)
    model = GPTModel(config, spec, VOCAB, LENGTH, **({"position_embedding_type": "rope"} | model_options))
    return model.bfloat16().cuda() if transformer_engine else model


def joined(cu_seqlens=CU_SEQLENS, device=None):
    """As Megatron-LM joins rows."""
    offsets = LENGTH * torch.arange(len(cu_seqlens), dtype=torch.int32)[:, None]
    flat = torch.unique_consecutive((cu_seqlens + offsets).flatten()).to(device)
    longest = int(flat.diff().max())
    return PackedSeqParams("thd", flat, flat, max_seqlen_q=longest, max_seqlen_kv=longest)


def run(model, is_joined):
    """Logits by rows, what attention got as queries and keys, and what was seen of positions.

    Transformer Engine's attention crosses documents in rows that are not joined; what it gets is right all the same.
    """
    device = next(model.parameters()).device
    tokens = torch.arange(2 * LENGTH, device=device).view(2, LENGTH) % VOCAB
    positions = torch.arange(LENGTH, device=device).expand(2, LENGTH)
    core = model.decoder.layers[0].self_attention.core_attention
    boundaries = document_boundaries(CU_SEQLENS) if isinstance(core, DocumentAttention) else None
    if is_joined:
        tokens, positions, boundaries = tokens.view(1, -1), positions.reshape(1, -1), joined(device=device)
    got = []
    handle = core.register_forward_pre_hook(lambda _, arguments: got.extend(arguments[:2]))
    check = BoundaryCheck([model], row_length=LENGTH if is_joined else None)
    logits = model(tokens, positions, None, packed_seq_params=boundaries)
    handle.remove()
    by_rows = [tensor if is_joined else tensor.transpose(0, 1).flatten(0, 1) for tensor in got]
    text = check.conclude().split("; ")[1] if boundaries else ""
    check.remove()
    return logits.view(2, LENGTH, -1), by_rows, text
