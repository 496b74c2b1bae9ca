"""Attention that never crosses a document: a core attention for megatron-core's local layer spec.

    spec = with_document_attention(get_gpt_layer_local_spec(normalization="RMSNorm"))
    model(tokens, position_ids, None, packed_seq_params=document_boundaries(cu_seqlens))

If the model also predicts later tokens (``mtp_num_layers``), labels are shifted inside documents.

The boundaries travel as a forward argument, megatron-core's ``PackedSeqParams``, because recomputation and pipelines
run forward again later; nothing is kept in a module. They have the form ``qkv_format="sbhd"`` with a row of cu_seqlens
for each sample. In this form megatron-core keeps the batch dimension and rotates by the positions 0 .. L - 1 of the
whole row. That is right for packed sequences: RoPE is relative, so a document is the same at any offset.

The kernel is chosen once, when the module is made: the one that was asked for, or the first of
``attention.kernels.KERNELS`` that can be used.
"""

import contextlib
import copy
import dataclasses
import functools
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

try:
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.packed_seq_params import PackedSeqParams
except ModuleNotFoundError as error:
    from ..optional import not_installed

    raise not_installed(error, __name__) from None
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor
from torch.nn import Parameter

from ..attention.boundaries import Boundaries
from ..attention.context_parallel import Shards, gather, ulysses
from ..attention.kernels import Needs, attend_padded, choose_kernel
from ..errors import OptionError
from .boundaries_of_rows import CAN_PREDICT_LATER_TOKENS, DocumentBoundaries


def document_boundaries(cu_seqlens: Tensor, device: torch.device | str | None = None) -> DocumentBoundaries:
    """The boundaries of a micro-batch as a model's ``packed_seq_params``.

    Args:
        cu_seqlens: int32 [b, L + 1], a dataset sample's ``cu_seqlens`` for each row; best left on the host.
        device: where the model is; None for where ``cu_seqlens`` is.

    Raises:
        InvalidBoundaries: a row does not rise from 0 to L.
    """
    seq_length = cu_seqlens.shape[1] - 1
    # megatron-core makes its table of rotary positions max_seqlen long, and a row uses positions up to L - 1
    return DocumentBoundaries(
        qkv_format="sbhd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=seq_length,
        max_seqlen_kv=seq_length,
        joined=Boundaries.of_rows(cu_seqlens, device),
    )


def with_document_attention(layer_spec: Any, kernel: str | None = None) -> Any:
    """A copy of a spec whose self attention is ``DocumentAttention``, in every layer that it describes.

    Args:
        layer_spec: of a GPT layer, of a block of layers, or of a stack of several kinds of layers.
        kernel: a name in ``attention.kernels.KERNELS``; None for the first that can be used.

    Raises:
        OptionError: a layer mixes positions by something other than dot-product attention, as gated delta nets and
            state space layers do, and would not get the boundaries; or there is no attention at all.
    """
    spec, count = replace_attention(layer_spec, kernel)
    if not count:
        raise OptionError("the layer spec has no self attention that attention inside documents could replace")
    return spec


def replace_attention(layer_spec: Any, kernel: str | None = None) -> tuple[Any, int]:
    """``with_document_attention``, and how many attentions were replaced, which may be none.

    Args:
        kernel: None also leaves the choice of a spec that names ``DocumentAttention`` already.
    """
    spec = copy.deepcopy(layer_spec)
    return spec, _replace_core_attention(spec, ModuleSpec(module=DocumentAttention, params={"kernel": kernel}))


MIXERS = ("self_attention", "cross_attention", "mixer")
"""Fields of a layer's submodules that mix positions."""

DOT_PRODUCT_ATTENTION = ("DotProductAttention", "TEDotProductAttention", "DocumentAttention", "NoneType")
"""What ``DocumentAttention`` can replace. Sparse and other variants are a different model."""


def _replace_core_attention(spec: Any, attention: ModuleSpec) -> int:
    """Replace every ``core_attention`` of a spec by ``attention``; returns how many there were.

    Raises:
        OptionError: as ``with_document_attention``.
    """
    if isinstance(spec, list | tuple):
        return sum(_replace_core_attention(part, attention) for part in spec)
    if isinstance(spec, dict):
        return sum(_replace_core_attention(part, attention) for part in spec.values())
    submodules = _submodules_of(spec)
    if submodules is None:
        return 0
    count = 0
    for name, part in list(vars(submodules).items()):
        if name == "core_attention":
            if _name_of(part) not in DOT_PRODUCT_ATTENTION:
                raise OptionError(
                    f"{_name_of(part)} cannot be replaced by attention inside documents: it is a different model"
                )
            if _name_of(part) != "DocumentAttention" or attention.params["kernel"] is not None:
                submodules.core_attention = attention
            count += 1
        elif name in MIXERS:
            replaced = 0 if name == "cross_attention" else _replace_core_attention(part, attention)
            if not replaced and not re.search("Identity|Linear", _name_of(part)):
                raise OptionError(
                    f"the layer spec's {name} is {_name_of(part)}, which has no core attention to replace; it would "
                    "mix one document with the next"
                )
            count += replaced
        else:
            count += _replace_core_attention(part, attention)
    return count


