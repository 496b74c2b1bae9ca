"""``--data-impl bfp`` in Megatron-LM, for releases with ``--dataloader-inter-document-masking`` (core 0.19 and later).

Megatron-LM knows everything that packed samples need: with that option its batches carry cu_seqlens through tensor
and pipeline parallelism to the attention kernel. So three functions are enough to change: the options are declared,
checked, and lead to ``BFPGPTDataset`` where a script asks the dataset builder for ``GPTDataset``.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import fields
from types import ModuleType
from typing import Any

from ..errors import IntegrationError, OptionError
from .hooks import Hook, replace
from .summary import summary

OLDEST = "megatron-core 0.19"

REFUSED = {
    "fim_data": ("--fim-data", "it rearranges samples after they were packed"),
    "sft": ("--sft", "its samples are conversations, packed by its own dataset"),
    "mock_data": ("--mock-data", "there are no documents to pack"),
    "use_varlen_dataset": ("--use-varlen-dataset", "its samples are packed by its own dataset"),
    "hybrid_context_parallel": ("--hybrid-context-parallel", "Megatron-LM does not support it with document masking"),
    "hybrid_layer_pattern": ("--hybrid-layer-pattern", "a state space layer would carry its state across documents"),
    "hybrid_override_pattern": (
        "--hybrid-override-pattern",
        "a state space layer would carry its state across documents",
    ),
    "mtp_hybrid_override_pattern": (
        "--mtp-hybrid-override-pattern",
        "a state space layer would carry its state across documents",
    ),
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


def _add_options(add_data_args: Callable) -> Callable:
    def add_data_args_and_ours(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = add_data_args(parser)
        group = parser.add_argument_group(title="best-fit packing")
        group.add_argument(
            "--data-impl",
            choices=["mmap", "bfp"],
            default="mmap",
            help="bfp: best-fit packed documents, attention inside documents; mmap: Megatron's own samples",
        )
        group.add_argument(
            "--max-documents-per-sequence", type=int, help="with --data-impl bfp: a limit on a sequence's documents"
        )
        return parser

    return add_data_args_and_ours


def _check_options(validate_args: Callable) -> Callable:
    def check_and_validate_args(args: argparse.Namespace, defaults: dict[str, Any] = {}) -> Any:  # noqa: B006
        if args.data_impl != "bfp":
            return validate_args(args, defaults)
        check(args)
        args.dataloader_inter_document_masking = True
        result = validate_args(args, defaults)
        check(args)  # old spellings are copied, and defaults set, by then
        if args.micro_batch_size > 1 and args.pipeline_model_parallel_size > 1:
            _let_stages_tell_shapes(args)
        return result

    return check_and_validate_args


def check(args: argparse.Namespace) -> None:
    """Refuse what packed samples cannot be trained with.

    Raises:
        IntegrationError: this Megatron-LM is too old.
        OptionError: an option cannot be honoured.
    """
    if not hasattr(args, "dataloader_inter_document_masking"):
        raise IntegrationError(
            f"this Megatron-LM has no --dataloader-inter-document-masking, which --data-impl bfp needs; it came with "
            f"{OLDEST}"
        )
    for attribute, (option, reason) in REFUSED.items():
        if getattr(args, attribute, None):
            raise OptionError(f"{option} cannot be used with --data-impl bfp: {reason}")
    refuse_captured_attention(args)
    if (getattr(args, "context_parallel_size", 1) or 1) > 1:
        raise OptionError(
            "--context-parallel-size above 1 cannot be used with --data-impl bfp: Megatron-LM's document masking does "
            "not support it; use tensor, sequence or pipeline parallelism"
        )
    if getattr(args, "dataloader_type", None) not in (None, "single"):
        raise OptionError(
            f"--dataloader-type {args.dataloader_type} cannot be used with --data-impl bfp: the order of samples would "
            "depend on the data-parallel size; leave it out, packed samples are shuffled anyway"
        )


CAPTURES_NO_ATTENTION = {"mlp", "moe", "moe_router", "moe_preprocess"}
"""Modules of ``--cuda-graph-modules`` in which positions do not meet."""


def refuse_captured_attention(args: argparse.Namespace) -> None:
    """Refuse CUDA graphs with attention in them: a graph takes no boundaries, or replays those it was captured with.

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
        "document boundaries of each micro-batch; leave it out, or give --cuda-graph-modules with some of "
        f"{', '.join(sorted(CAPTURES_NO_ATTENTION))} alone"
    )


def _let_stages_tell_shapes(args: argparse.Namespace) -> None:
    """Document masking joins the rows of a micro-batch, [b * s, 1, hidden], where the next stage expects [s, b, hidden]
    unless each stage tells the shape of what it sends.

    Raises:
        OptionError: the token dispatcher of a mixture of experts does not allow that.
    """
    args.variable_seq_lengths = True
    if args.moe_token_dispatcher_type == "allgather":
        if args.num_experts:
            raise OptionError(
                "--moe-token-dispatcher-type allgather cannot be used with --data-impl bfp, pipeline parallelism and "
                "--micro-batch-size above 1: give --moe-token-dispatcher-type alltoall or --micro-batch-size 1"
            )
        args.moe_token_dispatcher_type = "alltoall"  # checked by Megatron-LM even where there are no experts


