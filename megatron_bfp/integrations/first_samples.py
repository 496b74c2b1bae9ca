"""Reading the samples of a run's first batches before its first step.

Otherwise a damaged sample would be reported by a worker of one rank, in the middle of a traceback, after all other
ranks had begun to wait for it.
"""

from typing import Any

FIRST_SAMPLES = 64


def read_first_samples(dataset: Any, first: int = 0) -> None:
    """Read 64 samples from ``first`` on, or as many as there are. Every rank reads the same ones.

    Args:
        dataset: a split, or None.

    Raises:
        BFPError: a sample cannot be read, or has an id outside the model's vocabulary.
    """
    if dataset is None:
        return
    for sample in range(first, min(first + FIRST_SAMPLES, len(dataset))):
        dataset[sample]


def consumed_samples(args: Any) -> tuple[int, int, int]:
    """The first sample that the train, valid and test splits will be asked for; above 0 in a resumed run.

    Args:
        args: the options of Megatron-LM or Megatron-DeepSpeed.
    """
    return first_train_sample(args), getattr(args, "consumed_valid_samples", 0), 0


def first_train_sample(args: Any) -> int:
    """The first sample that the train split will be asked for. In Megatron-LM's phases of training, each phase counts
    the samples of its own data."""
    phases = getattr(args, "phase_transition_iterations", None)
    if not phases:
        return getattr(args, "consumed_train_samples", 0)
    begin = max(iteration for iteration in (0, *phases) if iteration <= args.iteration)
    return (args.iteration - begin) * args.global_batch_size
