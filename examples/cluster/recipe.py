"""A recipe as options of the example trainer, and how a global batch is divided over a cluster."""

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_bfp.errors import InputError, OptionError

from .options import RunOptions, run_options

EXAMPLES = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SCRIPT = r"""
examples=$1 recipe=$2 data_path=(data) TOKENIZER_MODEL=${TOKENIZER_MODEL:-tokenizer} OUTPUT=${OUTPUT:-runs}
shift 2
source "$examples/cluster/launch/functions.sh"
[[ $recipe = */* ]] || recipe=./$recipe # bash would look for it in PATH
source "$recipe" >&2
tokenizer_type=${TOKENIZER_TYPE:-$tokenizer_type}
source "$examples/cluster/launch/trainers/pretrain_gpt.sh"
printf '%s\0' "$device" "$vocab_size" "${options[@]}" "$@"
"""
"""From a recipe to the trainer's options, as in ``launch/common.sh``, without a dataset."""


@dataclass(frozen=True)
class Recipe:
    """A recipe, read in the environment of this process."""

    device: str
    """cpu or gpu."""
    vocab_size: int
    """Of the tokenizer that the recipe is made for."""
    words: tuple[str, ...]
    """The options of ``pretrain_gpt.py``."""
    options: RunOptions


def read_recipe(path: str, words: Sequence[str] = ()) -> Recipe:
    """Run a recipe in bash, as the launchers do, with the environment that they would have.

    Args:
        words: options that come after the recipe.

    Raises:
        InputError: it cannot be read.
        OptionError: the trainer would refuse the options.
    """
    command = ["bash", "-euc", SCRIPT, "recipe", EXAMPLES, path, *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise InputError(f"{path}: not a recipe: {done.stderr.strip()}")
    device, vocab_size, *options = done.stdout.split("\0")[:-1]
    return Recipe(device, vocab_size_of(vocab_size), tuple(options), run_options("pretrain_gpt", options))


def vocab_size_of(text: str) -> int:
    """A recipe's ``vocab_size``.

    Raises:
        InputError: it is not a whole number above 0.
    """
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"the recipe's vocab_size is {text!r}; give a whole number above 0")
    return int(text)


@dataclass(frozen=True)
class Layout:
    """How a global batch is divided over the GPUs of a cluster."""

    nodes: int
    gpus_per_node: int
    model_parallel: int
    """GPUs that hold one copy of the model together."""
    micro_batch_size: int
    """Sequences per GPU and forward pass."""
    global_batch_size: int
    """Sequences per step, the same for any number of nodes."""
    seq_length: int

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.gpus_per_node < 1:
            raise OptionError(f"{self.nodes} nodes of {self.gpus_per_node} GPUs: give at least one of each")
        if self.world_size % self.model_parallel:
            raise OptionError(
                f"{self.nodes} nodes of {self.gpus_per_node} GPUs: the model's size of {self.model_parallel} GPUs "
                f"(tensor_parallel, times pipeline and context parallelism) does not divide {self.world_size} GPUs"
            )
        if self.global_batch_size % (self.micro_batch_size * self.data_parallel):
            raise OptionError(
                f"{self.nodes} nodes of {self.gpus_per_node} GPUs: global_batch_size={self.global_batch_size} is not a "
                f"multiple of micro_batch_size={self.micro_batch_size} times {self.data_parallel} data-parallel ranks; "
                "take another number of nodes, or another micro_batch_size"
            )

    @classmethod
    def of(cls, options: RunOptions, nodes: int, gpus_per_node: int) -> "Layout":
        """The layout of a run.

        Raises:
            OptionError: the batch or the model cannot be divided over this cluster.
        """
        model_parallel = options.tensor_parallel * options.other_parallel
        global_batch_size = options.global_batch_size
        if global_batch_size is None:
            global_batch_size = options.micro_batch_size * max(1, nodes * gpus_per_node // model_parallel)
        micro_batch_size, seq_length = options.micro_batch_size, options.seq_length
        return cls(nodes, gpus_per_node, model_parallel, micro_batch_size, global_batch_size, seq_length)

    @property
    def world_size(self) -> int:
        """Number of GPUs."""
        return self.nodes * self.gpus_per_node

    @property
    def data_parallel(self) -> int:
        """Number of copies of the model."""
        return self.world_size // self.model_parallel

    @property
    def accumulation(self) -> int:
        """Micro-batches that a GPU runs per step."""
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a global batch."""
        return self.global_batch_size * self.seq_length
