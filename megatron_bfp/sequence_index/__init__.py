"""Sequence indexes, PREFIX.bfp/: which chunks of which documents make up each training sequence. numpy only."""

from .builder import build, open_or_build
from .key import IndexKey
from .reader import SequenceIndex
from .split import PackedSplit
from .verify import verify, verify_all

__all__ = ["IndexKey", "PackedSplit", "SequenceIndex", "build", "open_or_build", "verify", "verify_all"]
