"""What all verbs share: the parser, ``--version``, and what a person calls a dataset."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from .._version import __version__
from ..errors import OptionError
from ..indexed_dataset.format import idx_path
from ..sequence_index.key import index_directory


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are ours, and which takes ``--split -1,1,0`` for a value and not an option."""

    def __init__(self, *arguments, **settings) -> None:
        super().__init__(*arguments, **settings)
        self.add_argument("--version", action="version", version=f"%(prog)s {__version__}", help="print it and exit")

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None):
        """As argparse's, after joining ``--split VALUE`` to ``--split=VALUE``."""
        args = list(sys.argv[1:] if args is None else args)
        for place in range(len(args) - 1):
            if args[place] == "--split":
                args[place : place + 2] = [f"--split={args[place + 1]}"]
                break
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise an OptionError."""
        raise OptionError(message)


def dataset_prefix(path: str) -> str:
    """The prefix of the dataset that a path names, for ``type=`` of an option.

    People complete file names with the tab key and copy what was printed: ``X.idx``, ``X.bin``, ``X.bfp/``,
    ``X.bfp/s2048-d0-9`` and ``X/`` all mean the dataset X. A dataset whose prefix ends so is still that dataset, if its
    .idx is there.
    """
    prefix = path.rstrip("/") or path
    if os.path.exists(idx_path(prefix)):
        return prefix
    indexes = index_directory("")
    if os.path.dirname(prefix).endswith(indexes):
        prefix = os.path.dirname(prefix)
    for suffix in (".bin", ".idx", indexes):
        if prefix.endswith(suffix) and os.path.basename(prefix) != suffix:
            return prefix.removesuffix(suffix)
    return prefix
