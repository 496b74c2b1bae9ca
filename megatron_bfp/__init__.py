"""Best-fit Packing for Megatron: every document that fits into a training sequence stays whole.

How data flows, with the package that takes each step::

    documents (JSON Lines, Parquet)
        |  preprocessing, tokenizers
    PREFIX.bin, PREFIX.idx                     the tokens, read and written by indexed_dataset
        |  packing                             which documents share a sequence
        |  sequence_index.builder
    PREFIX.bfp/s2048-d0-969/                   the sequence index of 2,048 tokens and documents 0 to 968
        |  samples.order                       which sequence is sample i of this seed
        |  sequence_index.reader               its chunks
        |  samples.sample                      tokens, labels, loss_mask, position_ids, cu_seqlens
        |  megatron_core.gpt_dataset           BFPGPTDataset, in megatron-core's builder and blends
        |  samples.balanced_dataset            the order inside each global batch
    batches
        |  attention, megatron_core.attention  attention inside each document only
    loss

``integrations`` puts the last steps into Megatron-LM and Megatron-DeepSpeed scripts, ``inspection`` reports on datasets
and shows sequences, and ``commands`` is the command line, ``megatron-bfp``.

``megatron_bfp.pack`` and the file formats need numpy only. The dataset classes need megatron-core and torch and are
imported when first used.
"""

from ._version import __version__
from .errors import BFPError, IndexedDatasetError, InputError, IntegrationError, OptionError, SequenceIndexError
from .integrations.activation import install
from .optional import not_installed
from .packing.packed import Packing, pack
from .samples.balanced_dataset import BalancedDataset

__all__ = [
    "BFPError",
    "BFPGPTDataset",
    "BFPGPTDatasetConfig",
    "BalancedDataset",
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
