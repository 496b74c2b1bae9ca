"""Megatron-DeepSpeed's options with ``--data-impl bfp``: ours are added, ``option_table`` says which are refused, and
one is set."""

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from ...arguments import checked_seq_length
from ...console import say
from ...errors import OptionError, UnsupportedMegatronError
from ...samples.blends import check_weights
from ..balance import check_balance_batches
from ..data_impl import data_impls
from ..fill_in_the_middle import add_fim_options
from ..hooks import check_hooks
from ..option_table import refusals as refused_by
from ..option_table import remarks
from ..packing_options import add_packing_options
from ..refusals import rank
from .option_conditions import fuses_softmax
from .option_table import OPTIONS

FUSION_IS_OFF = (
    "best-fit packing: --no-masked-softmax-fusion was added: the fused softmax ignores document boundaries. "
    "--use-flash-attn-v2 is faster and needs less memory"
)


def add_options(add_data_args: Callable) -> Callable:
    """Megatron-DeepSpeed's ``_add_data_args``, with one more choice for ``--data-impl`` and our other options."""

    def add_data_args_and_ours(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = add_data_args(parser)
        data_impl = next((action for action in parser._actions if "--data-impl" in action.option_strings), None)
        if data_impl is None:
            raise UnsupportedMegatronError("this Megatron-DeepSpeed has no --data-impl")
        data_impl.choices = [*(data_impl.choices or []), "bfp"]
        group = parser.add_argument_group(title="best-fit packing")
        add_packing_options(group)
        add_fim_options(group)
        return parser

    return add_data_args_and_ours


def check_options(validate_args: Callable, hooked: Iterable[str]) -> Callable:
    """Megatron-DeepSpeed's ``validate_args``, with our checks after it.

    Args:
        hooked: modules that must have been changed by then, or will be when they are imported.
    """

    def validate_and_check_args(args: argparse.Namespace, defaults: dict[str, Any] = {}) -> Any:  # noqa: B006
        prefer_packing(args)
        args = validate_args(args, defaults)
        if fuses_softmax(args):
            args.masked_softmax_fusion = False
            _say_once(FUSION_IS_OFF)
        check(args)
        check_data_paths(args, most_corpora())
        check_hooks(hooked)
        for line in remarks(OPTIONS, args):
            _say_once(line)
        return args

    return validate_and_check_args


def prefer_packing(args: argparse.Namespace) -> None:
    """Let ``--data-impl bfp`` win over other values, of which the parser keeps the last: they name the format of the
    .bin/.idx, as all of Megatron-DeepSpeed's scripts do."""
    others = sorted(set(data_impls(sys.argv)) - {"bfp"})
    if others:
        args.data_impl = "bfp"
        _say_once(f"best-fit packing: --data-impl bfp is used, not --data-impl {others[0]}, which is there too")


def _say_once(line: str) -> None:
    """Say it on rank 0, before torch.distributed is there."""
    if rank() == 0:
        say(line)


def check(args: argparse.Namespace) -> None:
    """Refuse options that do not work with packed samples.

    Args:
        args: Megatron-DeepSpeed's options, validated.

    Raises:
        OptionError: an option does not work with packed samples.
    """
    for error in refusals(args):
        raise error


def refusals(args: argparse.Namespace) -> Iterator[OptionError]:
    """Everything for which ``check`` would stop a run: wrong values, and what ``option_table`` refuses."""
    return refused_by(OPTIONS, args, (_check_seq_length, check_balance_batches))


def _check_seq_length(args: argparse.Namespace) -> None:
    if getattr(args, "seq_length", None) is not None:
        checked_seq_length("--seq-length", args.seq_length)


def most_corpora() -> int | None:
    """The most corpora that this Megatron-DeepSpeed can blend, read from its source: an assertion, or else the dtype of
    corpus numbers. None if the source has neither."""
    from megatron.data.blendable_dataset import BlendableDataset

    source = inspect.getsource(BlendableDataset)
    asserted = re.search(r"assert num_datasets < (\d+)", source)
    if asserted:
        return int(asserted[1]) - 1
    dtype = re.search(r"dataset_index = np\.zeros\(self\.size, dtype=np\.(u?int\d+)\)", source)
    return int(np.iinfo(dtype[1]).max) if dtype else None


def check_data_paths(args: argparse.Namespace, most: int | None) -> None:
    """Refuse blends that would fail an assertion of Megatron-DeepSpeed after the model was made.

    Args:
        args: Megatron-DeepSpeed's options.
        most: the limit on corpora in a blend; None for no limit.

    Raises:
        OptionError: a blend has too many corpora, a weight that is not above 0, or no weight for one of them.
    """
    for attribute in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        option, values = f"--{attribute.replace('_', '-')}", getattr(args, attribute, None) or []
        if len(values) < 2:
            continue
        try:
            weights = list(map(float, values[::2]))
        except ValueError:
            weights = []
        if len(values) % 2 or not weights:
            raise OptionError(f"{option} {' '.join(values[:4])} ...: give one prefix, or a weight before each prefix")
        if most is not None and len(weights) > most:
            raise OptionError(
                f"{option}: a blend of {len(weights):,} corpora; Megatron-DeepSpeed blends {most:,} at most. Join some "
                "of them with megatron-bfp merge"
            )
        check_weights(values[1::2], weights)


def parsed_options() -> argparse.Namespace:
    """The options that Megatron-DeepSpeed trains with."""
    from megatron import get_args

    return get_args()
