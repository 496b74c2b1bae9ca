"""``--spec layer_spec packed``: Megatron-LM's local layers with attention inside documents, by the CPU's kernel.

For runs without ``--data-impl bfp``, whose local layers have Megatron-LM's own attention, which needs a GPU, and for
bf16, where a kernel would be chosen that needs one.
"""

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from torch import nn

from megatron_bfp.megatron_core.attention import DocumentAttention, document_boundaries, with_document_attention


def packed(config):
    """The spec of a layer."""
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        normalization="RMSNorm",
        multi_latent_attention=config.multi_latent_attention,
    )
    return with_document_attention(spec, kernel="sdpa")


class TEDotProductAttention(nn.Module):
    """Attention of joined rows, and over whole rows where no boundaries come, as Transformer Engine's."""

    def __init__(self, *arguments, **keywords):
        super().__init__()
        self.inside_documents = DocumentAttention(*arguments, **keywords)

    def forward(self, query, *rest, packed_seq_params=None, **keywords):
        if packed_seq_params is None:
            length, rows = query.shape[:2]
            one_each = torch.tensor([[0] + [length] * length] * rows, dtype=torch.int32)
            packed_seq_params = document_boundaries(one_each)
        return self.inside_documents(query, *rest, packed_seq_params=packed_seq_params, **keywords)


def like_transformer_engine(config):
    """``packed``, with an attention that does not stop where boundaries are lost."""
    spec = packed(config)
    spec.submodules.self_attention.submodules.core_attention.module = TEDotProductAttention
    return spec
