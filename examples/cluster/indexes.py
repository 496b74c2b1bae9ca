"""The sequence indexes that a run reads: where they are, and whether they are built. For the plan and preflight."""

import os

from megatron_bfp.indexed_dataset.reader import IndexedDataset
from megatron_bfp.samples.fill_in_the_middle import FimDocuments
from megatron_bfp.sequence_index.builder import open_existing
from megatron_bfp.sequence_index.key import IndexKey, index_directory
from megatron_bfp.sequence_index.split import PackedSplit

from .options import RunOptions


def open_split(options: RunOptions, dataset: IndexedDataset, split_name: str) -> PackedSplit | None:
    """Open a split's index where the run would; None for a split without a share.

    Raises:
        SequenceIndexError: it has not been built, and the message has the command that builds it; or it is damaged.
    """
    cap, cache_path = options.max_documents_per_sequence, options.data_cache_path
    return PackedSplit.open(
        dataset,
        options.seq_length,
        options.split,
        split_name,
        cap,
        cache_path,
        even_sequences=options.even_sequences,
        targets_only=options.targets_only,
        fim=fim_documents(options),
        builds=False,
    )


def fim_documents(options: RunOptions) -> FimDocuments | None:
    """Which documents a run rearranges for fill-in-the-middle; None without."""
    return None if options.fim_rate is None else FimDocuments(options.fim_rate, options.seed)


def is_built_at_start(options: RunOptions, dataset: IndexedDataset, split_name: str) -> bool:
    """Whether training will build an index under the data cache path: it is missing, and nobody can build it beside the
    data, as that folder cannot be written."""
    beside = index_directory(dataset.prefix)
    folder = beside if os.path.isdir(beside) else os.path.dirname(beside) or "."
    if options.data_cache_path is None or os.access(folder, os.W_OK):
        return False
    rule = options.max_documents_per_sequence, options.even_sequences, options.targets_only, fim_documents(options)
    key = IndexKey.for_split(dataset.num_documents, options.seq_length, options.split, split_name, *rule)
    return key is not None and open_existing(dataset, key, options.data_cache_path) is None
