"""The summary of a run's packed datasets that is printed when training starts."""

from typing import Any


def summary(datasets: list[Any]) -> str:
    """Indexes, sequences and padding of the datasets of a split, in words."""
    indexes = [dataset.sequence_index for dataset in datasets]
    sequences = sum(len(index) for index in indexes)
    padding = sum(index.counts["padding"] for index in indexes)
    positions = sum(len(index) * index.key.seq_length for index in indexes)
    where = indexes[0].path if len(indexes) == 1 else f"{len(indexes):,} indexes"
    built = sum(index.was_built for index in indexes)
    return (
        f"{where} ({built:,} built, {len(indexes) - built:,} opened), {sequences:,} sequences, "
        f"padding {100 * padding / max(1, positions):.3f} %"
    )


_seen: set[tuple] = set()


def is_news(datasets: list[Any]) -> bool:
    """Whether this is the first call with these datasets: with several virtual pipeline stages, a run builds the same
    ones for each."""
    key = tuple((index.path, index.key.name) for index in (dataset.sequence_index for dataset in datasets))
    if key in _seen:
        return False
    _seen.add(key)
    return True
