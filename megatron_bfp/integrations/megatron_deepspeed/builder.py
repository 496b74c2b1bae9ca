"""Megatron-DeepSpeed's builders of datasets with ``--data-impl bfp``: packed splits, balanced and summed up before
training.

``build_packed_splits``, ``build_packed_split`` and ``check_and_sum_up`` take a function of Megatron-DeepSpeed, which
their docstrings name first, and return its replacement. Blends and their caches stay Megatron-DeepSpeed's own.
"""

import inspect
from collections.abc import Callable
from typing import Any

from ...errors import BFPError, OptionError
from ...indexed_dataset.reader import IndexedDataset
from ...progress import log_progress
from ...samples.fill_in_the_middle import FimDocuments, FimForm
from ...sequence_index.split import PackedSplit
from ..balance import COMPOSED_BY_COST, balanced, is_composed_by_cost, order_in_words, whole_blocks
from ..fill_in_the_middle import fim_form, sentinel_ids
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
            even_sequences=args.even_sequences,
            targets_only=args.targets_only,
            fim_rate=args.fim_rate,
            fim_form=_fim_form(args),
        )

    return build


def _fim_form(args: Any) -> FimForm | None:
    """How documents are rearranged with ``--fim-rate``; the sentinels are tokens of Megatron-DeepSpeed's tokenizer."""
    if args.fim_rate is None:
        return None
    from megatron import get_tokenizer

    tokenizer = get_tokenizer()

    def ids_of(texts: list[str]) -> list[int | None]:
        vocabulary = getattr(tokenizer, "vocab", None)
        if vocabulary is None:  # NullTokenizer, whose tokens are numbers
            return [int(text) if text.isdecimal() else None for text in texts]
        return [vocabulary.get(text) for text in texts]

    return fim_form(sentinel_ids(args, ids_of), tokenizer.eod, args.fim_spm_rate)


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
        packed_split = PackedSplit.open(
            dataset,
            seq_length,
            None,
            max_documents_per_sequence=args.max_documents_per_sequence,
            cache_path=data_cache_path,
            even_sequences=args.even_sequences,
            targets_only=args.targets_only,
            fim=None if args.fim_rate is None else FimDocuments(args.fim_rate, seed),
            progress=log_progress(logger),
        )
        packed = build_dataset(packed_split, num_samples, seed, args.padded_vocab_size, _fim_form(args))
        if packed is None:
            raise OptionError(f"{data_prefix}: has no tokens; take it out of --{dataset_name}-data-path")
        return packed

    return build


def check_and_sum_up(build: Callable) -> Callable:
    """``build_train_valid_test_datasets``, after which the training split is balanced, the first samples can be read
    and rank 0 prints a summary of each split."""
    signature, sizes = inspect.signature(build), "train_valid_test_num_samples"

    def build_and_check(*arguments: Any, **keywords: Any) -> tuple:
        from megatron import global_vars, print_rank_0

        args, call = parsed_options(), signature.bind(*arguments, **keywords)
        if sizes in call.arguments:
            train_size, *others = call.arguments[sizes]
            call.arguments[sizes] = [whole_blocks(args, train_size), *others]
        datasets = build(*call.args, **call.kwargs)
        try:
            datasets = (balanced(datasets[0], args, global_vars), *datasets[1:])
            for dataset, first in zip(datasets, consumed_samples(args), strict=True):
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
    """A line for each split: its indexes, sequences, padding and order."""
    lines = []
    for name, dataset in zip(("train", "valid", "test"), datasets, strict=True):
        if dataset is not None:
            lines.append(f"best-fit packing: {name}: {summary(_parts(dataset))}{order_in_words(dataset)}")
        if is_composed_by_cost(dataset):
            lines.append(COMPOSED_BY_COST)
    return lines


def _parts(dataset: Any) -> list[Any]:
    """The packed datasets of a split."""
    return getattr(dataset, "datasets", [dataset])
