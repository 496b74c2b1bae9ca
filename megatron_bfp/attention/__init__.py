"""Attention that never crosses a document, and the check that boundaries arrive. Needs torch, never Megatron.

A dataset row's ``cu_seqlens`` becomes ``boundaries.Boundaries`` once per micro-batch, which every kernel of ``kernels``
takes. ``boundary_check`` watches the first training step.

``document_boundaries`` and ``with_document_attention`` put this into megatron-core's models. They live in
``megatron_bfp.megatron_core.attention``, need megatron-core and are imported when first used.
"""

from typing import Any

from ..optional import not_installed

__all__ = ["document_boundaries", "with_document_attention"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from ..megatron_core import attention
    except ModuleNotFoundError as error:
        raise not_installed(error, f"{__name__}.{name}") from None
    return getattr(attention, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
