"""Megatron's indexed datasets, PREFIX.bin and PREFIX.idx: read, write, merge and verify them. numpy only."""

from .reader import IndexedDataset
from .writer import IndexedDatasetWriter

__all__ = ["IndexedDataset", "IndexedDatasetWriter"]
