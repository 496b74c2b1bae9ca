"""The indexes of a dataset, built, counted and described: what preprocess, index and merge end with."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from ..indexed_dataset.reader import IndexedDataset
from ..inspection.report import count_cuts
from ..progress import terminal_progress
from ..sequence_index.builder import build
from ..sequence_index.key import SPLIT_NAMES, IndexKey, index_directory
from ..sequence_index.reader import SequenceIndex
from ..tables import format_table, wrap
from .shared import columns_of_counts, fim_documents

CUT_NEEDLESSLY = (
    "Documents cut needlessly, that is, though they fit into one sequence: by concatenation, which joins documents "
    "in file order and cuts every L tokens, and by packing. Longer ones must be cut."
)


@dataclass(frozen=True)
class BuiltIndex:
    """An index, and the documents that are cut with it and without it."""

    split: str
    """train, valid or test; all if there is no ``--split``."""
    index: SequenceIndex
    cut_by_concatenation: int
    """Documents that fit into one sequence and that concatenation in file order cuts."""
    cut_by_packing: int
    """Documents that fit into one sequence and that packing cuts."""
    longer: int
    """Documents of more tokens than a sequence, or with targets only of more than one more. They must be cut."""


def build_indexes(dataset: IndexedDataset, options: argparse.Namespace) -> list[BuiltIndex]:
    """Build an index for each ``--seq-length`` and each split that has a share of the documents.

    Raises:
        BFPError: an index is there and wrong, or one cannot be written.
    """
    names = {"all": "train"} if options.split is None else dict(zip(SPLIT_NAMES, SPLIT_NAMES))
    rule = options.max_documents_per_sequence, options.even_sequences, options.targets_only, fim_documents(options)
    directory, built = index_directory(dataset.prefix), []
    for seq_length in options.seq_length:
        for label, name in names.items():
            key = IndexKey.for_split(dataset.num_documents, seq_length, options.split, name, *rule)
            if key is not None:
                index = build(dataset, key, directory, options.overwrite, terminal_progress)
                built.append(_with_cuts(label, index))
    return built


def describe(dataset: IndexedDataset, indexes: Sequence[BuiltIndex], left_out: str = "") -> str:
    """A dataset and its indexes, in lines of at most 80 columns: the documents that are cut come first.

    Args:
        left_out: the documents that are not in the dataset, in words.
    """
    documents = f"{dataset.num_documents:,} documents{left_out and f' ({left_out})'}"
    size = wrap(f"{documents}, {dataset.num_tokens:,} tokens, {dataset.dtype}")
    if not indexes:
        return f"{dataset.prefix}\n{size}"
    return "\n\n".join([f"{dataset.prefix}\n{wrap(CUT_NEEDLESSLY)}", _cuts(indexes), size, _sizes(indexes)])


def _with_cuts(split: str, index: SequenceIndex) -> BuiltIndex:
    key = index.key
    lengths = index.dataset.document_lengths.range(key.first_document, key.end_document)
    longest = key.seq_length + key.targets_only
    fitting, longer = count_cuts(lengths, key.seq_length, [longest], terminal_progress, key.targets_only)
    return BuiltIndex(split, index, fitting.cut_by_concatenation, fitting.cut_by_packing, longer.documents)


def _cuts(indexes: Sequence[BuiltIndex]) -> str:
    """A row for each index: its documents that are cut, before and after."""
    rows = [
        [built.index.key.name, built.split, built.cut_by_concatenation, built.cut_by_packing, built.longer]
        for built in indexes
    ]
    return format_table(["index", "split", "concatenation", "packing", "longer than L"], rows)


def _sizes(indexes: Sequence[BuiltIndex]) -> str:
    """A row for each index: what it holds."""
    rows, columns = [], columns_of_counts(built.index.counts for built in indexes)
    for index in (built.index for built in indexes):
        counts, positions = index.counts, index.counts["sequences"] * index.key.seq_length
        share = f"{100 * counts['padding'] / positions:.4f}" if positions else "0"
        rows.append([index.key.name, *(counts.get(name, "") for name in columns.values()), share])
    return format_table(["index", *columns, "padding %"], rows)
