"""Best-fit Packing for Megatron: documents to training sequences without needless cuts.

The way of the data, with the module that takes each step::

    raw documents --preprocessing--> PREFIX.bin/.idx --packing, index_building--> PREFIX.bfp/s2048-d0-969/
        --shuffle, sequence_index--> chunks of a sample --samples--> tokens, labels, loss_mask, cu_seqlens, ...
        --gpt_dataset--> BFPGPTDataset in megatron-core's builder --attention--> loss of every document alone

``megatron_bfp.pack`` and the file formats need numpy alone. The dataset classes need megatron-core and torch and are
imported when first used.
"""

from ._version import __version__
from .errors import BFPError, IndexedDatasetError, InputError, IntegrationError, OptionError, SequenceIndexError
from .integrations.activation import install
from .optional import not_installed
from .packing.packed import Packing, pack

__all__ = [
    "BFPError",
    "BFPGPTDataset",
    "BFPGPTDatasetConfig",
    "IndexedDatasetError",
    "InputError",
    "IntegrationError",
    "OptionError",
    "Packing",
    "SequenceIndexError",
    "__version__",
    "install",
    "pack",
]


_LAZY = {"BFPGPTDataset", "BFPGPTDatasetConfig"}


def __getattr__(name: str):
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from .megatron_core import gpt_dataset
    except ModuleNotFoundError as error:
        raise not_installed(error, f"megatron_bfp.{name}") from None
    return getattr(gpt_dataset, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
