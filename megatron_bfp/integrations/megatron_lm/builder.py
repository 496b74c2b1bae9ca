"""Megatron-LM's dataset builder with ``--data-impl bfp``: packed splits, checked and summed up before training.

``choose_dataset``, ``check_and_sum_up`` and ``skip_empty_evaluation`` take a function of Megatron-LM and return its
replacement.
"""

import argparse
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from ...console import say
from ...errors import BFPError, OptionError
from ..balance import COMPOSED_BY_COST, balanced, is_composed_by_cost, order_in_words, whole_blocks
from ..fill_in_the_middle import sentinel_ids
from ..first_samples import consumed_samples, read_first_samples
from ..refusals import raise_together
from ..summary import is_news, summary
from .options import parsed_options


def choose_dataset(initialize: Callable) -> Callable:
    """The builder's ``__init__``, which gets our dataset class and config in place of Megatron-LM's."""

    def initialize_with_packed_samples(
        self: Any, cls: type, sizes: list[int | None], is_built_on_rank: Callable[[], bool], config: Any
    ) -> None:
        args = parsed_options()
        if args is not None:
            cls, config = packed(cls, config, args)
            is_built_on_rank = reads_batches
            sizes = [sizes[0] and whole_blocks(args, sizes[0]), *sizes[1:]]
        initialize(self, cls, sizes, is_built_on_rank, config)

    return initialize_with_packed_samples


def packed(cls: type, config: Any, args: argparse.Namespace) -> tuple[type, Any]:
    """The dataset class and config that replace GPTDataset and GPTDatasetConfig.

    Args:
        args: Megatron-LM's options.

    Raises:
        OptionError: the script asks for another kind of dataset, or an option does not work with packed samples.
    """
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    from ...megatron_core.gpt_dataset import BFPGPTDataset, BFPGPTDatasetConfig

    if cls is not GPTDataset or type(config) is not GPTDatasetConfig:
        raise OptionError(
            f"--data-impl bfp replaces GPTDataset, but this script builds {cls.__name__} with {type(config).__name__}"
        )
    settings = {field.name: getattr(config, field.name) for field in fields(config) if field.init}
    settings["max_documents_per_sequence"] = args.max_documents_per_sequence
    settings["even_sequences"], settings["targets_only"] = args.even_sequences, args.targets_only
    settings |= _fim_settings(args, config.tokenizer)
    settings["model_vocab_size"] = getattr(args, "padded_vocab_size", None)  # rows of the embedding
    settings["context_parallel_size"] = 1  # core would align documents for it; attention needs none of that
    return BFPGPTDataset, BFPGPTDatasetConfig(**settings)


def _fim_settings(args: argparse.Namespace, tokenizer: Any) -> dict[str, Any]:
    """The fields for ``--fim-rate``. The sentinels are tokens of Megatron-LM's tokenizer, as of its own FIM dataset."""
    library = getattr(tokenizer, "_tokenizer", tokenizer)

    def ids_of(texts: list[str]) -> list[int | None]:
        ids = library.tokens_to_ids(texts)  # an id for the unknown token, if there is no such token
        return [number if library.ids_to_tokens([number]) == [text] else None for number, text in zip(ids, texts)]

    return {
        "fim_rate": args.fim_rate,
        "fim_spm_rate": args.fim_spm_rate,
        "fim_extra_tokens": sentinel_ids(args, ids_of),
    }


def reads_batches() -> bool:
    """Whether this rank takes samples from the dataset: the first of each tensor-parallel group, in every pipeline
    stage, as each stage needs the boundaries."""
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_rank() == 0


def check_and_sum_up(build: Callable) -> Callable:
    """The builder's ``build``, after which the training split is balanced, all ranks know whether the first samples can
    be read, and rank 0 prints a summary of each split."""

    def build_and_check(self: Any) -> list[Any]:
        datasets = build(self)
        args = parsed_options()
        if args is None:
            return datasets
        error = None
        try:
            datasets = _with_balanced_batches(args, _without_empty_splits(args, datasets))
            _read_first_samples(args, datasets)
        except BFPError as own_error:
            error = own_error
        raise_together(error)  # most ranks have no datasets
        if is_news([part for dataset in datasets for part in _parts(dataset)]):
            _sum_up(args, datasets)
        return datasets

    return build_and_check


def _without_empty_splits(args: argparse.Namespace, datasets: list[Any]) -> list[Any]:
    """The splits, with None for one without samples, for which Megatron-LM has no sampler.

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


def _with_balanced_batches(args: argparse.Namespace, datasets: list[Any]) -> list[Any]:
    """The splits, with the training split in balanced order if the run trains."""
    from megatron.core import num_microbatches_calculator

    if getattr(args, "skip_train", False):
        return datasets
    return [balanced(datasets[0], args, num_microbatches_calculator), *datasets[1:]]


def _read_first_samples(args: argparse.Namespace, datasets: list[Any]) -> None:
    for dataset, first in zip(datasets, consumed_samples(args), strict=True):
        for part in dataset if isinstance(dataset, list) else [dataset]:
            read_first_samples(part, first)


def _sum_up(args: argparse.Namespace, datasets: list[Any]) -> None:
    """Print one line on rank 0 for each split: indexes, sequences, padding; and one on the loss."""
    import torch

    if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
        return
    for name, dataset in zip(("train", "valid", "test"), datasets, strict=True):
        parts = _parts(dataset)
        if parts:
            say(f"best-fit packing: {name}: {summary(parts)}{order_in_words(dataset)}")
        if is_composed_by_cost(dataset):
            say(COMPOSED_BY_COST)
    has_equal_targets = args.targets_only and not getattr(args, "eod_mask_loss", False)  # up to padding
    if not args.calculate_per_token_loss and not has_equal_targets:
        say(
            "best-fit packing: the number of targets differs between micro-batches; with --calculate-per-token-loss "
            "each target counts the same"
        )


def _parts(dataset: Any) -> list[Any]:
    """The BFPGPTDatasets that a built split consists of, without those that no sample is drawn from."""
    parts = dataset if isinstance(dataset, list) else getattr(dataset, "datasets", [dataset])
    return [part for part in parts if getattr(part, "sequence_index", None)]


def skip_empty_evaluation(build_loaders: Callable) -> Callable:
    """Megatron-LM's ``build_train_valid_test_data_loaders``, which can also do without a valid split. Megatron-LM
    notices a missing test split, but takes its list of validation sets for a split even if it holds nothing."""

    def build_loaders_with_samples(provider: Callable) -> tuple[Any, Any, Any]:
        train, valid, test = build_loaders(provider)
        args = parsed_options()
        if args is not None and not _as_on_rank_0(any(loader is not None for loader in valid or ())):
            args.do_valid, valid = 0, None
        return train, valid, test

    return build_loaders_with_samples


def _as_on_rank_0(of_this_rank: bool) -> bool:
    """The value that rank 0 has, on all ranks: only the first rank of a tensor-parallel group has loaders."""
    import torch

    flag = torch.tensor([int(of_this_rank)], dtype=torch.long, device="cuda")
    torch.distributed.broadcast(flag, 0)
    return bool(flag.item())
