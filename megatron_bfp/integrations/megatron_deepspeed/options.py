"""Megatron-DeepSpeed's options with ``--data-impl bfp``: which are added, and which are refused."""

import argparse
import inspect
import json
import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ...arguments import checked_seq_length
from ...errors import OptionError, UnsupportedMegatronError
from ...samples.blends import check_weights
from ..balance import check_balance_batches
from ..fill_in_the_middle import add_fim_options
from ..hooks import check_hooks
from ..packing_options import add_packing_options

_OF_ANOTHER_KIND = "it is for samples of another kind; leave it out"

REFUSED = {
    "use_flash_attn_triton": ("--use-flash-attn-triton", "its kernel takes no boundaries; use --use-flash-attn-v2"),
    "use_flash_attn_builder": ("--use-flash-attn-builder", "its kernel takes no boundaries; use --use-flash-attn-v2"),
    "ds_sequence_parallel_fpdt": (
        "--ds-sequence-parallel-fpdt",
        "its attention takes no boundaries; use --ds-sequence-parallel-size alone, with --use-flash-attn-v2",
    ),
    "retro_add_retriever": ("--retro-add-retriever", "its neighbours come from other samples"),
    "retro_workdir": ("--retro-workdir", "its neighbours come from other samples"),
    "data_efficiency_curriculum_learning": (
        "--data-efficiency-curriculum-learning",
        "it shortens and reorders samples after they were packed",
    ),
    "random_ltd": ("--random-ltd", "it drops tokens between attention layers, so boundaries would no longer fit"),
    "train_data_exact_num_epochs": ("--train-data-exact-num-epochs", _OF_ANOTHER_KIND),
    "train_idx_path": ("--train-idx-path", _OF_ANOTHER_KIND),
    "train_desc_path": ("--train-desc-path", _OF_ANOTHER_KIND),
    "train_doc_idx_path": ("--train-doc-idx-path", _OF_ANOTHER_KIND),
    "train_sample_idx_path": ("--train-sample-idx-path", _OF_ANOTHER_KIND),
    "train_shuffle_idx_path": ("--train-shuffle-idx-path", _OF_ANOTHER_KIND),
    "return_data_index": ("--return-data-index", _OF_ANOTHER_KIND),
    "use_dataset_only": ("--use-dataset-only", "the model that takes the samples would not get their boundaries"),
    "mos": ("--mos", "the teacher's loss counts positions without a target"),
    "kd": ("--kd", "the teacher's loss counts positions without a target"),
    "enable_zbh1_pipeline": (
        "--enable-zbh1-pipeline",
        "its schedule is untested with packed samples; leave it out",
    ),
}
"""Attribute of the parsed options -> the option and why it cannot be used with packed samples."""


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
        args = validate_args(args, defaults)
        check(args)
        check_data_paths(args, most_corpora())
        check_hooks(hooked)
        return args

    return validate_and_check_args


def check(args: argparse.Namespace) -> None:
    """Refuse options that do not work with packed samples.

    Args:
        args: Megatron-DeepSpeed's options, validated.

    Raises:
        OptionError: an option does not work with packed samples.
    """
    if getattr(args, "seq_length", None) is not None:
        checked_seq_length("--seq-length", args.seq_length)
    for attribute, (option, reason) in REFUSED.items():
        if getattr(args, attribute, None):
            raise OptionError(f"{option} cannot be used with --data-impl bfp: {reason}")
    if args.dataloader_type != "single":
        raise OptionError(
            f"--dataloader-type {args.dataloader_type} cannot be used with --data-impl bfp: the order of samples would "
            "depend on the data-parallel size; leave it out, packed samples are shuffled anyway"
        )
    if args.transformer_impl != "local":
        raise OptionError(
            f"--transformer-impl {args.transformer_impl} cannot be used with --data-impl bfp: its layers take no "
            "boundaries; use --transformer-impl local, with --use-flash-attn-v2"
        )
    if args.masked_softmax_fusion and (args.fp16 or args.bf16) and not args.use_flash_attn:
        raise OptionError(
            "--data-impl bfp needs --use-flash-attn-v2, or --no-masked-softmax-fusion: the fused softmax ignores masks"
        )
    if (args.ds_sequence_parallel_size > 1 or args.force_ds_sequence_parallel) and not args.use_flash_attn:
        raise OptionError(
            "DeepSpeed's sequence parallelism needs --use-flash-attn-v2 with --data-impl bfp: without flash attention "
            "it passes no mask to attention"
        )
    check_balance_batches(args)
    if _saves_rotary_table(args):
        raise OptionError(
            "--use-rotary-position-embeddings with --recompute-granularity full needs "
            "--deepspeed-activation-checkpointing: Megatron-DeepSpeed's own recomputation cannot save the rotary table"
        )
    if _has_curriculum(args):
        raise OptionError(
            f"{args.deepspeed_config}: curriculum_learning cannot be used with --data-impl bfp: it cuts samples after "
            "they were packed"
        )


def _saves_rotary_table(args: argparse.Namespace) -> bool:
    """Whether rotary positions would go through Megatron-DeepSpeed's own recomputation, which saves only tensors."""
    return (
        getattr(args, "use_rotary_position_embeddings", False)
        and getattr(args, "recompute_granularity", None) == "full"
        and getattr(args, "no_pipeline_parallel", False)
        and not getattr(args, "deepspeed_activation_checkpointing", False)
    )


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


def _has_curriculum(args: argparse.Namespace) -> bool:
    """Whether DeepSpeed's configuration, which Megatron-DeepSpeed reads later, switches on its first curriculum."""
    if not args.deepspeed or not isinstance(args.deepspeed_config, str):
        return False
    try:
        with open(args.deepspeed_config, encoding="utf-8") as file:
            settings = json.load(file)
        return bool(settings.get("curriculum_learning", {}).get("enabled"))
    except (OSError, ValueError, AttributeError):
        return False  # Megatron-DeepSpeed will report it


def parsed_options() -> argparse.Namespace:
    """The options that Megatron-DeepSpeed trains with."""
    from megatron import get_args

    return get_args()
