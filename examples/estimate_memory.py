"""Estimate the memory of a GPU that trains a recipe with ``pretrain_gpt.py``.

    python examples/estimate_memory.py examples/recipes/llama_7b_code_2k.sh --nodes 32 --gpus-per-node 8

Weights, gradients and optimizer are those of DeepSpeed's ZeRO stages, in bytes a parameter; under ZeRO 1 with bf16 the
gradients are there twice, in bf16 as autograd leaves them and in fp32 as they add up. Activations are what autograd
keeps of the layers for the backward pass, counted operation by operation in ``kept_per_token``, and the logits. All of
them are there at the end of a step's last forward pass. What CUDA, NCCL and a fragmented allocator need on top is not
in it: leave some 6 GB of a GPU free.
"""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from recipe import Layout, number, read_recipe

from megatron_bfp.command_line import Parser, run
from megatron_bfp.errors import InputError

GB, MB = 10**9, 10**6
REDUCE_BUCKET = 5 * 10**8
"""Elements of the buffer in which DeepSpeed joins gradients to reduce them (its ``reduce_bucket_size``)."""
LIVE_PARAMETERS = 10**9
"""Gathered parameters that ZeRO 3 keeps at a time (its ``stage3_max_live_parameters``)."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU."""

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """All together."""
        return self.weights + self.gradients + self.optimizer + self.activations

    def __str__(self) -> str:
        unit, name = (GB, "GB") if self.total >= GB else (MB, "MB")
        parts = ", ".join(f"{part} {value / unit:.1f}" for part, value in vars(self).items())
        return f"{self.total / unit:.1f} {name}: {parts}"


def num_parameters(recipe: Mapping[str, str]) -> int:
    """Parameters of one tensor-parallel rank."""
    layers, hidden, ffn = (number(recipe, name) for name in ("num_layers", "hidden_size", "ffn_hidden_size"))
    ranks, vocab = number(recipe, "tensor_parallel"), padded_vocab(recipe)
    matrices = layers * (4 * hidden * hidden + 3 * hidden * ffn) + 2 * vocab * hidden
    norms = (2 * layers + 1) * hidden
    return matrices // ranks + norms


def padded_vocab(recipe: Mapping[str, str]) -> int:
    """Rows of the embedding: a multiple of 128 for each tensor-parallel rank, as the trainer pads it."""
    multiple = 128 * number(recipe, "tensor_parallel")
    return -(-number(recipe, "vocab_size") // multiple) * multiple


def kept_per_token(recipe: Mapping[str, str]) -> int:
    """Elements that a layer keeps for the backward pass, for each token, without recomputation.

    Whole on each tensor-parallel rank: the inputs of both norms and of what follows each. Split between the ranks:
    query, key and value as the kernel takes them, its result, and that in the order in which the projection takes it;
    the MLP's first product, its two halves again (one after its SiLU), and what they make together. Rows of a
    micro-batch of one need no new order, but its value is a view that keeps the joint product of all three. On the CPU
    torch's norms are several operations and keep their result before its weights, and the kernel is one for each
    document.
    """
    hidden, ffn, ranks = (number(recipe, name) for name in ("hidden_size", "ffn_hidden_size", "tensor_parallel"))
    on_cpu, one_row = recipe["device"] == "cpu", number(recipe, "micro_batch_size") == 1
    whole = 6 * hidden if on_cpu else 4 * hidden
    in_attention = (7 if on_cpu else 6) if one_row else 5
    return whole + (in_attention * hidden + 5 * ffn) // ranks


def activations(recipe: Mapping[str, str]) -> int:
    """Bytes that a micro-batch keeps, its logits included."""
    width = 2 if recipe["precision"] == "bf16" else 4
    layers, hidden, vocab = number(recipe, "num_layers"), number(recipe, "hidden_size"), padded_vocab(recipe)
    tokens = number(recipe, "micro_batch_size") * number(recipe, "seq_length")
    if recipe["recompute"] == "full":  # the layers' inputs, and one layer at a time
        in_layers = layers * hidden + kept_per_token(recipe)
    else:
        in_layers = layers * kept_per_token(recipe)
    # bf16 logits, the same in fp32 where the softmax is computed in place, and their gradient; in fp32 all in one place
    logit_bytes = vocab // number(recipe, "tensor_parallel") * (8 if width == 2 else 4)
    return tokens * ((in_layers + 2 * hidden) * width + logit_bytes)


def estimate(recipe: Mapping[str, str], layout: Layout) -> Memory:
    """The memory of each GPU of a layout.

    Raises:
        InputError: the recipe lacks a variable.
    """
    missing = [name for name in ("zero_stage", "precision", "recompute", "device") if name not in recipe]
    if missing:
        raise InputError(f"the recipe has no {', '.join(missing)}")
    parameters, ranks, stage = num_parameters(recipe), layout.data_parallel, int(recipe["zero_stage"])
    in_bf16 = recipe["precision"] == "bf16"
    width = 2 if in_bf16 else 4
    share = -(-parameters // ranks)
    bucket = min(REDUCE_BUCKET, parameters) if recipe["device"] == "cpu" else REDUCE_BUCKET
    weights, gradients = width * parameters, width * parameters
    if stage == 1:
        gradients += 4 * parameters if in_bf16 else 4 * bucket
    if stage >= 2:
        gradients = width * (share + bucket)
    if stage == 3:
        weights = width * (share + min(LIVE_PARAMETERS, parameters))
    states = 8 if stage == 0 and not in_bf16 else 12  # Adam's two, and the weights in fp32
    return Memory(weights, gradients, states * (share if stage else parameters), activations(recipe))


def main() -> None:
    """Print the estimate.

    Raises:
        BFPError: the recipe cannot be used.
    """
    parser = Parser(prog="estimate_memory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", metavar="RECIPE")
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--gpus-per-node", type=int, default=8)
    options = parser.parse_args()
    recipe = read_recipe(options.recipe)
    print(estimate(recipe, Layout.of(recipe, options.nodes, options.gpus_per_node)))


if __name__ == "__main__":
    sys.exit(run(main, "estimate_memory"))
