"""Megatron's ``--split``, parsed strictly: "969,30,1" to the fractions at which train, valid and test begin and end."""

import re

import numpy as np

from .errors import OptionError

SPLIT_NAMES = ("train", "valid", "test")


def split_fractions(split: str) -> list[tuple[float, float] | None]:
    """Where each split begins and ends, the same floats as megatron-core's ``split_matrix``.

    megatron-core's own parser picks whatever looks like a number out of the text, so that "-1,1,0" or "90,abc5,5" pass.

    Args:
        split: one to three numbers >= 0 with commas between, not all 0.

    Returns:
        For train, valid and test a pair of fractions, or None for a split without a share.

    Raises:
        OptionError: ``split`` is something else.
    """
    parts = [part.strip() for part in split.split(",")]
    if len(parts) > len(SPLIT_NAMES) or not all(re.fullmatch(r"\d+\.?\d*|\.\d+", part, re.ASCII) for part in parts):
        raise OptionError(f"--split {split!r}: give one to three numbers >= 0 with commas between, such as 969,30,1")
    shares = np.array([float(part) for part in parts] + [0.0] * (len(SPLIT_NAMES) - len(parts)))
    total = shares.sum()
    if not 0 < total < np.inf:
        raise OptionError(f"--split {split!r}: the numbers must add up to more than 0")
    ends = [0.0]
    for share in (shares / total).tolist():
        ends.append(ends[-1] + share)
    return [(first, end) if end > first else None for first, end in zip(ends, ends[1:])]
