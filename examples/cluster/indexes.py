"""The sequence indexes that a run reads: where they are, and whether they are built. For the plan and preflight."""

import os

from megatron_bfp.indexed_dataset.reader import IndexedDataset
from megatron_bfp.sequence_index.builder import open_existing, open_or_refuse
from megatron_bfp.sequence_index.key import IndexKey, index_directory
from megatron_bfp.sequence_index.reader import SequenceIndex

from .options import RunOptions


def index_key(options: RunOptions, dataset: IndexedDataset, split_name: str) -> IndexKey | None:
    """The key of the index of a split; None if ``--split`` gives the split no share."""
    cap = options.max_documents_per_sequence
    return IndexKey.for_split(dataset.num_documents, options.seq_length, options.split, split_name, cap)


def open_index(options: RunOptions, dataset: IndexedDataset, key: IndexKey) -> SequenceIndex:
    """Open an index where the run would look for it.

    Raises:
        SequenceIndexError: it has not been built, and the message has the command that builds it; or it is damaged.
    """
    return open_or_refuse(dataset, key, options.data_cache_path, options.split)


def is_built_at_start(options: RunOptions, dataset: IndexedDataset, key: IndexKey) -> bool:
    """Whether training will build an index under the data cache path: it is missing, and nobody can build it beside the
    data, as that folder cannot be written."""
    beside = index_directory(dataset.prefix)
    folder = beside if os.path.isdir(beside) else os.path.dirname(beside) or "."
    if options.data_cache_path is None or os.access(folder, os.W_OK):
        return False
    return open_existing(dataset, key, options.data_cache_path) is None
