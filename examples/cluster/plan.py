"""Print the plan of a run on a cluster: how the global batch is divided, steps, epochs, memory.

The launchers run it first, with the options that the trainer will get. A batch that cannot be divided over the nodes,
or an option that the trainer would refuse, stops the launch before anything starts.
"""

import argparse
import os
from collections.abc import Iterator

import numpy as np
from trainer.arguments import blend

from megatron_bfp.commands.shared import Parser
from megatron_bfp.console import run
from megatron_bfp.errors import BFPError, OptionError
from megatron_bfp.indexed_dataset.reader import IndexedDataset
from megatron_bfp.sequence_index.key import document_range, split_fractions

from .indexes import open_split
from .layout import Layout
from .memory import GB, Model, estimate
from .options import RunOptions, run_options, trainer_and_words
from .recipe import vocab_size_of

ROOM = 79 * GB
"""What CUDA, NCCL and a fragmented allocator leave of an A100-80GB."""
MOST_EPOCHS = 4
"""Up to this many epochs, repeated data is nearly as good as new data (Muennighoff et al., 2023)."""


def main() -> None:
    """Print the numbers.

    Raises:
        BFPError: the run is not possible on this cluster.
    """
    parser = Parser(
        prog="plan_run",
        description=__doc__.partition("\n\n")[0],
        allow_abbrev=False,  # of the trainer's options neither
    )
    parser.add_argument("name", metavar="NAME", help="of the run: its recipe")
    parser.add_argument("--nodes", type=int, required=True, metavar="N", help="nodes of the cluster (required)")
    parser.add_argument("--gpus-per-node", type=int, required=True, metavar="N", help="GPUs of each (required)")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="gpu", help="default: %(default)s")
    parser.add_argument(
        "--vocab-size", required=True, metavar="N", help="of the tokenizer, for the memory estimate (required)"
    )
    parser.add_argument(
        "--trainer",
        nargs=argparse.REMAINDER,
        required=True,
        metavar="NAME OPTIONS",
        help="the trainer's name and all its options; give it last (required)",
    )
    arguments = parser.parse_args()
    options = run_options(*trainer_and_words(arguments.trainer))
    layout = Layout.of(options, arguments.nodes, arguments.gpus_per_node)
    model = Model(options, vocab_size_of(arguments.vocab_size), arguments.device == "cpu")
    rows = [("recipe", os.path.splitext(os.path.basename(arguments.name))[0])]
    rows += [*numbers(layout, options), *memory(model, layout), *epochs(options, layout)]
    for name, text in rows:
        print(f"{name:<30}{text}")


def numbers(layout: Layout, options: RunOptions) -> Iterator[tuple[str, str]]:
    """Names and values that follow from the options and the cluster alone."""
    tokens = layout.tokens_per_step
    yield "GPUs", f"{layout.nodes} x {layout.gpus_per_node} = {layout.world_size}"
    yield "tensor parallel", f"{options.tensor_parallel}"
    if options.context_parallel > 1:
        yield "context parallel", f"{options.context_parallel}"
    if options.pipeline_parallel > 1:
        yield "pipeline parallel", f"{options.pipeline_parallel}"
    yield "data parallel", f"{layout.data_parallel}"
    yield "micro-batch size", f"{layout.micro_batch_size}"
    yield "gradient accumulation steps", f"{layout.accumulation}"
    yield "tokens per step", f"{tokens:,} in {layout.global_batch_size:,} sequences"
    if options.batch_size_grows:
        yield "", "with --rampup-batch-size the first steps have fewer, and the numbers below are too high"
    if options.data_impl == "bfp" and options.balance_batches > 1:
        yield "batches", f"composed by cost, {options.balance_batches} at a time (--balance-batches)"
    yield "steps", f"{options.train_iters:,}, {options.train_iters * tokens / 1e9:,.1f} B tokens"
    yield "warm-up steps", f"{options.lr_warmup_iters:,}, {options.lr_warmup_iters * tokens / 1e9:,.1f} B tokens"


def memory(model: Model, layout: Layout) -> Iterator[tuple[str, str]]:
    """The memory that a GPU needs, and a warning if it has less."""
    name = "memory of a GPU, estimated"
    try:
        estimated = estimate(model, layout)
    except OptionError as error:
        yield name, str(error)
        return
    yield name, str(estimated)
    if not model.on_cpu and estimated.total > ROOM:
        yield "", "MORE THAN AN A100-80GB HAS: take more nodes, or more tensor_parallel or recompute=full in the recipe"


def epochs(options: RunOptions, layout: Layout) -> Iterator[tuple[str, str]]:
    """For each dataset, the steps of an epoch and how often it is seen; or why that is unknown."""
    samples = options.train_iters * layout.global_batch_size
    prefixes, weights = blend(options.data_path)
    try:
        sequences = [training_sequences(prefix, options) for prefix in prefixes]
    except BFPError as error:
        yield "epoch", f"not known yet: {error}"
        return
    if weights is None and len(prefixes) > 1 and samples > sum(sequences):
        yield "", "MORE THAN ONE EPOCH of a blend without weights, which Megatron cannot train: give each a weight"
    shares = np.array(weights or sequences) / sum(weights or sequences)
    for prefix, number_of_sequences, share in zip(prefixes, sequences, shares.tolist(), strict=True):
        steps = number_of_sequences / (share * layout.global_batch_size)
        seen = samples * share / number_of_sequences
        seen_times = f"seen {seen:,.2f} times"
        yield "epoch", f"{steps:,.1f} steps for the {number_of_sequences:,} sequences of {prefix}, {seen_times}"
        if seen > MOST_EPOCHS:
            yield "", f"MORE THAN {MOST_EPOCHS} EPOCHS of {prefix}: take fewer steps, or more data"


def training_sequences(prefix: str, options: RunOptions) -> int:
    """Sequences of a dataset's training split.

    Raises:
        BFPError: the dataset or its sequence index is missing, or the split has no tokens.
    """
    dataset = IndexedDataset(prefix, needs_bin=False)
    if options.data_impl == "mmap":
        count = _concatenated_sequences(dataset, options)
    else:
        packed_split = open_split(options, dataset, "train")
        count = len(packed_split) if packed_split else 0
    if count < 1:
        raise OptionError(f"--split {options.split}: the train split of {prefix} has no sequence")
    return count


def _concatenated_sequences(dataset: IndexedDataset, options: RunOptions) -> int:
    """As GPTDataset counts them: it splits the idx sequences, and the last label needs one more token."""
    fractions = split_fractions(options.split)[0]
    first, end = document_range(fractions or (0.0, 0.0), dataset.num_sequences)
    if first == end:
        return 0
    stop = int(dataset.sequence_pointers[end - 1]) // dataset.dtype.itemsize + int(dataset.sequence_lengths[end - 1])
    tokens = stop - int(dataset.sequence_pointers[first]) // dataset.dtype.itemsize
    return (tokens - 1) // options.seq_length


def console() -> int:
    """Run the command; returns its exit status."""
    return run(main, "plan_run")
