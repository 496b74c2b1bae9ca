"""Sequence indexes, PREFIX.bfp/: which chunks of which documents make up each training sequence. numpy only."""

from .key import IndexKey
from .reader import SequenceIndex

__all__ = ["IndexKey", "SequenceIndex"]
