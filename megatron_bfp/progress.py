"""Progress of whatever takes longer than two seconds: a bar on a terminal, a line every ten seconds elsewhere."""

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .console import tell

Progress = Callable[[Iterable, int | None, str], Iterable]
"""Wraps an iterable of steps, given their number (None: unknown) and a description, and yields its items unchanged."""

FIRST_SECONDS = 2.0
LINE_SECONDS = 10.0
BAR = "{percentage:3.0f}%|{bar}|"
"""In tqdm's notation: the bar fills what the rest of the line leaves free."""


def without_progress(steps: Iterable, number: int | None, description: str) -> Iterable:
    """The default ``Progress``: prints nothing."""
    return steps


def terminal_progress(blocks: Iterable, number: int | None, description: str) -> Iterable:
    """A ``Progress`` on standard error: tqdm's bar on a terminal, else a line every ten seconds."""
    amount = f"{BAR} {{elapsed}}, {{remaining}} left" if number else "{n_fmt} blocks, {elapsed}"
    bar = terminal_bar(f"{{desc}}: {amount}", iterable=blocks, total=number, desc=description)
    if bar is not None:
        return bar
    return _in_lines(blocks, number, description, tell)


def terminal_bar(bar_format: str, **settings: Any) -> Any:
    """A tqdm bar on standard error; None if that is not a terminal or tqdm is not installed.

    Args:
        bar_format: the line, in tqdm's notation.
        settings: further arguments of ``tqdm``.
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
