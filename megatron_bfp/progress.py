"""Progress of anything that takes longer than two seconds: a bar on a terminal, plain lines elsewhere."""

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Progress = Callable[[Iterable, int | None, str], Iterable]
"""Wraps an iterable of steps, given their number (None: unknown) and a description, and yields its items unchanged."""

FIRST_SECONDS = 2.0
LINE_SECONDS = 10.0
BAR = "{percentage:3.0f}%|{bar}|"
"""tqdm's: takes the room that the rest of the line leaves."""


def without_progress(steps: Iterable, number: int | None, description: str) -> Iterable:
    """The default ``Progress``: says nothing."""
    return steps


def terminal_progress(blocks: Iterable, number: int | None, description: str) -> Iterable:
    """A ``Progress`` on standard error: tqdm's bar on a terminal, else a line every ten seconds."""
    amount = f"{BAR} {{elapsed}}, {{remaining}} left" if number else "{n_fmt} blocks, {elapsed}"
    bar = terminal_bar(f"{{desc}}: {amount}", iterable=blocks, total=number, desc=description)
    if bar is not None:
        return bar
    return _in_lines(blocks, number, description, lambda line: print(line, file=sys.stderr, flush=True))


def terminal_bar(bar_format: str, **settings: Any) -> Any:
    """A bar of tqdm's on standard error; None if that is no terminal.

    Args:
        bar_format: tqdm's.
    """
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:  # it comes with the preprocess extra; the core works without it
        return None
    return tqdm(bar_format=bar_format, delay=FIRST_SECONDS, leave=False, dynamic_ncols=True, **settings)


def log_progress(logger: logging.Logger) -> Progress:
    """A ``Progress`` that writes lines to a logger, for use inside training."""
    return lambda blocks, number, description: _in_lines(blocks, number, description, logger.info)


def _in_lines(blocks: Iterable, number: int | None, description: str, say: Callable[[str], None]) -> Iterator:
    start = time.monotonic()
    due = start + FIRST_SECONDS
    for done, block in enumerate(blocks):
        if time.monotonic() >= due:
            share = f"{100 * done // number} %" if number else f"{done} blocks"
            say(f"{description}: {share} after {time.monotonic() - start:.0f} s")
            due = time.monotonic() + LINE_SECONDS
        yield block
