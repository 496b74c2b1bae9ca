"""Megatron-LM's options with ``--data-impl bfp``: ours are added, ``option_table`` says which are refused, and a few
are set."""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ...arguments import checked_seq_length
from ...console import say
from ...errors import OptionError, UnsupportedMegatronError
from ...samples.blends import check_weights
from ..balance import check_balance_batches
from ..hooks import check_hooks
from ..option_table import refusals as refused_by
from ..option_table import remarks
from ..packing_options import add_packing_options
from ..refusals import rank
from .option_table import OPTIONS

FIM_RATE = 0.5
"""Megatron-LM's default of --fim-rate, for its own --fim-data."""

OLDEST = "megatron-core 0.19"


def add_options(add_data_args: Callable) -> Callable:
    """Megatron-LM's ``_add_data_args``, which also declares our options."""

    def add_data_args_and_ours(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = add_data_args(parser)
        group = parser.add_argument_group(title="best-fit packing")
        group.add_argument(
            "--data-impl",
            choices=["mmap", "bfp"],
            default="mmap",
            help="bfp: best-fit packed documents, attention inside documents; mmap: Megatron's own samples",
        )
        add_packing_options(group)
        parser.set_defaults(fim_rate=None)  # so that packing sees whether it was given
        return parser

    return add_data_args_and_ours


def check_options(validate_args: Callable, hooked: Iterable[str]) -> Callable:
    """Megatron-LM's ``validate_args``, with our checks before and after it.

    Args:
        hooked: modules that must have been changed by then, or will be when they are imported.
    """

    def check_and_validate_args(args: argparse.Namespace, defaults: dict[str, Any] = {}) -> Any:  # noqa: B006
        if args.data_impl != "bfp":
            if getattr(args, "fim_rate", FIM_RATE) is None:
                args.fim_rate = FIM_RATE
            return validate_args(args, defaults)
        check(args)
        check_hooks(hooked)
        args.dataloader_inter_document_masking = True
        result = validate_args(args, defaults)
        check(args)  # by now, old spellings are copied and defaults set
        if rank() == 0:
            for line in remarks(OPTIONS, args):
                say(line)
        return result

    return check_and_validate_args


def check(args: argparse.Namespace) -> None:
    """Refuse options that do not work with packed samples.

    Args:
        args: Megatron-LM's options, before or after they were validated.

    Raises:
        UnsupportedMegatronError: this Megatron-LM is too old.
        OptionError: an option does not work with packed samples.
    """
    if not hasattr(args, "dataloader_inter_document_masking"):
        raise UnsupportedMegatronError(
            "this Megatron-LM has no --dataloader-inter-document-masking, which --data-impl bfp needs; "
            f"use {OLDEST} or later"
        )
    for error in refusals(args):
        raise error


def refusals(args: argparse.Namespace) -> Iterator[OptionError]:
    """Everything for which ``check`` would stop a run of a Megatron-LM that is not too old: wrong values, and what
    ``option_table`` refuses."""
    return refused_by(OPTIONS, args, (_check_seq_length, _check_split_rows, check_balance_batches, _check_data_paths))


def _check_seq_length(args: argparse.Namespace) -> None:
    if getattr(args, "seq_length", None) is not None:
        checked_seq_length("--seq-length", args.seq_length)


def _check_split_rows(args: argparse.Namespace) -> None:
    if (getattr(args, "context_parallel_size", 1) or 1) > 1:
        check_context_parallelism(args)


WITH_CONTEXT_PARALLELISM = {
    "mtp_num_layers": ("--mtp-num-layers", "later tokens are looked up inside a rank's share of the row"),
    "reset_position_ids": (
        "--reset-position-ids",
        "Megatron-LM restarts rotary positions over several ranks only if documents are aligned to them; leave it out, "
        "losses are the same",
    ),
}
"""Attribute of the parsed options -> the option and why it cannot be used with context parallelism."""


ALIGNED_LAYERS = {"G": "gated delta nets", "D": "layers of DeepSeek's sparse attention"}
"""Symbol in a hybrid pattern -> layers that take boundaries over several ranks if documents are aligned to them."""


def check_context_parallelism(args: argparse.Namespace) -> None:
    """Refuse what does not work with ``--context-parallel-size`` above 1.

    Raises:
        OptionError: an option does not work with it.
    """
    size = args.context_parallel_size
    for attribute, (option, reason) in WITH_CONTEXT_PARALLELISM.items():
        if getattr(args, attribute, None):
            raise OptionError(f"{option} cannot be used with --data-impl bfp and --context-parallel-size: {reason}")
    for attribute in ("hybrid_layer_pattern", "hybrid_override_pattern"):
        others = sorted(set(getattr(args, attribute, None) or "") & ALIGNED_LAYERS.keys())
        if others:
            raise OptionError(
                f"--{attribute.replace('_', '-')} with {others[0]} cannot be used with --data-impl bfp and "
                f"--context-parallel-size: {ALIGNED_LAYERS[others[0]]} expect each document to be split over ranks"
            )
    kinds = getattr(args, "cp_comm_type", None) or ["p2p"]
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        if kind not in ("p2p", "a2a", "a2a+p2p", "all_gather"):
            raise OptionError(
                f"--cp-comm-type {kind} cannot be used with --data-impl bfp: leave it out, or give a2a or all_gather"
            )
    if (getattr(args, "seq_length", None) or 0) % (2 * size):
        raise OptionError(
            f"--seq-length {args.seq_length} must be a multiple of {2 * size}, twice --context-parallel-size: "
            "Megatron-LM cuts sequences into that many pieces"
        )


def _check_data_paths(args: argparse.Namespace) -> None:
    for attribute in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        _check_data_path(f"--{attribute.replace('_', '-')}", getattr(args, attribute, None) or [])


def _check_data_path(option: str, values: list[str]) -> None:
    """Refuse a blend that would fail an assertion of Megatron-LM later.

    Raises:
        OptionError: weights and prefixes do not alternate, or a weight is not above 0.
    """
    weights = list(map(_as_number, values[::2]))
    if len(values) % 2 or all(weight is None for weight in weights):
        return  # prefixes alone
    if None in weights:
        wrong = values[2 * weights.index(None)]
        raise OptionError(f"{option}: {wrong} stands where a weight is expected; give one before each prefix, or none")
    check_weights(values[1::2], [weight for weight in weights if weight is not None])


def _as_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def parsed_options() -> argparse.Namespace | None:
    """The options that Megatron-LM trains with; None in a script that uses megatron-core without them.

    Raises:
        OptionError: they did not come from the command line, or one does not work with packed samples.
    """
    if "megatron.training.global_vars" not in sys.modules:
        return None
    args = sys.modules["megatron.training.global_vars"].get_args()
    if getattr(args, "data_impl", None) != "bfp" or not getattr(args, "dataloader_inter_document_masking", False):
        raise OptionError(
            "--data-impl bfp is on the command line but not among the options Megatron-LM trains with (--yaml-cfg "
            "replaces them); give all options on the command line"
        )
    check(args)  # again: they may have been set or changed without validate_args
    return args