def _choose_dataset(initialize: Callable) -> Callable:
    def initialize_with_packed_samples(
        self: Any, cls: type, sizes: list[int | None], is_built_on_rank: Callable[[], bool], config: Any
    ) -> None:
        args = _options()
        if args is not None:
            cls, config = packed(cls, config, args.max_documents_per_sequence)
            is_built_on_rank = _reads_batches
        initialize(self, cls, sizes, is_built_on_rank, config)

    return initialize_with_packed_samples


def packed(cls: type, config: Any, max_documents_per_sequence: int | None) -> tuple[type, Any]:
    """The dataset class and its config that take the place of GPTDataset and GPTDatasetConfig.

    Raises:
        OptionError: the script asks for another kind of dataset, or an option cannot be honoured.
    """
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    from ..gpt_dataset import BFPGPTDataset, BFPGPTDatasetConfig

    if cls is not GPTDataset or type(config) is not GPTDatasetConfig:
        raise OptionError(
            f"--data-impl bfp takes the place of GPTDataset, this script builds {cls.__name__} with "
            f"{type(config).__name__}"
        )
    settings = {field.name: getattr(config, field.name) for field in fields(config) if field.init}
    settings["max_documents_per_sequence"] = max_documents_per_sequence
    return BFPGPTDataset, BFPGPTDatasetConfig(**settings)


def _reads_batches() -> bool:
    """Whether this rank takes samples from the dataset: the first of each tensor-parallel group, in every pipeline
    stage, as the boundaries are needed in all of them."""
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_rank() == 0


def _options() -> argparse.Namespace | None:
    """What Megatron-LM parsed; None in a script that uses megatron-core without Megatron-LM's options.

    Raises:
        OptionError: they came from somewhere else than the command line.
    """
    if "megatron.training.global_vars" not in sys.modules:
        return None
    args = sys.modules["megatron.training.global_vars"].get_args()
    if getattr(args, "data_impl", None) != "bfp" or not getattr(args, "dataloader_inter_document_masking", False):
        raise OptionError(
            "--data-impl bfp is on the command line but not among the options Megatron-LM trains with (--yaml-cfg "
            "replaces them); give all options on the command line"
        )
    check(args)  # again: they may have come, or been changed, without validate_args
    return args


def _say_what_is_active(build: Callable) -> Callable:
    def build_and_say(self: Any) -> list[Any]:
        datasets = build(self)
        args = _options()
        if args is not None:
            _say(args, datasets)
        return datasets

    return build_and_say


def _say(args: argparse.Namespace, datasets: list[Any]) -> None:
    """One line on rank 0 for each split: indexes, sequences, padding; and one on the loss."""
    import torch

    if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
        return
    for name, dataset in zip(("train", "valid", "test"), datasets, strict=True):
        parts = _parts(dataset)
        if parts:
            print(f"best-fit packing: {name}: {summary(parts)}", flush=True)
    if not args.calculate_per_token_loss:
        print(
            "best-fit packing: the number of targets differs between micro-batches; with --calculate-per-token-loss "
            "each target counts the same",
            flush=True,
        )


def _parts(dataset: Any) -> list[Any]:
    """The BFPGPTDatasets that a built split consists of, those from which nothing is drawn left out."""
    found = dataset if isinstance(dataset, list) else getattr(dataset, "datasets", [dataset])
    return [part for part in found if getattr(part, "sequence_index", None)]


def _change_arguments(module: ModuleType) -> None:
    replace(module, "_add_data_args", "parser", _add_options)
    replace(module, "validate_args", "args, defaults", _check_options)


def _change_builder(module: ModuleType) -> None:
    builder = module.BlendedMegatronDatasetBuilder
    replace(builder, "__init__", "self, cls, sizes, is_built_on_rank, config", _choose_dataset)
    replace(builder, "build", "self", _say_what_is_active)


def _change_training(module: ModuleType) -> None:
    from .megatron_lm_attention import watch_first_step

    replace(
        module,
        "train_step",
        "forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config, forward_backward_func, "
        "iteration, pg_collection, p2p_communicator",
        lambda train_step: watch_first_step(train_step, _options),
    )


def _change_backends(module: ModuleType) -> None:
    from .megatron_lm_attention import local_core_attention

    replace(module.LocalSpecProvider, "core_attention", "self", local_core_attention)


def _change_heterogeneous_layers(module: ModuleType) -> None:
    from .megatron_lm_attention import change_heterogeneous_layers

    change_heterogeneous_layers(module)


def _take_off_data_impl(_: ModuleType) -> None:
    """Remove ``--data-impl mmap``, which Megatron-LM does not know, from the command line."""
    kept, skip = [], False
    for argument in sys.argv:
        if not skip and argument != "--data-impl" and not argument.startswith("--data-impl="):
            kept.append(argument)
        skip = argument == "--data-impl"
    sys.argv[:] = kept


HOOKS: dict[str, Hook] = {
    "megatron.training.arguments": _change_arguments,
    "megatron.core.datasets.blended_megatron_dataset_builder": _change_builder,
    "megatron.core.models.backends": _change_backends,
    "megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs": _change_heterogeneous_layers,
    "megatron.training.training": _change_training,
}

HOOKS_FOR_MMAP: dict[str, Hook] = {"megatron.training.arguments": _take_off_data_impl}
