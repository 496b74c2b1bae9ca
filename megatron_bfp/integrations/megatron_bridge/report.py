"""What rank 0 prints about packed data before training."""

from argparse import Namespace
from typing import Any

from torch import distributed

from ...console import say
from ..balance import COMPOSED_BY_COST, is_composed_by_cost, order_in_words
from ..summary import is_news, summary


def sum_up(splits: list[Any], run: Namespace) -> None:
    """Print one line on rank 0 for each split: indexes, sequences, padding; and one on the loss.

    Args:
        splits: train, valid and test, None for one without samples.
        run: what the order of samples depends on.
    """
    parts = [_parts(split) for split in splits]
    if not is_news(sum(parts, [])) or distributed.is_initialized() and distributed.get_rank() != 0:
        return
    for name, split, of_split in zip(("train", "valid", "test"), splits, parts, strict=True):
        if of_split:
            say(f"best-fit packing: {name}: {summary(of_split)}{order_in_words(split)}")
        if is_composed_by_cost(split):
            say(COMPOSED_BY_COST)
    if not run.is_per_token:
        say(
            "best-fit packing: the number of targets differs between micro-batches; with "
            "model.calculate_per_token_loss each target counts the same"
        )


def _parts(split: Any) -> list[Any]:
    """The packed datasets of a split from which samples are drawn."""
    return [part for part in getattr(split, "datasets", [split]) if getattr(part, "sequence_index", None)]
