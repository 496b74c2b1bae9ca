"""Kernels of causal attention inside documents. They take the rows of a micro-batch joined end to end.

``attend(query, key, value, boundaries, softmax_scale, dropout)`` takes query [t, heads, head size], key and value
[t, groups, head size] and returns [t, heads, head size]; t is the positions of the micro-batch. ``KERNELS`` lists the
kernels, best first, each with a check that says why it cannot be used.

No kernel is ever used that cannot respect document boundaries, and none builds a mask of positions by positions (but
``sdpa`` of a document's, for attention windows and sinks and for the first document of a context-parallel rank that
only gathers keys).
``LIBRARIES`` is the table of what differs between the fused kernels; they share one call.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from importlib import import_module
from inspect import signature
from itertools import pairwise
from typing import Any, NamedTuple

try:
    import torch
except ModuleNotFoundError as error:
    from ..optional import not_installed

    raise not_installed(error, __name__) from None
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from ..errors import OptionError
from .boundaries import Boundaries

Attend = Callable[..., Tensor]


class Needs(NamedTuple):
    """What a model asks of a kernel."""

    dtype: torch.dtype
    head_size: int
    dropout: float
    window: int | None = None
    """Positions before its own that a query attends to; None for all of its document's."""
    sinks: bool = False
    """Whether there is a learned logit per head that takes a share of each softmax."""


class Kernel(NamedTuple):
    """One entry of ``KERNELS``."""

    attend: Attend
    unusable: Callable[[Needs], str | None]
    """Why it cannot be used here; None if it can."""


def choose_kernel(name: str | None, needs: Needs) -> tuple[str, Attend]:
    """The kernel called ``name``, or the first in ``KERNELS`` that can be used; with its name. If there are sinks, it
    takes them, [heads], as a keyword.

    Raises:
        OptionError: there is no kernel of that name, or it cannot be used here.
    """
    if name is None:
        name = next(name for name, kernel in KERNELS.items() if kernel.unusable(needs) is None)
    elif name not in KERNELS:
        raise OptionError(f"--attention-kernel {name}: there are {', '.join(KERNELS)}")
    elif reason := KERNELS[name].unusable(needs):
        raise OptionError(f"--attention-kernel {name} cannot be used: {reason}")
    attend = KERNELS[name].attend
    return name, attend if needs.window is None else partial(attend, window=needs.window)


