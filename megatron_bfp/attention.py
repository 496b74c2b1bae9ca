"""Attention that never crosses a document: a core attention for megatron-core's local layer spec.

    spec = with_document_attention(get_gpt_layer_local_spec(normalization="RMSNorm"))
    model(tokens, position_ids, None, packed_seq_params=document_boundaries(cu_seqlens))

The boundaries travel as a forward argument, megatron-core's ``PackedSeqParams``, because recomputation and pipelines
run forward again later; nothing is kept in a module. In the form used here, ``qkv_format="sbhd"`` with a row of
cu_seqlens for each sample, megatron-core keeps the batch dimension and rotates by the positions 0 .. L - 1 of the whole
row, which is what training on packed sequences wants: RoPE is relative, so a document is the same at any offset.

The kernel is chosen once, when the module is made: the best of ``attention_kernels.KERNELS`` that can be used, or the
one that is asked for.
"""

import copy
from dataclasses import dataclass
from typing import Any

try:
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams
except ModuleNotFoundError as error:
    from .optional import not_installed

    raise not_installed(error, __name__) from None
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from .attention_kernels import Needs, Segments, choose_kernel, join_rows, joined_segments
from .errors import OptionError


@dataclass
class DocumentBoundaries(PackedSeqParams):
    """megatron-core's ``PackedSeqParams`` of a micro-batch whose rows are packed sequences."""

    segments: Segments | None = None
    """The documents of all rows, joined."""


def document_boundaries(cu_seqlens: Tensor, device: torch.device | str | None = None) -> DocumentBoundaries:
    """The boundaries of a micro-batch as a model's ``packed_seq_params``.

    Args:
        cu_seqlens: int32 [b, L + 1], a dataset sample's ``cu_seqlens`` for each row; best left on the host.
        device: where the model is; None for where ``cu_seqlens`` is.

    Raises:
        OptionError: a row does not rise from 0 to L.
    """
    seq_length = cu_seqlens.shape[1] - 1
    # megatron-core makes its table of rotary positions max_seqlen long, and a row uses positions up to L - 1
    return DocumentBoundaries(
        qkv_format="sbhd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=seq_length,
        max_seqlen_kv=seq_length,
        segments=join_rows(cu_seqlens, device),
    )


def with_document_attention(layer_spec: ModuleSpec, kernel: str | None = None) -> ModuleSpec:
    """A copy of a GPT layer spec whose self attention is ``DocumentAttention``.

    Args:
        kernel: a name in ``attention_kernels.KERNELS``; None for the best that can be used.
    """
    spec = copy.deepcopy(layer_spec)
    attention = ModuleSpec(module=DocumentAttention, params={"kernel": kernel})
    spec.submodules.self_attention.submodules.core_attention = attention
    return spec


class DocumentAttention(MegatronModule):
    """Causal attention inside each document; takes the place of megatron-core's ``DotProductAttention``.

    Args:
        config, layer_number, attn_mask_type, attention_type, attention_dropout, softmax_scale, cp_comm_type,
            pg_collection: as DotProductAttention's.
        kernel: a name in ``attention_kernels.KERNELS``; None for the best that can be used.

    Attributes:
        kernel_name: the kernel that was chosen.

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
        kernel: str | None = None,
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
        needs = Needs(config.params_dtype, config.kv_channels, self.dropout)
        self.kernel_name, self.attend = choose_kernel(kernel, needs)

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
            query: [s, b, heads, head size], or [t, heads, head size] with rows joined (``qkv_format="thd"``).
            key, value: the same with groups for heads.
            attention_mask, attention_bias: must be None.
            packed_seq_params: as ``document_boundaries`` makes it, or Megatron-LM's for joined rows.

        Returns:
            [s, b, heads * head size], or [t, heads * head size].

        Raises:
            OptionError: there are no boundaries, or not in this form.
        """
        if attention_mask is not None or attention_bias is not None:
            raise OptionError("attention inside documents takes no attention_mask or attention_bias; pass None")
        dropout = self.dropout if self.training else 0.0
        if packed_seq_params is not None and packed_seq_params.qkv_format == "thd":
            segments = _segments_of_joined(packed_seq_params, len(query))
            return self.attend(query, key, value, segments, self.softmax_scale, dropout).flatten(1)
        if not isinstance(packed_seq_params, DocumentBoundaries):
            raise OptionError(
                "attention inside documents needs their boundaries: pass "
                "packed_seq_params=document_boundaries(batch['cu_seqlens']) to the model"
            )
        seq_length, batch = query.shape[:2]
        if packed_seq_params.cu_seqlens_q.shape != (batch, seq_length + 1):
            shape = list(packed_seq_params.cu_seqlens_q.shape)
            raise OptionError(f"cu_seqlens has shape {shape}, expected {[batch, seq_length + 1]}")
        joined = (tensor.transpose(0, 1).flatten(0, 1) for tensor in (query, key, value))
        found = self.attend(*joined, packed_seq_params.segments, self.softmax_scale, dropout)
        return found.reshape(batch, seq_length, -1).transpose(0, 1).contiguous()


def _segments_of_joined(packed_seq_params: PackedSeqParams, num_positions: int) -> Segments:
    """The segments of Megatron-LM's boundaries, worked out in the first layer and kept with them for the others."""
    if getattr(packed_seq_params, "segments", None) is None:
        packed_seq_params.segments = joined_segments(packed_seq_params.cu_seqlens_q, num_positions)
    return packed_seq_params.segments
