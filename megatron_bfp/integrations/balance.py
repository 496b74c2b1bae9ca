"""``--balance-batches``: the training split of a run, in an order in which ranks need not wait for each other.

1, the default, reorders samples inside each global batch. The batches are those that the run will train on: they begin
at its first sample, and their sizes come from a copy of Megatron's own calculator. So every global batch holds the
samples that it would hold without this, also after a resume with another batch size and while the batch size grows.

N above 1 deals the samples of N global batches to these batches by work. Blocks of N batches begin at multiples of
their size, counted from sample 0, so a resumed run continues inside a block. That needs the same sizes as before; see
``check_resume``.

What is here is the same for Megatron-LM and Megatron-DeepSpeed. Evaluation is never reordered.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ..errors import OptionError, UnsupportedMegatronError
from ..samples.balanced_dataset import BalancedDataset
from .first_samples import first_train_sample

OPTION = "--balance-batches"

OF_ONE_SIZE = ("rampup_batch_size", "step_batch_size_schedule", "phase_transition_iterations")
"""Attributes of the parsed options that blocks of several global batches do not go with: sizes would change inside a
block, or samples would be counted anew."""


@dataclass(frozen=True)
class Batches:
    """What the samples of a global batch depend on, beside the seeded order."""

    num_batches: int
    """``--balance-batches``."""
    global_batch_size: int
    """Samples per step."""
    micro_batch_size: int
    """Samples that a rank runs together."""
    data_parallel_size: int

    def __str__(self) -> str:
        return (
            f"{OPTION} {self.num_batches}, a global batch size of {self.global_batch_size:,}, a micro-batch size of "
            f"{self.micro_batch_size:,} and a data-parallel size of {self.data_parallel_size:,}"
        )

    @property
    def tile(self) -> int:
        """Samples that all ranks together work on at once."""
        return self.micro_batch_size * self.data_parallel_size

    @property
    def block(self) -> int:
        """Samples whose batches are composed together; 1 where a batch depends on no others."""
        return self.num_batches * self.global_batch_size if self.num_batches > 1 else 1


def num_batches_of(args: Any) -> int:
    """``--balance-batches`` of a run or of a checkpoint, which may be of another kind or from before the option."""
    return getattr(args, "balance_batches", 0) if getattr(args, "data_impl", None) == "bfp" else 0


def batches_of(args: Any) -> Batches:
    """The batches of a run, or of a checkpoint, of one global batch size.

    Args:
        args: the options of Megatron-LM or Megatron-DeepSpeed, validated.
    """
    # Megatron-LM's data_parallel_size leaves out the ranks that share weights to save memory
    data_parallel_size = args.data_parallel_size * getattr(args, "gtp_weight_remat_size", 1)
    tile = args.micro_batch_size * data_parallel_size
    # with --decrease-batch-size-if-needed a step takes what ranks can share; without it Megatron allows no remainder
    size = args.global_batch_size // tile * tile
    return Batches(num_batches_of(args), size, args.micro_batch_size, data_parallel_size)


def check_balance_batches(args: Any) -> None:
    """Refuse values of ``--balance-batches`` that are no number of batches, and options that do not go with it.

    Args:
        args: the options of Megatron-LM or Megatron-DeepSpeed.

    Raises:
        OptionError: there is one.
    """
    num_batches = args.balance_batches
    if isinstance(num_batches, bool) or not isinstance(num_batches, int) or num_batches < 0:
        raise OptionError(
            f"{OPTION} must be 0 (off), 1 (inside each global batch) or a number of global batches, got {num_batches!r}"
        )
    for attribute in OF_ONE_SIZE if num_batches > 1 else ():
        if getattr(args, attribute, None):
            raise OptionError(
                f"--{attribute.replace('_', '-')} cannot be used with {OPTION} {num_batches}: several global batches "
                f"are balanced together only if all have one size and samples are counted on; give {OPTION} 1"
            )


def whole_blocks(args: Any, num_samples: int) -> int:
    """The training samples to ask for, so that no block of several global batches is cut by the end of a blend.

    Otherwise a run that is extended later would compose the last block anew, after a part of it was trained on.
    """
    if num_batches_of(args) <= 1:
        return num_samples
    block = batches_of(args).block
    return math.ceil(num_samples / block) * block


def balanced(dataset: Any, args: Any, module: ModuleType) -> Any:
    """The training split in balanced order.

    Args:
        dataset: the packed dataset or the blend; None on a rank without one.
        args: the options of Megatron-LM or Megatron-DeepSpeed, validated, with the samples consumed so far.
        module: of Megatron, the one that has the run's calculator of the number of micro-batches.

    Returns:
        ``dataset`` itself if it is None, and with ``--balance-batches 0``.

    Raises:
        OptionError: the batches cannot be balanced.
        UnsupportedMegatronError: there is no calculator.
    """
    if dataset is None or not args.balance_batches:
        return dataset
    first, batches = first_train_sample(args), batches_of(args)
    micro_batch_size = batches.micro_batch_size
    if args.balance_batches == 1:
        sizes = stages(_calculator_of(module), batches.tile, first, len(dataset), args.consumed_train_samples)
        return BalancedDataset(dataset, sizes, micro_batch_size=micro_batch_size)
    if first % batches.global_batch_size:
        raise OptionError(
            f"this run begins at sample {first:,}, which is no multiple of its global batch size, "
            f"{batches.global_batch_size:,}, as {OPTION} above 1 needs; give {OPTION} 1"
        )
    return BalancedDataset(dataset, batches.global_batch_size, batches.num_batches, batches.tile, micro_batch_size)


def _calculator_of(module: ModuleType) -> Any:
    calculator = getattr(module, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", None)
    if calculator is None:
        raise UnsupportedMegatronError(
            f"{module.__name__} has no calculator of the number of micro-batches, from which {OPTION} takes the global "
            f"batch sizes; give {OPTION} 0. Supported versions are in docs/megatron.md"
        )
    return calculator


def stages(calculator: Any, tile: int, first: int, end: int, consumed: int) -> list[tuple[int, int]]:
    """The global batch sizes of a run from its first sample on, step by step as Megatron will count them.

    Cost: a call of the calculator for each step until the batch size is the final one.

    Args:
        calculator: Megatron's, of the number of micro-batches; a copy is asked.
        tile: the data-parallel size times the micro-batch size.
        first: the first sample that the run will ask its dataset for.
        end: the number of samples in the dataset.
        consumed: the samples that the calculator counts before ``first``, in all phases of training.

    Returns:
        Pairs of a stage's first sample and its global batch size.

    Raises:
        OptionError: a global batch has fewer samples than ``tile``.
    """
    calculator = copy.deepcopy(calculator)

    def size_at(sample: int) -> int:
        calculator.update(consumed + sample - first, False)
        return tile * calculator.get()

    final, sample, size = size_at(max(first, end)), first, 0
    sizes = []
    while True:
        if (now := size_at(sample)) != size:
            size = now
            sizes.append((sample, size))
        if size == final or sample >= end:
            return sizes
        if not size:
            raise OptionError(
                f"the global batch at sample {sample:,} is smaller than {tile:,}, the data-parallel size times the "
                "micro-batch size; train on fewer ranks until the batch size has grown"
            )
        sample += size


def order_in_words(dataset: Any) -> str:
    """The end of a dataset's line in the log: what its order is; empty if it is not balanced."""
    if not isinstance(dataset, BalancedDataset):
        return ""
    sizes = [size for _, size in dataset.stages]
    size = f"{sizes[0]:,}" + (f" to {sizes[-1]:,}" if len(sizes) > 1 else "")
    if dataset.num_batches == 1:
        return f", balanced inside each global batch of {size}"
    return f", balanced over every {dataset.num_batches:,} global batches of {size}"