def _submodules_of(spec: Any) -> Any:
    """The dataclass of parts in a spec: that of a ModuleSpec or of a builder, or the spec itself; None if none."""
    if isinstance(spec, functools.partial):
        return spec.keywords.get("submodules")
    if isinstance(spec, ModuleSpec):
        return spec.submodules
    return spec if dataclasses.is_dataclass(spec) and not isinstance(spec, type) else None


def _name_of(spec: Any) -> str:
    """The class that a spec, a builder or a path names."""
    if isinstance(spec, functools.partial):
        spec = spec.func
    module = spec.module if isinstance(spec, ModuleSpec) else spec
    if isinstance(module, tuple):
        return str(module[-1])
    name = getattr(module, "__qualname__", type(module).__name__)
    return name.rpartition("<locals>.")[2].split(".")[0]


WAYS_TO_SPLIT = {None: None, "p2p": None, "a2a+p2p": None, "a2a": "ulysses", "all_gather": "gather"}
"""``--cp-comm-type`` -> how attention works with context parallelism; None: by heads if possible. ``p2p``, Megatron's
default, is a ring, which cannot follow boundaries. ``a2a+p2p`` is a ring of groups, in a hierarchy; here the group of
all context-parallel ranks exchanges at once, which computes the same."""


def way_to_split(config: TransformerConfig, name: str | None) -> Callable[..., Tensor]:
    """``ulysses`` or ``gather``.

    Args:
        name: of one of them; None for the first if the heads can be divided.

    Raises:
        OptionError: the heads cannot be divided, and ``ulysses`` was asked for.
    """
    heads = config.num_attention_heads // config.tensor_model_parallel_size
    divides = heads % config.context_parallel_size == 0
    if name == "ulysses" and not divides:
        raise OptionError(
            f"{heads} attention heads per tensor-parallel rank cannot be divided among "
            f"{config.context_parallel_size} context-parallel ranks; leave out the choice, and keys are gathered"
        )
    return ulysses if name == "ulysses" or name is None and divides else gather


def window_of(config: TransformerConfig, layer_number: int) -> int | None:
    """Positions before its own that a query of this layer attends to; None for all of its document's."""
    if not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return None
    before, _ = config.window_size
    return None if before < 0 else before


