"""Megatron-DeepSpeed's builders of datasets with ``--data-impl bfp``: packed splits, summed up before training.

``build_packed_splits``, ``build_packed_split`` and ``check_and_sum_up`` take a function of Megatron-DeepSpeed, which
their docstrings name first, and return its replacement. Blends and their caches stay Megatron-DeepSpeed's own.
"""

from collections.abc import Callable
from typing import Any

from ...errors import BFPError, OptionError
from ...indexed_dataset.reader import IndexedDataset
from ...progress import log_progress
from ...sequence_index.split import PackedSplit
from ..first_samples import consumed_samples, read_first_samples
from ..summary import is_news, summary
from .dataset import build_dataset, build_splits, logger
from .options import parsed_options


def build_packed_splits(_: Callable) -> Callable:
    """``_build_train_valid_test_datasets``: the packed splits of one prefix."""

    def build(
        data_prefix: str,
        data_impl: str,
        splits_string: str,
        train_valid_test_num_samples: list[int],
        seq_length: int,
        seed: int,
        skip_warmup: bool,
        return_doc_ids: bool = False,
        *,
        data_cache_path: str | None = None,
    ) -> tuple:
        args = parsed_options()
        return build_splits(
            data_prefix,
            splits_string,
            train_valid_test_num_samples,
            seq_length,
            seed,
            args.max_documents_per_sequence,
            data_cache_path,
            is_in_blend=len(args.data_path) > 1,
            vocab_size=args.padded_vocab_size,
        )

    return build


def build_packed_split(_: Callable) -> Callable:
    """``_build_dataset``: all documents of one prefix, which is a split by itself."""

    def build(
        dataset_name: str,
        data_prefix: str,
        data_impl: str,
        splits_string: str,
        num_samples: int,
        seq_length: int,
        seed: int,
        skip_warmup: bool,
        *,
        data_cache_path: str | None = None,
    ) -> Any:
        dataset = IndexedDataset(data_prefix)
        args = parsed_options()
        cap = args.max_documents_per_sequence
        packed_split = PackedSplit.open(
            dataset,
            seq_length,
            None,
            max_documents_per_sequence=cap,
            cache_path=data_cache_path,
            progress=log_progress(logger),
        )
        packed = build_dataset(packed_split, num_samples, seed, args.padded_vocab_size)
        if packed is None:
            raise OptionError(f"{data_prefix}: has no tokens; take it out of --{dataset_name}-data-path")
        return packed

    return build


def check_and_sum_up(build: Callable) -> Callable:
    """``build_train_valid_test_datasets``, after which the first samples can be read and rank 0 prints a summary of
    each split."""

    def build_and_check(*arguments: Any, **keywords: Any) -> tuple:
        from megatron import print_rank_0

        datasets = build(*arguments, **keywords)
        try:
            for dataset, first in zip(datasets, consumed_samples(parsed_options()), strict=True):
                read_first_samples(dataset, first)
        except BFPError as error:
            error.on_every_rank = True  # all ranks that build datasets read the same samples, rank 0 among them
            raise
        if is_news([part for dataset in datasets if dataset is not None for part in _parts(dataset)]):
            for line in description(datasets):
                print_rank_0(line)
        return datasets

    return build_and_check


def description(datasets: tuple) -> list[str]:
    """A line for each split: its indexes, sequences and padding."""
    lines = []
    for name, dataset in zip(("train", "valid", "test"), datasets, strict=True):
        if dataset is not None:
            lines.append(f"best-fit packing: {name}: {summary(_parts(dataset))}")
    return lines


def _parts(dataset: Any) -> list[Any]:
    """The packed datasets of a split."""
    return getattr(dataset, "datasets", [dataset])
