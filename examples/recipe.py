"""A recipe's variables, and the numbers that follow from them and from the size of the cluster."""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_bfp.errors import InputError, OptionError


def read_recipe(path: str) -> dict[str, str]:
    """The variables that a recipe sets; bash reads it, as it does for the launchers.

    Raises:
        InputError: it cannot be read.
    """
    command = ["bash", "-euc", 'set -a; source "$1"; env -0', "bash", path]
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": os.environ["PATH"]})
    if done.returncode:
        raise InputError(f"{path}: not a recipe: {done.stderr.strip()}")
    pairs = (entry.split("=", 1) for entry in done.stdout.split("\0") if entry)
    return {name: value for name, value in pairs if name not in ("PATH", "PWD", "OLDPWD", "SHLVL", "_")}


@dataclass(frozen=True)
class Layout:
    """How a global batch is dealt out to the GPUs of a cluster."""

    nodes: int
    gpus_per_node: int
    tensor_parallel: int
    micro_batch_size: int
    """Sequences that a GPU has at a time."""
    global_batch_size: int
    """Sequences of a step, the same for any number of nodes."""
    seq_length: int

    def __post_init__(self) -> None:
        if self.world_size % self.tensor_parallel:
            raise OptionError(
                f"{self.nodes} nodes of {self.gpus_per_node} GPUs: tensor_parallel={self.tensor_parallel} does not "
                f"divide {self.world_size} GPUs"
            )
        if self.global_batch_size % (self.micro_batch_size * self.data_parallel):
            raise OptionError(
                f"{self.nodes} nodes of {self.gpus_per_node} GPUs: global_batch_size={self.global_batch_size} is no "
                f"multiple of micro_batch_size={self.micro_batch_size} times {self.data_parallel} data-parallel ranks; "
                "take another number of nodes, or another micro_batch_size in the recipe"
            )

    @classmethod
    def of(cls, recipe: Mapping[str, str], nodes: int, gpus_per_node: int) -> "Layout":
        """The layout of a recipe.

        Raises:
            InputError: the recipe lacks a variable, or one is no number.
            OptionError: the cluster cannot be divided so.
        """
        names = ("tensor_parallel", "micro_batch_size", "global_batch_size", "seq_length")
        return cls(nodes, gpus_per_node, *(number(recipe, name) for name in names))

    @property
    def world_size(self) -> int:
        """GPUs."""
        return self.nodes * self.gpus_per_node

    @property
    def data_parallel(self) -> int:
        """Copies of the model."""
        return self.world_size // self.tensor_parallel

    @property
    def accumulation(self) -> int:
        """Micro-batches that a GPU runs for a step."""
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel)

    @property
    def tokens_a_step(self) -> int:
        """Tokens of a global batch."""
        return self.global_batch_size * self.seq_length


def number(recipe: Mapping[str, str], name: str) -> int:
    """A variable that is a whole number of at least 1.

    Raises:
        InputError: it is not.
    """
    value = recipe.get(name, "")
    if not value.isdecimal() or int(value) < 1:
        raise InputError(f"the recipe's {name} is {value or 'missing'!r}; give a whole number above 0")
    return int(value)
