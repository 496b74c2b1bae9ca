"""``--data-impl bfp`` in Megatron-LM, for releases with ``--dataloader-inter-document-masking`` (core 0.19 and later).

Megatron-LM knows everything that packed samples need: with that option its batches carry cu_seqlens through tensor
and pipeline parallelism to the attention kernel. So a few functions are enough to change: the options are declared,
checked, and lead to ``BFPGPTDataset`` where a script asks the dataset builder for ``GPTDataset``; a split without
samples is not evaluated.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import fields
from types import ModuleType
from typing import Any

from ..arguments import checked_seq_length
from ..errors import BFPError, OptionError, UnsupportedMegatronError
from ..samples.blends import check_weights
from .data_impl import without_data_impl
from .first_samples import read_first_samples
from .hooks import Hook, check_hooks, replace
from .refusals import raise_together
from .summary import is_news, summary

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
        check_hooks(HOOKS)
        args.dataloader_inter_document_masking = True
        result = validate_args(args, defaults)
        check(args)  # old spellings are copied, and defaults set, by then
        # validate_args gives evaluation the micro-batch size of training where it has none of its own
        largest = max(args.micro_batch_size, getattr(args, "eval_micro_batch_size", None) or 1)
        if largest > 1 and args.pipeline_model_parallel_size > 1:
            _let_stages_tell_shapes(args)
        return result

    return check_and_validate_args


def check(args: argparse.Namespace) -> None:
    """Refuse what packed samples cannot be trained with.

    Raises:
        UnsupportedMegatronError: this Megatron-LM is too old.
        OptionError: an option cannot be honoured.
    """
    if not hasattr(args, "dataloader_inter_document_masking"):
        raise UnsupportedMegatronError(
            f"this Megatron-LM has no --dataloader-inter-document-masking, which --data-impl bfp needs; it came with "
            f"{OLDEST}"
        )
    if getattr(args, "seq_length", None) is not None:
        checked_seq_length("--seq-length", args.seq_length)
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
    for attribute in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        _check_data_path(f"--{attribute.replace('_', '-')}", getattr(args, attribute, None) or [])


def _check_data_path(option: str, values: list[str]) -> None:
    """Refuse a blend that Megatron-LM would end with an assertion while it takes it apart.

    Raises:
        OptionError: weights and prefixes do not take turns, or a weight is not above 0.
    """
    weights = list(map(_as_number, values[::2]))
    if len(values) % 2 or all(weight is None for weight in weights):
        return  # prefixes alone
    if None in weights:
        wrong = values[2 * weights.index(None)]
        raise OptionError(f"{option}: {wrong} stands where a weight is expected; give one before each prefix, or none")
    check_weights(values[1::2], weights)


def _as_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


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
                "--micro-batch-size or --eval-micro-batch-size above 1: give --moe-token-dispatcher-type alltoall, or "
                "1 for both"
            )
        args.moe_token_dispatcher_type = "alltoall"  # checked by Megatron-LM even where there are no experts


def _choose_dataset(initialize: Callable) -> Callable:
    def initialize_with_packed_samples(
        self: Any, cls: type, sizes: list[int | None], is_built_on_rank: Callable[[], bool], config: Any
    ) -> None:
        args = _options()
        if args is not None:
            vocab_size = getattr(args, "padded_vocab_size", None)
            cls, config = packed(cls, config, args.max_documents_per_sequence, vocab_size)
            is_built_on_rank = _reads_batches
        initialize(self, cls, sizes, is_built_on_rank, config)

    return initialize_with_packed_samples


def packed(cls: type, config: Any, max_documents_per_sequence: int | None, vocab_size: int | None) -> tuple[type, Any]:
    """The dataset class and its config that take the place of GPTDataset and GPTDatasetConfig.

    Args:
        vocab_size: rows of the model's embedding, with its padding.

    Raises:
        OptionError: the script asks for another kind of dataset, or an option cannot be honoured.
    """
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    from ..megatron_core.gpt_dataset import BFPGPTDataset, BFPGPTDatasetConfig

    if cls is not GPTDataset or type(config) is not GPTDatasetConfig:
        raise OptionError(
            f"--data-impl bfp takes the place of GPTDataset, this script builds {cls.__name__} with "
            f"{type(config).__name__}"
        )
    settings = {field.name: getattr(config, field.name) for field in fields(config) if field.init}
    settings["max_documents_per_sequence"] = max_documents_per_sequence
    settings["model_vocab_size"] = vocab_size
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
        if args is None:
            return datasets
        error = None
        try:
            datasets = _without_empty_splits(args, datasets)
            _read_first_samples(args, datasets)
        except BFPError as found:
            error = found
        raise_together(error)  # most ranks have no datasets
        if is_news([part for dataset in datasets for part in _parts(dataset)]):
            _say(args, datasets)
        return datasets

    return build_and_say


def _without_empty_splits(args: argparse.Namespace, datasets: list[Any]) -> list[Any]:
    """None in the place of a split without samples, for which Megatron-LM has no sampler.

    Raises:
        OptionError: it is the training split, or one of several validation sets.
    """
    for dataset in datasets[1] if isinstance(datasets[1], list) else []:
        if dataset is not None and not len(dataset):
            raise OptionError(f"{dataset.dataset_path}: has no tokens; take it out of the validation sets")
    empty = [dataset is not None and not len(dataset) for dataset in datasets]
    if empty[0] and not getattr(args, "skip_train", False):
        raise OptionError("the train split has no tokens; change --split or the data paths")
    return [None if is_empty else dataset for dataset, is_empty in zip(datasets, empty, strict=True)]


def _read_first_samples(args: argparse.Namespace, datasets: list[Any]) -> None:
    consumed = (getattr(args, "consumed_train_samples", 0), getattr(args, "consumed_valid_samples", 0), 0)
    for dataset, first in zip(datasets, consumed, strict=True):
        for part in dataset if isinstance(dataset, list) else [dataset]:
            read_first_samples(part, first)


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
        "build_train_valid_test_data_loaders",
        "build_train_valid_test_datasets_provider",
        _evaluate_no_empty_split,
    )
    replace(
        module,
        "train_step",
        "forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config, forward_backward_func, "
        "iteration, pg_collection, p2p_communicator",
        lambda train_step: watch_first_step(train_step, _options),
    )


def _evaluate_no_empty_split(build_loaders: Callable) -> Callable:
    """Let Megatron-LM train without a valid split. It notices that there is no test split, but takes its list of
    validation sets for one that is there, whatever is in it."""

    def build_loaders_that_are_there(provider: Callable) -> tuple[Any, Any, Any]:
        train, valid, test = build_loaders(provider)
        args = _options()
        if args is not None and not _on_all_ranks(any(loader is not None for loader in valid or ())):
            args.do_valid, valid = 0, None
        return train, valid, test

    return build_loaders_that_are_there


def _on_all_ranks(of_first_rank: bool) -> bool:
    """What rank 0 says, as only the first rank of a tensor-parallel group has loaders."""
    import torch

    flag = torch.tensor([int(of_first_rank)], dtype=torch.long, device="cuda")
    torch.distributed.broadcast(flag, 0)
    return bool(flag.item())


def _change_backends(module: ModuleType) -> None:
    from .megatron_lm_attention import local_core_attention

    replace(module.LocalSpecProvider, "core_attention", "self", local_core_attention)


def _change_heterogeneous_layers(module: ModuleType) -> None:
    from .megatron_lm_attention import change_heterogeneous_layers

    change_heterogeneous_layers(module)


def _take_off_data_impl(_: ModuleType) -> None:
    """Remove ``--data-impl mmap``, which Megatron-LM does not know, from the command line."""
    sys.argv[:] = without_data_impl(sys.argv)


HOOKS: dict[str, Hook] = {
    "megatron.training.arguments": _change_arguments,
    "megatron.core.datasets.blended_megatron_dataset_builder": _change_builder,
    "megatron.core.models.backends": _change_backends,
    "megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs": _change_heterogeneous_layers,
    "megatron.training.training": _change_training,
}

HOOKS_FOR_MMAP: dict[str, Hook] = {"megatron.training.arguments": _take_off_data_impl}
