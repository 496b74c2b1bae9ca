"""What all commands share: errors of one line, exit statuses, and output into a pipe that may be closed."""

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import TextIO

from .errors import BFPError
from .optional import not_installed

CLOSED_PIPE_STATUS = 141
"""The exit status in a shell of a program that SIGPIPE ended, such as ``cat`` in ``cat FILE | head``."""
QUIET_SECONDS = 5.0
"""How long a rank that prints nothing waits before it ends. Launchers kill all ranks when the first one ends, and ranks
reach an error seconds apart on a busy node, so the rank that prints must end first."""


def typed_name() -> str:
    """The command as it was typed, without a verb: ``megatron-bfp``, ``preprocess_bfp.py``, ``python -m PACKAGE``."""
    path = sys.argv[0]
    if os.path.basename(path) == "__main__.py":
        return f"python -m {os.path.basename(os.path.dirname(os.path.abspath(path)))}"
    return os.path.basename(path)


def say(text: str) -> None:
    """Print the output of a command at once, by one write.

    Raises:
        BFPError: it cannot be written, for example because the disk is full.
    """
    _write_out(text + "\n")


def warn(name: str, text: str) -> None:
    """Print a line on standard error that does not end the command.

    Args:
        name: the command as it was typed.
    """
    tell(f"{name}: warning: {text}")


def tell(line: str, stream: TextIO | None = None) -> None:
    """Print a line by one write, so that lines of several ranks do not mix.

    ``print`` writes a line and its end apart where PYTHONUNBUFFERED is set, as it is in many container images.

    Args:
        stream: standard error, if not given.
    """
    stream = stream or sys.stderr
    if stream is not None:  # its descriptor was not closed when Python started
        stream.write(line + "\n")
        stream.flush()


def exit_on_sigterm() -> None:
    """Let SIGTERM end this process with status 143 by an exception, so that unfinished files are removed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def run(main: Callable[[], int | None], name: str, quiet: bool = False) -> int:
    """Run a command and turn its errors into an exit status: 0 done, 2 bad options or input, 130 interrupted.

    If its output is a pipe that is closed, as by ``| head``, it ends silently with status 141.

    Args:
        main: the command; returns a status of its own, or None for 0.
        name: the command as it was typed, which errors begin with.
        quiet: do not print errors that every rank raises; for all but one rank of a run.
    """
    try:
        return _run_and_flush(main)
    except BFPError as error:
        if not (quiet and error.on_every_rank):
            _tell(f"{name}: error: {error}")
        else:
            time.sleep(QUIET_SECONDS)
        return 2
    except ModuleNotFoundError as error:
        explained = not_installed(error, name)
        if explained is error:
            raise
        _tell(f"{name}: error: {explained}")
        return 2
    except KeyboardInterrupt:
        _tell(f"{name}: interrupted")
        return 130
    except BrokenPipeError:
        if not (_is_closed(1) or _is_closed(2)):  # another pipe, such as that of a worker
            raise
        return CLOSED_PIPE_STATUS
    finally:
        _drop_what_cannot_be_printed()


def _run_and_flush(main: Callable[[], int | None]) -> int:
    """What ``main`` returns, after its output is flushed. Python flushes at exit, too late for an error of one line."""
    try:
        status = main() or 0
    except SystemExit:  # --help and --version print, too
        _write_out()
        raise
    _write_out()
    return status


def _write_out(text: str = "") -> None:
    """Write to standard output and flush it, if the caller has not closed it."""
    try:
        if sys.stdout is not None:
            sys.stdout.write(text)
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise BFPError(f"standard output: cannot be written: {error.strerror}") from None


def _tell(message: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody reads it
        tell(message)


def _is_closed(descriptor: int) -> bool:
    """Whether the other end of a pipe or a socket is closed."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _drop_what_cannot_be_printed() -> None:
    """Keep Python from printing the rest at exit, and from complaining if it cannot."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
