"""The sequence indexes that a run reads, for the plan and preflight."""

import os

from megatron_bfp.indexed_dataset.reader import IndexedDataset
from megatron_bfp.sequence_index.builder import open_existing, open_or_refuse
from megatron_bfp.sequence_index.key import IndexKey, index_directory
from megatron_bfp.sequence_index.reader import SequenceIndex

from .options import RunOptions


def index_key(options: RunOptions, dataset: IndexedDataset, split_name: str) -> IndexKey | None:
    """Which index holds a split of a dataset; None for a split without a share."""
    cap = options.max_documents_per_sequence
    return IndexKey.for_split(dataset.num_documents, options.seq_length, options.split, split_name, cap)


def open_index(options: RunOptions, dataset: IndexedDataset, key: IndexKey) -> SequenceIndex:
    """Open an index where the run would.

    Raises:
        SequenceIndexError: it has not been built, and the message has the command that builds it; or it is wrong.
    """
    return open_or_refuse(dataset, key, options.data_cache_path, options.split)


def is_built_at_start(options: RunOptions, dataset: IndexedDataset, key: IndexKey) -> bool:
    """Whether an index is missing that nobody can build before, as the data's folder cannot be written: training then
    builds it under the data cache path."""
    beside = index_directory(dataset.prefix)
    folder = beside if os.path.isdir(beside) else os.path.dirname(beside) or "."
    if options.data_cache_path is None or os.access(folder, os.W_OK):
        return False
    return open_existing(dataset, key, options.data_cache_path) is None
