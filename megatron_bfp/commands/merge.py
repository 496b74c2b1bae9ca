"""``megatron-bfp merge``: several datasets to one, and its sequence indexes."""

import argparse

from ..console import say, warn
from ..errors import OptionError
from ..indexed_dataset.merging import merge
from ..preprocessing.job import check_parts
from ..preprocessing.write import refuse_to_replace
from ..progress import terminal_progress
from .built_indexes import build_indexes, describe
from .shared import (
    OF_INDEX,
    add_cap,
    add_even,
    add_fim,
    add_output_prefix,
    add_overwrite,
    add_seq_length,
    add_split,
    add_targets_only,
    check_output_prefix,
    check_packing,
    dataset_prefix,
)

DESCRIPTION = (
    "Join datasets, with their documents in the order given, to OUT.bin and OUT.idx, byte for byte as if all documents "
    "had been written at once. With --seq-length, also build the sequence indexes of the result in OUT.bfp/. The parts "
    "stay as they are."
)
EPILOG = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    parser.usage = "%(prog)s PART [PART ...]\n       --output-prefix OUT [options]"
    parser.add_argument(
        "parts",
        nargs="+",
        type=dataset_prefix,
        metavar="PART",
        help="paths of the datasets to join, with or without .bin or .idx",
    )
    add_output_prefix(parser, "writes OUT.bin, OUT.idx and, with --seq-length, OUT.bfp/", required=True)
    add_seq_length(parser, without="default: no index is built")
    add_split(parser, "one index of all documents")
    add_cap(parser)
    add_even(parser)
    add_targets_only(parser)
    add_fim(parser)
    add_overwrite(parser, "a dataset or an index that exists")


def execute(options: argparse.Namespace) -> None:
    """Join the datasets, and print the documents that are cut with and without packing.

    Raises:
        BFPError: bad options, parts that do not belong together, or a dataset that cannot be written.
    """
    check_packing(options)
    check_output_prefix(options)
    for name in OF_INDEX:
        if getattr(options, name) != options.parser.get_default(name) and not options.seq_length:
            raise OptionError(f"--{name.replace('_', '-')} needs --seq-length: it says which indexes are built")
    prefix = options.output_prefix.removesuffix(".bin").removesuffix(".idx")
    if not options.overwrite:
        refuse_to_replace([prefix])
    for warning in check_parts(options.parts):
        warn(options.parser.prog, warning)
    dataset = merge(prefix, options.parts, terminal_progress)
    say(describe(dataset, build_indexes(dataset, options)))
