"""The sequence indexes that a run reads, for the plan and preflight: where they are, and what to do if one is missing."""

import os

from run_options import RunOptions

from megatron_bfp.errors import OptionError
from megatron_bfp.index_building import open_existing
from megatron_bfp.index_format import IndexKey, build_command, document_range, index_directory, index_places
from megatron_bfp.indexed_dataset import IndexedDataset
from megatron_bfp.sequence_index import SequenceIndex
from megatron_bfp.splits import SPLIT_NAMES, split_fractions


def index_key(options: RunOptions, dataset: IndexedDataset, split_name: str) -> IndexKey | None:
    """Which index holds a split of a dataset; None for a split without a share."""
    fractions = split_fractions(options.split)[SPLIT_NAMES.index(split_name)]
    if fractions is None:
        return None
    first, end = document_range(fractions, dataset.num_documents)
    return IndexKey(options.seq_length, first, end, options.max_documents_per_sequence)


def open_index(options: RunOptions, dataset: IndexedDataset, key: IndexKey) -> SequenceIndex:
    """Open an index where the run would.

    Raises:
        OptionError: it has not been built; the message has the command that builds it.
        SequenceIndexError: it is damaged or stale.
    """
    index = open_existing(dataset, key, options.data_cache_path)
    if index is None:
        places = " or ".join(os.path.join(place, key.name) for place in index_places(dataset, options.data_cache_path))
        raise OptionError(f"no sequence index {places}; build it: {build_command(dataset, key, options.split)}")
    return index


def is_built_at_start(options: RunOptions, dataset: IndexedDataset, key: IndexKey) -> bool:
    """Whether an index is missing that nobody can build before, as the data's folder cannot be written: training then
    builds it under the data cache path."""
    beside = index_directory(dataset.prefix)
    folder = beside if os.path.isdir(beside) else os.path.dirname(beside) or "."
    if options.data_cache_path is None or os.access(folder, os.W_OK):
        return False
    return open_existing(dataset, key, options.data_cache_path) is None
