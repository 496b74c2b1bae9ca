"""A recipe as options of the example trainer, read by bash as the launchers read it; or a TOML file of options."""

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_bfp.errors import InputError

from .options import RunOptions, run_options
from .settings import read_settings

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
    """Run a recipe in bash, as the launchers do, with the environment that they would have; or read a TOML file.

    Args:
        words: options that come after the recipe.

    Raises:
        InputError: it cannot be read.
        OptionError: the trainer would refuse the options.
    """
    if path.endswith(".toml"):
        settings, words = read_settings(path), ("--config", path, *words)
        vocab_size = vocab_size_of(settings.get("vocab_size", ""))
        return Recipe(settings.get("device", "gpu"), vocab_size, words, run_options("pretrain_gpt", words))
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