def attend_padded(attend: Attend, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Tensor:
    """A kernel that needs one head size, for values that are smaller than keys, as in multi-latent attention."""
    size = value.shape[-1]
    return attend(query, key, pad(value, (0, key.shape[-1] - size)), *others)[..., :size]


def sdpa_per_document(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: Boundaries,
    softmax_scale: float,
    dropout: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """torch's ``scaled_dot_product_attention``, called once per document; on any device, and the reference of tests.

    Args:
        window: as in ``Needs``.
        sinks: [heads], or None.
    """
    more = 0 if sinks is None else 1  # a key whose score is the sink, and whose value is 0

    def of_chunk(tensor: Tensor, start: int, end: int, more: int = 0) -> Tensor:
        chunk = tensor[start:end].transpose(0, 1).unsqueeze(0)  # [1, heads, chunk, head size]
        return pad(chunk, (0, 0, 0, more)) if more else chunk

    def mask(num_queries: int, num_keys: int) -> dict[str, Any]:
        if num_queries == num_keys and window is None and sinks is None:
            return {"is_causal": True}
        positions = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
        positions = positions.tril(num_keys - num_queries)  # the last query sees the last key
        if window is not None:
            positions = positions.triu(num_keys - num_queries - window)
        if sinks is None:
            return {"attn_mask": positions}
        scores = torch.zeros_like(positions, dtype=query.dtype).masked_fill(~positions, -torch.inf)
        shape = len(sinks), num_queries, -1
        sink = sinks.to(query.dtype)[:, None, None].expand(*shape[:2], 1)
        return {"attn_mask": torch.cat([scores.expand(*shape), sink], dim=-1)}

    offsets, of_keys = boundaries.offsets, (boundaries.keys or boundaries).offsets
    outputs = [
        scaled_dot_product_attention(
            of_chunk(query, start, end),
            of_chunk(key, key_start, key_end, more),
            of_chunk(value, key_start, key_end, more),
            **mask(end - start, key_end - key_start),
            dropout_p=dropout,
            scale=softmax_scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        for (start, end), (key_start, key_end) in zip(pairwise(offsets), pairwise(of_keys), strict=True)
    ]
    return torch.cat(outputs, dim=2).squeeze(0).transpose(0, 1)


def _unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


@dataclass(frozen=True, kw_only=True, eq=False)
class Library:
    """What is particular about one library's attention. Its function gets query, key, value, ``cu_seqlens`` and
    ``max_seqlen`` of queries and keys, and as keywords the scale, the dropout and what makes attention causal.
    """

    module: str
    function: str
    """The module to import and the function's name in it."""
    boundary_names: tuple[str, str, str, str] | None = None
    """Keywords of the four arguments after ``value``; None to pass them by position."""
    scale_name: str = "softmax_scale"
    dropout_name: str | None = None
    """None: the kernel has no attention dropout."""
    causal: Mapping[str, Any] = field(default_factory=lambda: {"causal": True})
    """Keywords that make attention causal."""
    capabilities: range
    """Major CUDA compute capabilities that it supports."""
    adapt: Callable[[Any], Callable[..., Any]] = _unchanged
    """Turns what was imported into the function to call; raises ImportError if this release cannot be used."""

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        boundaries: Boundaries,
        softmax_scale: float,
        dropout: float,
        window: int | None = None,
    ) -> Tensor:
        """Run the kernel; arguments and result as in the module's docstring."""
        arguments: list[Any] = [query, key, value]
        keywords: dict[str, Any] = {self.scale_name: softmax_scale, **self.causal}
        if window is not None:
            keywords["window_size"] = (window, 0)
        if self.dropout_name is not None:
            keywords[self.dropout_name] = dropout
        keys = boundaries.keys or boundaries
        of_boundaries = [boundaries.cu_seqlens, keys.cu_seqlens, boundaries.max_seqlen, keys.max_seqlen]
        if self.boundary_names is None:
            arguments += of_boundaries
        else:
            keywords.update(zip(self.boundary_names, of_boundaries, strict=True))
        output = load(self)(*arguments, **keywords)
        return output[0] if isinstance(output, tuple) else output  # some releases also return the log-sum-exp

    def unusable(self, needs: Needs) -> str | None:
        """Why the kernel cannot be used here; None if it can."""
        if not torch.cuda.is_available():
            return "there is no GPU"
        if torch.cuda.get_device_capability()[0] not in self.capabilities:
            return f"it is not made for {torch.cuda.get_device_name()}"
        if needs.dtype not in (torch.float16, torch.bfloat16):
            return f"it computes in bf16 or fp16, the model in {str(needs.dtype).removeprefix('torch.')}"
        if needs.head_size % 8 or needs.head_size > 256:
            return f"it takes head sizes that are multiples of 8 up to 256, not {needs.head_size}"
        if needs.dropout and self.dropout_name is None:
            return "it has no attention dropout"
        if needs.sinks:
            return "it has no attention sinks"
        try:
            load(self)
        except (ImportError, OSError) as error:
            return f"it cannot be imported: {error}"
        return None


@lru_cache
def load(library: Library) -> Callable[..., Any]:
    """A library's function, imported once.

    Raises:
        ImportError: the library is not installed, or this release of it cannot be used.
        OSError: its compiled part cannot be loaded.
    """
    module = import_module(library.module)
    if not hasattr(module, library.function):
        raise ImportError(f"{library.module} has no {library.function}")
    return library.adapt(getattr(module, library.function))


def _final_flash_attention_4(flash_attn_varlen_func: Callable[..., Any]) -> Callable[..., Any]:
    if "max_seqlen_q" not in signature(flash_attn_varlen_func).parameters:
        raise ImportError("flash-attn 2 brings an early one without a backward pass; install flash-attn-4")
    return flash_attn_varlen_func


def _windowed_torch_varlen(varlen_attn: Callable[..., Any]) -> Callable[..., Any]:
    parameters = signature(varlen_attn).parameters
    if "window_size" not in parameters:
        raise ImportError("torch is older than 2.11")
    return partial(varlen_attn, enable_gqa=True) if "enable_gqa" in parameters else varlen_attn  # 2.11 needs no flag


def _transformer_engine_function(attention_class: type) -> Callable[..., Any]:
    """Transformer Engine has a module without parameters, whose options are fixed when it is made. One is kept for each
    shape, scale, dropout and window."""

    @lru_cache
    def module(
        heads: int,
        groups: int,
        head_size: int,
        softmax_scale: float,
        dropout: float,
        mask: str,
        window: tuple[int, int] | None,
    ) -> Callable[..., Any]:
        return attention_class(
            heads,
            head_size,
            num_gqa_groups=groups,
            attention_dropout=dropout,
            qkv_format="thd",
            attn_mask_type=mask,
            softmax_scale=softmax_scale,
            window_size=window,
        )

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        softmax_scale: float,
        dropout: float,
        window_size: tuple[int, int] | None = None,
        **boundaries: Any,
    ) -> Tensor:
        _, heads, head_size = query.shape
        mask = "padding_causal" if len(query) == len(key) else "padding_causal_bottom_right"
        attention = module(heads, key.shape[1], head_size, softmax_scale, dropout, mask, window_size)
        return attention(query, key, value, **boundaries).view(query.shape)  # from [t, heads * head size]

    return attend


LIBRARIES = {
    # flash-attn 3, built from flash-attn's hopper folder
    "flash-attn-3": Library(
        module="flash_attn_interface",
        function="flash_attn_varlen_func",
        capabilities=range(9, 10),
    ),
    # flash-attn 4 (CuTe)
    "flash-attn-4": Library(
        module="flash_attn.cute",
        function="flash_attn_varlen_func",
        boundary_names=("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
        capabilities=range(9, 11),
        adapt=_final_flash_attention_4,
    ),
    # flash-attn 2
    "flash-attn": Library(
        module="flash_attn",
        function="flash_attn_varlen_func",
        dropout_name="dropout_p",
        capabilities=range(8, 13),
    ),
    # comes with torch 2.11 and later
    "torch-varlen": Library(
        module="torch.nn.attention.varlen",
        function="varlen_attn",
        scale_name="scale",
        causal={"window_size": (-1, 0)},
        capabilities=range(8, 13),
        adapt=_windowed_torch_varlen,
    ),
    "transformer-engine": Library(
        module="transformer_engine.pytorch",
        function="DotProductAttention",
        boundary_names=("cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv"),
        dropout_name="dropout",
        causal={},  # the module is made causal
        capabilities=range(8, 13),
        adapt=_transformer_engine_function,
    ),
}
"""What differs between the libraries with fused kernels, best first."""

KERNELS: dict[str, Kernel] = {
    **{name: Kernel(library.attend, library.unusable) for name, library in LIBRARIES.items()},
    "sdpa": Kernel(sdpa_per_document, lambda needs: None),
}
"""By the name that ``--attention-kernel`` takes, best first."""
