"""Megatron-LM's options with ``--data-impl bfp``: which are added, refused and set."""

import argparse
import sys
from collections.abc import Callable, Iterable
from typing import Any

from ...arguments import checked_seq_length
from ...errors import OptionError, UnsupportedMegatronError
from ...samples.blends import check_weights
from ..balance import check_balance_batches
from ..hooks import check_hooks
from ..packing_options import add_packing_options

FIM_RATE = 0.5
"""Megatron-LM's default of --fim-rate, for its own --fim-data."""

OLDEST = "megatron-core 0.19"

_STATE = "a state space layer would carry its state across documents"

_WHOLE_DOCUMENTS = "packing rearranges documents as wholes, by tokens"

REFUSED = {
    "fim_data": ("--fim-data", "it rearranges samples after they were packed; give --fim-rate without it"),
    "fim_split_sample": ("--fim-split-sample", _WHOLE_DOCUMENTS),
    "fim_fragment_rate": ("--fim-fragment-rate", _WHOLE_DOCUMENTS),
    "fim_no_prefix": ("--fim-no-prefix", _WHOLE_DOCUMENTS),
    "sft": ("--sft", "its samples are conversations, packed by its own dataset"),
    "mock_data": ("--mock-data", "there are no documents to pack"),
    "use_varlen_dataset": ("--use-varlen-dataset", "its samples are packed by its own dataset"),
    "hybrid_context_parallel": ("--hybrid-context-parallel", "Megatron-LM does not support it with document masking"),
    "hybrid_layer_pattern": ("--hybrid-layer-pattern", _STATE),
    "hybrid_override_pattern": ("--hybrid-override-pattern", _STATE),
    "mtp_hybrid_override_pattern": ("--mtp-hybrid-override-pattern", _STATE),
    "overlap_moe_expert_parallel_comm": (
        "--overlap-moe-expert-parallel-comm",
        "its schedule calls the model without document boundaries; leave it out",
    ),
    "perform_rl_step": ("--perform-rl-step", "it makes its own samples"),
    "per_dataset_sequences_path": (
        "--per-dataset-sequences-path",
        "counts come from the .idx itself, which is opened in constant time; leave it out",
    ),
}
"""Attribute of the parsed options -> the option and why it cannot be used with packed samples."""


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
        # validate_args gives evaluation the micro-batch size of training if it has none of its own
        largest = max(args.micro_batch_size, getattr(args, "eval_micro_batch_size", None) or 1)
        if largest > 1 and args.pipeline_model_parallel_size > 1:
            exchange_shapes(args)
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
    if getattr(args, "seq_length", None) is not None:
        checked_seq_length("--seq-length", args.seq_length)
    for attribute, (option, reason) in REFUSED.items():
        if getattr(args, attribute, None):
            raise OptionError(f"{option} cannot be used with --data-impl bfp: {reason}")
    refuse_captured_attention(args)
    if (getattr(args, "context_parallel_size", 1) or 1) > 1:
        check_context_parallelism(args)
    if getattr(args, "dataloader_type", None) not in (None, "single"):
        raise OptionError(
            f"--dataloader-type {args.dataloader_type} cannot be used with --data-impl bfp: the order of samples would "
            "depend on the data-parallel size; leave it out, packed samples are shuffled anyway"
        )
    check_balance_batches(args)
    for attribute in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        _check_data_path(f"--{attribute.replace('_', '-')}", getattr(args, attribute, None) or [])


WITH_CONTEXT_PARALLELISM = {
    "mtp_num_layers": ("--mtp-num-layers", "later tokens are looked up inside a rank's share of the row"),
    "reset_position_ids": ("--reset-position-ids", "restarted positions need documents that are aligned"),
    "hierarchical_context_parallel_sizes": ("--hierarchical-context-parallel-sizes", "its groups are not supported"),
}
"""Attribute of the parsed options -> the option and why it cannot be used with context parallelism."""


def check_context_parallelism(args: argparse.Namespace) -> None:
    """Refuse what does not work with ``--context-parallel-size`` above 1.

    Raises:
        OptionError: an option does not work with it.
    """
    size = args.context_parallel_size
    for attribute, (option, reason) in WITH_CONTEXT_PARALLELISM.items():
        if getattr(args, attribute, None):
            raise OptionError(f"{option} cannot be used with --data-impl bfp and --context-parallel-size: {reason}")
    if getattr(args, "transformer_impl", "transformer_engine") != "local":
        raise OptionError(
            "--context-parallel-size above 1 with --data-impl bfp needs --transformer-impl local: Transformer Engine's "
            "own context parallelism expects documents that are aligned to it"
        )
    kinds = getattr(args, "cp_comm_type", None) or ["p2p"]
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        if kind not in ("p2p", "a2a", "all_gather"):
            raise OptionError(
                f"--cp-comm-type {kind} cannot be used with --data-impl bfp: leave it out, or give a2a or all_gather"
            )
    if (getattr(args, "seq_length", None) or 0) % (2 * size):
        raise OptionError(
            f"--seq-length {args.seq_length} must be a multiple of {2 * size}, twice --context-parallel-size"
        )


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


CAPTURES_NO_ATTENTION = {"mlp", "moe", "moe_router", "moe_preprocess"}
"""Modules of ``--cuda-graph-modules`` that do not mix positions."""


def refuse_captured_attention(args: argparse.Namespace) -> None:
    """Refuse CUDA graphs that capture attention: a graph takes no boundaries, or replays those of its capture.

    Args:
        args: before or after Megatron-LM replaced old spellings by new ones.

    Raises:
        OptionError: attention would be captured.
    """
    modules = getattr(args, "cuda_graph_scope_deprecated", None) or getattr(args, "cuda_graph_modules", None) or []
    if not isinstance(modules, list | tuple):
        modules = str(getattr(modules, "name", modules)).split(",")
    names = {getattr(module, "name", str(module)) for module in modules}
    impl = getattr(args, "cuda_graph_impl", None) or "none"
    option = f"--cuda-graph-impl {impl}"
    for old in ("enable_cuda_graph", "external_cuda_graph"):
        if getattr(args, old, False):
            impl, option = old, f"--{old.replace('_', '-')}"
    if impl == "none" and "full_iteration" in names:
        impl, option = "full_iteration", "--cuda-graph-scope full_iteration"
    if impl == "none" or impl != "full_iteration" and names and names <= CAPTURES_NO_ATTENTION:
        return
    raise OptionError(
        f"{option} cannot be used with --data-impl bfp where attention is captured: a CUDA graph cannot take the "
        "document boundaries of each micro-batch; leave it out, or give --cuda-graph-modules with nothing but "
        f"{', '.join(sorted(CAPTURES_NO_ATTENTION))}"
    )


def exchange_shapes(args: argparse.Namespace) -> None:
    """Let pipeline stages exchange tensor shapes. Document masking joins the rows of a micro-batch to
    [b * s, 1, hidden]; without this the next stage would expect [s, b, hidden].

    Raises:
        OptionError: the token dispatcher of a mixture of experts does not allow that.
    """
    args.variable_seq_lengths = True
    if args.moe_token_dispatcher_type == "allgather":
        if args.num_experts:
            raise OptionError(
                "--moe-token-dispatcher-type allgather cannot be used with --data-impl bfp, pipeline parallelism and "
                "--micro-batch-size or --eval-micro-batch-size above 1: give --moe-token-dispatcher-type alltoall, or "
                "1 for both"
            )
        args.moe_token_dispatcher_type = "alltoall"  # Megatron-LM checks it even without experts


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