def is_composed_by_cost(dataset: Any) -> bool:
    """Whether the samples of a global batch depend on their work."""
    return isinstance(dataset, BalancedDataset) and dataset.num_batches > 1


COMPOSED_BY_COST = (
    f"best-fit packing: train: with {OPTION} above 1, batches are composed by cost: which sequences share a global "
    "batch depends on their work in attention, not on the seed alone"
)


def check_resume(before: Batches, now: Batches, consumed: int) -> None:
    """Refuse a resume in which sequences would be lost and others shown twice.

    Which samples of a block of several global batches were seen depends on all of its sizes. So where they change, or
    balancing over several batches begins or ends, both the block of before and the block of now must begin there.

    Args:
        before: of the checkpoint.
        now: of this run.
        consumed: samples, where this run begins.

    Raises:
        OptionError: a block has begun.
    """
    block = math.lcm(before.block, now.block)
    if before == now or consumed % block == 0:
        return
    raise OptionError(
        f"this run has {now}; its checkpoint has {before}. Sample {consumed:,} is inside a block of batches that are "
        "balanced together, so sequences would be lost and others shown twice. Resume with the checkpoint's values, or "
        f"from a checkpoint at a multiple of {block:,} samples"
    )


def refuse_other_batches(check_checkpoint_args: Callable, options: Callable[[], Any]) -> Callable:
    """Megatron's ``check_checkpoint_args``, which also checks that the checkpoint's batches can be continued.

    Args:
        options: gives what Megatron parsed; None if the run is none of ours.
    """

    def check_args_and_batches(checkpoint_args: Any, *others: Any, **keywords: Any) -> Any:
        result = check_checkpoint_args(checkpoint_args, *others, **keywords)
        args = options()
        if args is not None and max(num_batches_of(checkpoint_args), num_batches_of(args)) > 1:
            check_resume(batches_of(checkpoint_args), batches_of(args), _first_sample(checkpoint_args, args))
        return result

    return check_args_and_batches


def _first_sample(checkpoint_args: Any, args: Any) -> int:
    """The first sample of a resumed run."""
    iteration = getattr(args, "override_ckpt_iteration", None)  # Megatron-LM's, to resume elsewhere
    if iteration is not None:
        return iteration * args.global_batch_size
    return getattr(checkpoint_args, "consumed_train_samples", 0)
