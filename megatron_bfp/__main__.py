"""``python -m megatron_bfp VERB``: check the sequence indexes of datasets and look at their sequences."""

import sys
from collections.abc import Sequence

from .command_line import Parser, run
from .index_verification import verify_all
from .progress import terminal_progress
from .show_command import add_arguments, show
from .tables import format_table


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and do what it says.

    Raises:
        BFPError: bad options, or an index that is not right.
    """
    parser = Parser(prog="python -m megatron_bfp", description="Look after the sequence indexes of datasets.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    verify = verbs.add_parser("verify", help="check every index of a dataset against its .idx, byte for byte")
    verify.add_argument("prefix", metavar="PREFIX", help="the dataset's path without .bin or .idx")
    verify.add_argument("--data-cache-path", help="also check the dataset's indexes in this cache")
    add_arguments(verbs.add_parser("show", help="show what one training sequence consists of"))
    options = parser.parse_args(argv)
    if options.verb == "show":
        show(options)
    else:
        verify_command(options.prefix, options.data_cache_path)


def verify_command(prefix: str, cache_path: str | None) -> None:
    """Verify every index of a dataset and print a row for each."""
    indexes = verify_all(prefix, cache_path, terminal_progress)
    names = ("documents", "empty_documents", "tokens", "sequences", "padding")
    rows = [[index.path, *(index.counts[name] for name in names), "whole"] for index in indexes]
    print(format_table(["index", *(name.replace("_", " ") for name in names), "state"], rows))


if __name__ == "__main__":
    sys.exit(run(main, "megatron_bfp"))
