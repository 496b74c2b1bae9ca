"""Megatron's indexed datasets, PREFIX.bin and PREFIX.idx: read, write, merge and verify them. numpy only."""

from .merging import merge
from .reader import DocumentLengths, IndexedDataset
from .verify import verify_tokens
from .writer import IndexedDatasetWriter

__all__ = ["DocumentLengths", "IndexedDataset", "IndexedDatasetWriter", "merge", "verify_tokens"]
