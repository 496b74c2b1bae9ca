"""Kernels of causal attention inside documents. All take the rows of a micro-batch joined, documents end to end.

A kernel is a function ``attend(query, key, value, segments, softmax_scale, dropout)`` of query [t, heads, head size]
and key and value [t, groups, head size] that returns [t, heads, head size]; t is the tokens of the micro-batch.
``KERNELS`` has one entry for each library, best first, with a function that says why it cannot be used, if so. Each
honours the boundaries: there is none that ignores them, and none makes a mask of tokens by tokens.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from inspect import signature
from typing import Any, NamedTuple

try:
    import torch
except ModuleNotFoundError as error:
    from ..optional import not_installed

    raise not_installed(error, __name__) from None
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..errors import OptionError
from .boundaries import Segments

Attend = Callable[[Tensor, Tensor, Tensor, Segments, float, float], Tensor]


class Needs(NamedTuple):
    """What a model asks of a kernel."""

    dtype: torch.dtype
    head_size: int
    dropout: float


class Kernel(NamedTuple):
    """One entry of ``KERNELS``."""

    attend: Attend
    unusable: Callable[[Needs], str | None]
    """Why it cannot be used here; None if it can."""


def choose_kernel(name: str | None, needs: Needs) -> tuple[str, Attend]:
    """The kernel called ``name``, or the best one that can be used; with its name.

    Raises:
        OptionError: there is none of that name, or it cannot be used here.
    """
    if name is not None:
        if name not in KERNELS:
            raise OptionError(f"--attention-kernel {name}: there are {', '.join(KERNELS)}")
        reason = KERNELS[name].unusable(needs)
        if reason:
            raise OptionError(f"--attention-kernel {name} cannot be used: {reason}")
        return name, KERNELS[name].attend
    name = next(name for name, kernel in KERNELS.items() if kernel.unusable(needs) is None)
    return name, KERNELS[name].attend


def sdpa_per_document(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, softmax_scale: float, dropout: float
) -> Tensor:
    """torch's ``scaled_dot_product_attention``, called for each document; on any device, and the reference in tests."""
    found = [
        scaled_dot_product_attention(
            *(tensor[start:end].transpose(0, 1).unsqueeze(0) for tensor in (query, key, value)),
            dropout_p=dropout,
            is_causal=True,
            scale=softmax_scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        for start, end in zip(segments.boundaries, segments.boundaries[1:])
    ]
    return torch.cat(found, dim=2).squeeze(0).transpose(0, 1)


def torch_varlen(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, softmax_scale: float, dropout: float
) -> Tensor:
    """``torch.nn.attention.varlen``, which comes with torch (2.11 and later)."""
    return _torch_varlen()(
        query,
        key,
        value,
        segments.cu_seqlens,
        segments.cu_seqlens,
        segments.max_seqlen,
        segments.max_seqlen,
        scale=softmax_scale,
        window_size=(-1, 0),
    )


def flash_attention_2(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, softmax_scale: float, dropout: float
) -> Tensor:
    """flash-attn 2.x."""
    return _flash_attention_2()(
        query,
        key,
        value,
        segments.cu_seqlens,
        segments.cu_seqlens,
        segments.max_seqlen,
        segments.max_seqlen,
        dropout_p=dropout,
        softmax_scale=softmax_scale,
        causal=True,
    )


def flash_attention_3(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, softmax_scale: float, dropout: float
) -> Tensor:
    """flash-attn 3, built from its hopper folder."""
    found = _flash_attention_3()(
        query,
        key,
        value,
        segments.cu_seqlens,
        segments.cu_seqlens,
        segments.max_seqlen,
        segments.max_seqlen,
        softmax_scale=softmax_scale,
        causal=True,
    )
    return found[0] if isinstance(found, tuple) else found  # its first releases returned the log-sum-exp as well


def flash_attention_4(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, softmax_scale: float, dropout: float
) -> Tensor:
    """flash-attn 4 (CuTe)."""
    found = _flash_attention_4()(
        query,
        key,
        value,
        cu_seqlens_q=segments.cu_seqlens,
        cu_seqlens_k=segments.cu_seqlens,
        max_seqlen_q=segments.max_seqlen,
        max_seqlen_k=segments.max_seqlen,
        softmax_scale=softmax_scale,
        causal=True,
    )
    return found[0] if isinstance(found, tuple) else found


def transformer_engine_thd(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, softmax_scale: float, dropout: float
) -> Tensor:
    """Transformer Engine's attention on joined rows, ``qkv_format="thd"``."""
    tokens, heads, head_size = query.shape
    attention = _transformer_engine_attention(heads, key.shape[1], head_size, softmax_scale, dropout)
    found = attention(
        query,
        key,
        value,
        cu_seqlens_q=segments.cu_seqlens,
        cu_seqlens_kv=segments.cu_seqlens,
        max_seqlen_q=segments.max_seqlen,
        max_seqlen_kv=segments.max_seqlen,
    )
    return found.view(tokens, heads, head_size)


@lru_cache
def _torch_varlen() -> Callable[..., Any]:
    from torch.nn.attention.varlen import varlen_attn

    parameters = signature(varlen_attn).parameters
    if "window_size" not in parameters:
        raise ImportError("torch is older than 2.11")
    return partial(varlen_attn, enable_gqa=True) if "enable_gqa" in parameters else varlen_attn  # 2.11 needs no flag


@lru_cache
def _flash_attention_2() -> Callable[..., Any]:
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func


@lru_cache
def _flash_attention_3() -> Callable[..., Any]:
    from flash_attn_interface import flash_attn_varlen_func

    return flash_attn_varlen_func


@lru_cache
def _flash_attention_4() -> Callable[..., Any]:
    from flash_attn.cute import flash_attn_varlen_func

    if "max_seqlen_q" not in signature(flash_attn_varlen_func).parameters:
        raise ImportError("flash-attn 2 brings an early one without a backward pass; install flash-attn-4")
    return flash_attn_varlen_func


@lru_cache
def _transformer_engine() -> Any:
    from transformer_engine import pytorch

    return pytorch


@lru_cache
def _transformer_engine_attention(
    heads: int, groups: int, head_size: int, softmax_scale: float, dropout: float
) -> torch.nn.Module:
    """A module without parameters; one for each shape."""
    return _transformer_engine().DotProductAttention(
        heads,
        head_size,
        num_gqa_groups=groups,
        attention_dropout=dropout,
        qkv_format="thd",
        attn_mask_type="padding_causal",
        softmax_scale=softmax_scale,
    )


def _fused(load: Callable[[], Any], capabilities: range, has_dropout: bool) -> Callable[[Needs], str | None]:
    """``Kernel.unusable`` of a fused kernel.

    Args:
        load: imports it.
        capabilities: major CUDA compute capabilities it is made for.
        has_dropout: it can drop attention weights.
    """

    def unusable(needs: Needs) -> str | None:
        if not torch.cuda.is_available():
            return "there is no GPU"
        if torch.cuda.get_device_capability()[0] not in capabilities:
            return f"it is not made for {torch.cuda.get_device_name()}"
        if needs.dtype not in (torch.float16, torch.bfloat16):
            return f"it computes in bf16 or fp16, the model in {str(needs.dtype).removeprefix('torch.')}"
        if needs.head_size % 8 or needs.head_size > 256:
            return f"it takes head sizes that are multiples of 8 up to 256, not {needs.head_size}"
        if needs.dropout and not has_dropout:
            return "it has no attention dropout"
        try:
            load()
        except (ImportError, OSError) as error:
            return f"it cannot be imported: {error}"
        return None

    return unusable


KERNELS: dict[str, Kernel] = {
    "flash-attn-3": Kernel(flash_attention_3, _fused(_flash_attention_3, range(9, 10), False)),
    "flash-attn-4": Kernel(flash_attention_4, _fused(_flash_attention_4, range(9, 11), False)),
    "flash-attn": Kernel(flash_attention_2, _fused(_flash_attention_2, range(8, 13), True)),
    "torch-varlen": Kernel(torch_varlen, _fused(_torch_varlen, range(8, 13), False)),
    "transformer-engine": Kernel(transformer_engine_thd, _fused(_transformer_engine, range(8, 13), True)),
    "sdpa": Kernel(sdpa_per_document, lambda needs: None),
}
"""By the name that ``--attention-kernel`` takes, best first."""
