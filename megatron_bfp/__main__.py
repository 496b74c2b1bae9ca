"""``python -m megatron_bfp VERB``: work on the sequence indexes of datasets."""

import sys
from collections.abc import Sequence

from .command_line import Parser, run
from .index_verification import verify_all
from .progress import terminal_progress
from .tables import format_table


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and do what it says.

    Raises:
        BFPError: bad options, or an index that is not right.
    """
    parser = Parser(prog="python -m megatron_bfp", description="Work on the sequence indexes of datasets.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    verify = verbs.add_parser("verify", help="check every index of a dataset against its .idx, byte for byte")
    verify.add_argument("prefix", metavar="PREFIX", help="the dataset's path without .bin or .idx")
    verify.add_argument("--data-cache-path", help="also check the dataset's indexes in this cache")
    options = parser.parse_args(argv)
    verify_command(options.prefix, options.data_cache_path)


def verify_command(prefix: str, cache_path: str | None) -> None:
    """Verify every index of a dataset and print a row for each."""
    indexes = verify_all(prefix, cache_path, terminal_progress)
    names = ("documents", "empty_documents", "tokens", "sequences", "padding")
    rows = [[index.path, *(index.counts[name] for name in names), "whole"] for index in indexes]
    print(format_table(["index", *(name.replace("_", " ") for name in names), "state"], rows))


if __name__ == "__main__":
    sys.exit(run(main, "megatron_bfp"))
