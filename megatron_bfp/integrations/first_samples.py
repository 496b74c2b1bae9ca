"""Reading the samples of a run's first batches before its first step.

What is wrong with a sample would otherwise be told by a worker of one rank, after all the others had begun to wait for
it, in the middle of a traceback.
"""

from typing import Any

FIRST_SAMPLES = 64


def read_first_samples(dataset: Any, first: int = 0) -> None:
    """Read the samples from ``first`` on, 64 of them or as many as there are. Every rank reads the same.

    Args:
        dataset: a split, or None.

    Raises:
        BFPError: one cannot be read, or has an id outside the model's vocabulary.
    """
    if dataset is None:
        return
    for sample in range(first, min(first + FIRST_SAMPLES, len(dataset))):
        dataset[sample]
