"""From a sample's number to the arrays that training reads: order, tokens, labels and boundaries. numpy only."""

from .order import sequence_of_sample
from .sample import Sample, build_sample, dense_attention_mask

__all__ = ["Sample", "build_sample", "dense_attention_mask", "sequence_of_sample"]
