"""Print what a recipe comes to on a cluster: how the global batch is dealt out, steps, epochs, memory.

The launchers run it first, so that a recipe that does not divide is refused before anything starts.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping

import numpy as np
from data_path import blend
from estimate_memory import GB, estimate
from recipe import Layout, number, read_recipe

from megatron_bfp.command_line import Parser, run
from megatron_bfp.errors import BFPError, OptionError
from megatron_bfp.index_format import IndexKey, document_range, index_directory
from megatron_bfp.indexed_dataset import IndexedDataset
from megatron_bfp.splits import split_fractions

ROOM = 79 * GB
"""Of an A100-80GB, what is left beside CUDA, NCCL and a fragmented allocator."""


def main() -> None:
    """Print the numbers.

    Raises:
        BFPError: the recipe cannot be used on this cluster.
    """
    parser = Parser(prog="plan_run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", metavar="RECIPE")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--gpus-per-node", type=int, required=True)
    parser.add_argument("--data-path", nargs="+", required=True)
    options = parser.parse_args()
    recipe = read_recipe(options.recipe)
    layout = Layout.of(recipe, options.nodes, options.gpus_per_node)
    rows = list(numbers(options.recipe, recipe, layout))
    rows += [("epoch", text) for text in epochs(recipe, layout, options.data_path)]
    for name, text in rows:
        print(f"{name:<30}{text}")


def numbers(path: str, recipe: Mapping[str, str], layout: Layout) -> Iterator[tuple[str, str]]:
    """Names and values of what follows from the recipe and the cluster alone."""
    iterations, warmup = number(recipe, "train_iters"), number(recipe, "lr_warmup_iters")
    tokens = layout.tokens_a_step
    yield "recipe", os.path.splitext(os.path.basename(path))[0]
    yield "GPUs", f"{layout.nodes} x {layout.gpus_per_node} = {layout.world_size}"
    yield "tensor parallel", f"{layout.tensor_parallel}"
    yield "data parallel", f"{layout.data_parallel}"
    yield "micro-batch size", f"{layout.micro_batch_size}"
    yield "gradient accumulation steps", f"{layout.accumulation}"
    yield "tokens a step", f"{tokens:,} in {layout.global_batch_size:,} sequences"
    yield "steps", f"{iterations:,}, {iterations * tokens / 1e9:,.1f} B tokens"
    yield "warm-up steps", f"{warmup:,}, {warmup * tokens / 1e9:,.1f} B tokens"
    memory = estimate(recipe, layout)
    yield "memory of a GPU, estimated", str(memory)
    if recipe["device"] == "gpu" and memory.total > ROOM:
        yield "", "MORE THAN AN A100-80GB HAS: take more nodes, or more tensor_parallel or recompute=full in the recipe"


def epochs(recipe: Mapping[str, str], layout: Layout, data_path: list[str]) -> Iterator[str]:
    """A line for each dataset: steps until it was seen once, and how often it is seen; or why that is not known."""
    samples = number(recipe, "train_iters") * layout.global_batch_size
    prefixes, weights = blend(data_path)
    try:
        sequences = [training_sequences(prefix, recipe) for prefix in prefixes]
    except BFPError as error:
        yield f"not known yet: {error}"
        return
    shares = np.array(weights or sequences) / sum(weights or sequences)
    for prefix, number_of_sequences, share in zip(prefixes, sequences, shares):
        steps = number_of_sequences / (share * layout.global_batch_size)
        seen = samples * share / number_of_sequences
        yield f"{steps:,.1f} steps for the {number_of_sequences:,} sequences of {prefix}, seen {seen:.2f} times"


def training_sequences(prefix: str, recipe: Mapping[str, str]) -> int:
    """Sequences of a dataset's training split.

    Raises:
        BFPError: the dataset or its sequence index is not there.
    """
    dataset = IndexedDataset(prefix, needs_bin=False)
    fractions = split_fractions(recipe["split"])[0]
    if fractions is None:
        raise OptionError(f"--split {recipe['split']}: the train split is empty")
    first, end = document_range(fractions, dataset.num_documents)
    seq_length = number(recipe, "seq_length")
    if recipe["data_impl"] == "mmap":
        (start, _), (_, stop) = dataset.spans(np.array([first, end - 1]))
        return (stop - start - 1) // seq_length
    key = IndexKey(seq_length, first, end)
    path = os.path.join(index_directory(prefix), key.name, "index.json")
    try:
        with open(path, encoding="ascii") as file:
            return json.load(file)["counts"]["sequences"]
    except (OSError, ValueError, KeyError):
        raise OptionError(f"no sequence index {os.path.dirname(path)}") from None


if __name__ == "__main__":
    sys.exit(run(main, "plan_run"))