class DocumentAttention(MegatronModule):
    """Causal attention inside each document; takes the place of megatron-core's ``DotProductAttention``.

    Args:
        config, layer_number, attn_mask_type, attention_type, attention_dropout, softmax_scale, cp_comm_type,
            pg_collection: as DotProductAttention's.
        kernel: a name in ``attention.kernels.KERNELS``; None for the first that can be used.
        context_parallel: ``ulysses`` or ``gather``, how attention works if rows are split over a context-parallel
            group; see ``attention.context_parallel``. None: as ``cp_comm_type`` says, or else by heads if the group
            divides them.
        k_channels, v_channels: head sizes of keys and values in multi-latent attention; None for the model's. If
            values are smaller, they are padded for kernels that need one head size.

    Attributes:
        kernel_name: the kernel that was chosen.

    Raises:
        OptionError: the configuration asks for something that this attention would ignore.
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
        context_parallel: str | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
    ) -> None:
        super().__init__(config=config)
        refused = {
            f"--cp-comm-type {cp_comm_type}": config.context_parallel_size > 1 and cp_comm_type not in WAYS_TO_SPLIT,
            "multi-token prediction with context parallelism": bool(getattr(config, "mtp_num_layers", None))
            and config.context_parallel_size > 1,
            f"softmax type {config.softmax_type} with context parallelism": config.softmax_type != "vanilla"
            and config.context_parallel_size > 1,
            f"{attention_type} attention": attention_type != "self",
            "clipping or logging of attention logits": getattr(config, "qk_clip", False)
            or getattr(config, "log_max_attention_logit", False),
            "attention in fp8": getattr(config, "fp8_dot_product_attention", False)
            or getattr(config, "fp8_multi_head_attention", False),
            "multi-token prediction of this megatron-core": bool(getattr(config, "mtp_num_layers", None))
            and not CAN_PREDICT_LATER_TOKENS,
            f"attention mask type {attn_mask_type}": attn_mask_type
            not in (AttnMaskType.causal, AttnMaskType.padding_causal),
        }
        for what, is_on in refused.items():
            if is_on:
                raise OptionError(f"{what} cannot be used with attention inside documents")
        head_size = k_channels or config.kv_channels
        size_of_values = v_channels or head_size
        if kernel is None and size_of_values > head_size:
            kernel = "sdpa"  # the others need one head size, and keys cannot be padded
        self.softmax_scale = head_size**-0.5 if softmax_scale is None else softmax_scale
        # apply_query_key_layer_scaling needs nothing: it divides scores in fp16 and multiplies them back in fp32
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        sinks = config.softmax_type != "vanilla"
        needs = Needs(config.params_dtype, head_size, self.dropout, window_of(config, layer_number), sinks)
        self.kernel_name, self.attend = choose_kernel(kernel, needs)
        if size_of_values < head_size and self.kernel_name != "sdpa":
            self.attend = functools.partial(attend_padded, self.attend)
        self._make_sinks(pg_collection)
        self.split: Callable[..., Tensor] | None = None
        if config.context_parallel_size > 1:
            self.split = way_to_split(config, context_parallel or WAYS_TO_SPLIT[cp_comm_type])
            of_collection = getattr(pg_collection, "cp", None)
            self.group = of_collection or parallel_state.get_context_parallel_group()

    def _make_sinks(self, pg_collection: Any) -> None:
        """``softmax_offset``, [heads of this rank], as DotProductAttention's; None unless it is learned."""
        self.tp_group = getattr(pg_collection, "tp", None) or parallel_state.get_tensor_model_parallel_group(False)
        self.softmax_offset = None
        if self.config.softmax_type == "learnable":
            heads = self.config.num_attention_heads // self.config.tensor_model_parallel_size
            device = "cpu" if self.config.use_cpu_initialization else torch.cuda.current_device()
            self.softmax_offset = Parameter(torch.empty(heads, dtype=self.config.params_dtype, device=device))
            if self.config.perform_initialization:
                self.config.init_method(self.softmax_offset)

    def sharded_state_dict(self, *arguments: Any, **keywords: Any) -> dict[str, Any]:
        """As DotProductAttention's: learned sinks are split as heads are; nothing else is stored."""
        owner = MegatronModule if self.softmax_offset is None else DotProductAttention
        return owner.sharded_state_dict(self, *arguments, **keywords)

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
            query: [s, b, heads, head size], or [t, heads, head size] with rows joined (``qkv_format="thd"``). With
                context parallelism, s is this rank's share of each row, cut by zigzag as Megatron does.
            key, value: the same with groups for heads.
            attention_mask, attention_bias: must be None.
            packed_seq_params: as ``document_boundaries`` makes it, or Megatron-LM's for joined rows.

        Returns:
            [s, b, heads * head size], or [t, heads * head size].

        Raises:
            OptionError: there are no boundaries, or not in one of these forms.
        """
        if attention_mask is not None or attention_bias is not None:
            raise OptionError("attention inside documents takes no attention_mask or attention_bias; pass None")
        dropout = self.dropout if self.training else 0.0
        if packed_seq_params is not None and packed_seq_params.qkv_format == "thd":
            if self.split:
                raise OptionError("context parallelism needs boundaries by rows: pass document_boundaries(cu_seqlens)")
            boundaries = _of_joined_rows(packed_seq_params, len(query))
            return self._attend(query, key, value, boundaries, dropout).flatten(1)
        if not isinstance(packed_seq_params, DocumentBoundaries):
            raise OptionError(
                "attention inside documents needs their boundaries: pass "
                "packed_seq_params=document_boundaries(batch['cu_seqlens']) to the model"
            )
        positions, batch = query.shape[:2]
        seq_length = positions * self.config.context_parallel_size
        if packed_seq_params.cu_seqlens_q.shape != (batch, seq_length + 1):
            shape = list(packed_seq_params.cu_seqlens_q.shape)
            raise OptionError(f"cu_seqlens has shape {shape}, expected {[batch, seq_length + 1]}")
        query, key, value = (tensor.transpose(0, 1).flatten(0, 1) for tensor in (query, key, value))
        shards = Shards(self.config.context_parallel_size, batch, seq_length) if self.split else None
        attended = self._attend(query, key, value, packed_seq_params.joined, dropout, shards)
        return attended.reshape(batch, positions, -1).transpose(0, 1).contiguous()

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        boundaries: Boundaries,
        dropout: float,
        shards: Shards | None = None,
    ) -> Tensor:
        """Run the kernel on joined rows, or on this rank's share of them."""
        with self._random_numbers(dropout):
            if self.config.softmax_type != "vanilla":
                sinks = query.new_zeros(query.shape[1]) if self.softmax_offset is None else self.softmax_offset
                return self.attend(query, key, value, boundaries, self.softmax_scale, dropout, sinks=sinks)
            if self.split is None:
                return self.attend(query, key, value, boundaries, self.softmax_scale, dropout)
            of_group = boundaries, shards, self.group
            return self.split(query, key, value, *of_group, self.attend, self.softmax_scale, dropout)

    def _random_numbers(self, dropout: float) -> AbstractContextManager:
        """As in DotProductAttention: tensor-parallel ranks have different heads, and drop different weights. With
        sequence parallelism the whole layer already uses random numbers of its own rank."""
        if dropout and not self.config.sequence_parallel:
            return tensor_parallel.get_cuda_rng_tracker().fork()
        return contextlib.nullcontext()


def _of_joined_rows(packed_seq_params: Any, num_positions: int) -> Boundaries:
    """The boundaries of Megatron-LM's joined rows, made in the first layer and kept with them for the others."""
    if getattr(packed_seq_params, "joined", None) is None:
        packed_seq_params.joined = Boundaries.of_joined_rows(packed_seq_params.cu_seqlens_q, num_positions)
    return packed_seq_params.joined
