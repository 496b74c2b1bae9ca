"""Attention that never crosses a document: a core attention for megatron-core's local layer spec.

    spec = with_document_attention(get_gpt_layer_local_spec(normalization="RMSNorm"))
    model(tokens, position_ids, None, packed_seq_params=document_boundaries(cu_seqlens))

The boundaries travel as a forward argument, megatron-core's ``PackedSeqParams``, because recomputation and pipelines
run forward again later; nothing is kept in a module. In the form used here, ``qkv_format="sbhd"`` with a row of
cu_seqlens for each sample, megatron-core keeps the batch dimension and rotates by the positions 0 .. L - 1 of the whole
row, which is what training on packed sequences wants: RoPE is relative, so a document is the same at any offset.

A kernel takes query, key, value and boundaries. ``KERNELS`` names them; one is chosen when the module is made. Each
honours the boundaries: there is none that ignores them, and no L x L mask is ever made.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .errors import OptionError

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, float, float], Tensor]
"""query [s, b, heads, head size], key and value [s, b, groups, head size], cu_seqlens int32 [b, s + 1], softmax scale,
dropout probability -> [s, b, heads, head size]."""


def document_boundaries(cu_seqlens: Tensor) -> PackedSeqParams:
    """The boundaries of a micro-batch as a model's ``packed_seq_params``.

    Args:
        cu_seqlens: int32 [b, L + 1], a dataset sample's ``cu_seqlens`` for each row.
    """
    seq_length = cu_seqlens.shape[1] - 1
    # megatron-core makes its table of rotary positions max_seqlen long, and a row uses positions up to L - 1
    return PackedSeqParams(
        qkv_format="sbhd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=seq_length,
        max_seqlen_kv=seq_length,
    )


def with_document_attention(layer_spec: ModuleSpec) -> ModuleSpec:
    """A copy of a GPT layer spec whose self attention is ``DocumentAttention``."""
    spec = copy.deepcopy(layer_spec)
    spec.submodules.self_attention.submodules.core_attention = DocumentAttention
    return spec


class DocumentAttention(MegatronModule):
    """Causal attention inside each document; takes the place of megatron-core's ``DotProductAttention``.

    Args:
        config, layer_number, attn_mask_type, attention_type, attention_dropout, softmax_scale, cp_comm_type,
            pg_collection: as DotProductAttention's.

    Raises:
        OptionError: the configuration asks for something that would be ignored.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        refused = {
            "context parallelism": config.context_parallel_size > 1,
            "attention windows": config.window_size is not None,
            f"softmax type {config.softmax_type}": config.softmax_type != "vanilla",
            f"{attention_type} attention": attention_type != "self",
            f"attention mask type {attn_mask_type}": attn_mask_type
            not in (AttnMaskType.causal, AttnMaskType.padding_causal),
        }
        for what, is_on in refused.items():
            if is_on:
                raise OptionError(f"{what} cannot be used with attention inside documents")
        self.softmax_scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        # apply_query_key_layer_scaling needs nothing: it divides scores in fp16 and multiplies them back in fp32
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.kernel = choose_kernel()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: [s, b, heads, head size].
            key, value: [s, b, groups, head size].
            attention_mask, attention_bias: must be None.
            packed_seq_params: as ``document_boundaries`` makes it.

        Returns:
            [s, b, heads * head size].

        Raises:
            OptionError: there are no boundaries, or not in this form.
        """
        if packed_seq_params is None or packed_seq_params.qkv_format != "sbhd":
            raise OptionError(
                "attention inside documents needs their boundaries: pass "
                "packed_seq_params=document_boundaries(batch['cu_seqlens']) to the model"
            )
        if attention_mask is not None or attention_bias is not None:
            raise OptionError("attention inside documents takes no attention_mask or attention_bias; pass None")
        cu_seqlens = packed_seq_params.cu_seqlens_q
        seq_length, batch = query.shape[:2]
        if cu_seqlens.shape != (batch, seq_length + 1):
            raise OptionError(f"cu_seqlens has shape {list(cu_seqlens.shape)}, expected {[batch, seq_length + 1]}")
        dropout = self.dropout if self.training else 0.0
        return self.kernel(query, key, value, cu_seqlens, self.softmax_scale, dropout).flatten(2)


def sdpa_per_document(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, softmax_scale: float, dropout: float
) -> Tensor:
    """torch's ``scaled_dot_product_attention``, called for each document; on any device, and the reference in tests."""
    rows = []
    for row, boundaries in enumerate(cu_seqlens.tolist()):
        segments = [
            scaled_dot_product_attention(
                *(tensor[start:end, row].transpose(0, 1).unsqueeze(0) for tensor in (query, key, value)),
                dropout_p=dropout,
                is_causal=True,
                scale=softmax_scale,
                enable_gqa=query.shape[2] != key.shape[2],
            )
            for start, end in zip(boundaries, boundaries[1:])
            if start < end
        ]
        rows.append(torch.cat(segments, dim=2).squeeze(0).transpose(0, 1))
    return torch.stack(rows, dim=1)


KERNELS: dict[str, Kernel] = {"sdpa": sdpa_per_document}
"""By name, best first."""


def choose_kernel(name: str | None = None) -> Kernel:
    """The kernel called ``name``, or the best one.

    Raises:
        OptionError: there is none of that name.
    """
    if name is None:
        return next(iter(KERNELS.values()))
    if name not in KERNELS:
        raise OptionError(f"no attention kernel {name!r}; there are {', '.join(KERNELS)}")
    return KERNELS[name]
