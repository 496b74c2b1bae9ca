"""Sequence indexes, PREFIX.bfp/: which chunks of which documents make up each training sequence. numpy only.

from megatron_bfp.indexed_dataset import IndexedDataset
from megatron_bfp.sequence_index import PackedSplit

train = PackedSplit.open(IndexedDataset("data"), seq_length=2048, split="969,30,1")  # built if it is missing
train.chunk_spans(sample=0, seed=1234)
"""

from .builder import build, open_or_build
from .key import IndexKey
from .reader import SequenceIndex
from .split import PackedSplit

__all__ = ["IndexKey", "PackedSplit", "SequenceIndex", "build", "open_or_build"]
