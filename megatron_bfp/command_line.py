"""What all command lines share: an error is one line on standard error and exit status 2."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from .errors import BFPError, OptionError

QUIET_SECONDS = 1.0
"""A rank that prints nothing ends after the one that does: launchers end all others when the first has ended."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are ours, and which takes ``--split -1,1,0`` for a value and not an option."""

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


def typed_name() -> str:
    """The command's name as it was typed: ``megatron-bfp-preprocess``, ``preprocess_bfp.py``, ``python -m PACKAGE``."""
    path = sys.argv[0]
    if os.path.basename(path) == "__main__.py":
        return f"python -m {os.path.basename(os.path.dirname(os.path.abspath(path)))}"
    return os.path.basename(path)


def run(main: Callable[[], int | None], name: str, quiet: bool = False) -> int:
    """Run a command and turn its errors into an exit status: 0 done, 2 bad options or input, 130 interrupted.

    Args:
        main: returns a status of its own, or None when it is done.
        quiet: print nothing of errors that every rank meets; for all but one of several processes of a run.
    """
    try:
        return main() or 0
    except BFPError as error:
        if not (quiet and error.on_every_rank):
            print(f"{name}: error: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(QUIET_SECONDS)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr, flush=True)
        return 130
