"""Weights of a blend, checked before any of its corpora is opened."""

import math
from collections.abc import Sequence

from ..errors import OptionError


def check_weights(prefixes: Sequence[str], weights: Sequence[float]) -> None:
    """Refuse weights that Megatron's blends would end with an assertion, or take for something else.

    Args:
        prefixes: of the corpora, for the message.
        weights: one for each.

    Raises:
        OptionError: one is not a number above 0, or too small beside the others to count.
    """
    for prefix, weight in zip(prefixes, weights, strict=True):
        if not 0 < weight < math.inf:
            raise OptionError(f"a blend's weight of {weight} for {prefix}: give a number above 0, or leave it out")
    total = sum(weights)
    for prefix, weight in zip(prefixes, weights, strict=True):
        if not 0 < weight / total < math.inf:
            raise OptionError(
                f"a blend's weight of {weight} for {prefix} is 0 beside the sum of all, {total}; give weights of "
                "similar size"
            )
