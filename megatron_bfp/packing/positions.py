"""How many positions of training sequences each document takes: what is packed in place of its tokens.

A position is an input. Nothing is learned from a document's last token as an input, as nothing follows it, and no other
token sees it. With *targets only* it takes no position: a document of n tokens takes n - 1, and every input has a
target.
"""

from typing import Any

import numpy as np


class TargetLengths:
    """Lengths of documents without their last tokens; slices are computed when they are read.

    Args:
        lengths: integers [documents], tokens; anything with a length whose slices are numpy arrays.
    """

    def __init__(self, lengths: Any) -> None:
        self._lengths = lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, documents: slice) -> np.ndarray:
        """One less than each length, and 0 for an empty document, in the dtype of the lengths."""
        lengths = self._lengths[documents]
        return lengths - (lengths > 0)


def positions_of(lengths: Any, targets_only: bool) -> Any:
    """The positions that each document takes, to be packed as lengths."""
    return TargetLengths(lengths) if targets_only else lengths
