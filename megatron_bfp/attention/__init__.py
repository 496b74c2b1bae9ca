"""Attention that never crosses a document: boundaries, kernels, and the check that boundaries arrive. torch only.

``document_boundaries`` and ``with_document_attention`` put it into megatron-core's models; they need megatron-core and
are imported when first used.
"""

from ..optional import not_installed

__all__ = ["document_boundaries", "with_document_attention"]


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from ..megatron_core import attention
    except ModuleNotFoundError as error:
        raise not_installed(error, f"{__name__}.{name}") from None
    return getattr(attention, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
