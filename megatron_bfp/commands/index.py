"""``megatron-bfp index``: the sequence indexes of datasets that exist. It reads .idx files only."""

import argparse

from ..console import say
from ..indexed_dataset.reader import IndexedDataset
from .built_indexes import BuiltIndex, build_indexes, describe
from .json_output import KEYS_OF_DATASET, dataset_entry, index_entry, say_json
from .shared import (
    add_cap,
    add_even,
    add_fim,
    add_json,
    add_overwrite,
    add_prefixes,
    add_seq_length,
    add_split,
    add_targets_only,
    check_packing,
)

DESCRIPTION = (
    "Build the sequence indexes of datasets beside them, in PREFIX.bfp/. Give the --split that you train with. Only "
    "the .idx is read, and .bin and .idx stay as they are. An index that exists is kept."
)
EPILOG = f"""\
keys of --json:
{KEYS_OF_DATASET}
      split: train, valid, test, or all without --split
      cut_needlessly: documents that fit into one sequence and are cut
        concatenation, packing
      longer_than_seq_length: documents that must be cut; with targets only,
        those of more than one token more"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    parser.usage = "%(prog)s PREFIX [PREFIX ...]\n       --seq-length L [L ...] [options]"
    add_prefixes(parser)
    add_seq_length(parser)
    add_split(parser, "one index of all documents")
    add_cap(parser)
    add_even(parser)
    add_targets_only(parser)
    add_fim(parser)
    add_overwrite(parser, "an index that exists")
    add_json(parser)


def execute(options: argparse.Namespace) -> None:
    """Build the indexes, and print the documents that are cut with and without them.

    Raises:
        BFPError: bad options, a damaged dataset, or an index that is wrong or cannot be written.
    """
    check_packing(options)
    datasets = [IndexedDataset(prefix, needs_bin=False) for prefix in options.prefixes]
    built = [(dataset, build_indexes(dataset, options)) for dataset in datasets]
    if options.json:
        entries = [dataset_entry(dataset) | {"indexes": [*map(_entry, indexes)]} for dataset, indexes in built]
        say_json({"datasets": entries})
    else:
        say("\n\n".join(describe(dataset, indexes) for dataset, indexes in built))


def _entry(built: BuiltIndex) -> dict:
    return index_entry(built.index) | {
        "split": built.split,
        "cut_needlessly": {"concatenation": built.cut_by_concatenation, "packing": built.cut_by_packing},
        "longer_than_seq_length": built.longer,
    }
