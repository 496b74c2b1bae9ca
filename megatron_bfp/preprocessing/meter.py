"""Progress of tokenizing: documents, MB/s, tokens/s, time left. A bar on a terminal, else a line now and then."""

import sys
import time
from typing import Any

from ..progress import FIRST_SECONDS
from .amount import Amount

LINE_SECONDS = 30.0
"""Between two lines where standard error is no terminal."""


class Meter:
    """Shows how much is done, on standard error.

    Args:
        input_bytes: of all that is to be done; 0 if that is not known.
    """

    def __init__(self, input_bytes: int) -> None:
        self._input_bytes = input_bytes
        self._before = 0
        self._start = time.monotonic()
        self._due = self._start + FIRST_SECONDS
        self._bar = self._new_bar()
        self.amount = Amount()
        """What was done since the start."""

    def __enter__(self) -> "Meter":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._start

    def skip(self, input_bytes: int) -> None:
        """So much was done before."""
        self._before += input_bytes
        self._show()

    def add(self, amount: Amount) -> None:
        """So much more is done."""
        self.amount += amount
        self._show()

    def _show(self) -> None:
        if self._bar is not None:
            self._bar.n = min(int(self._before + self.amount.input_bytes), self._bar.total or sys.maxsize)
            self._bar.set_postfix_str(self._rates(), refresh=False)
            self._bar.update(0)
        elif time.monotonic() >= self._due:
            print(f"tokenizing: {self.line()}", file=sys.stderr, flush=True)
            self._due = time.monotonic() + LINE_SECONDS

    def line(self) -> str:
        """All that is known, on one line."""
        done = min(self._before + self.amount.input_bytes, self._input_bytes)
        share = f"{100 * done / self._input_bytes:.0f} %, " if self._input_bytes else ""
        left = ""
        if self._input_bytes and self.amount.input_bytes:
            seconds = (self._input_bytes - done) / self.amount.input_bytes * self.seconds
            left = f", {_duration(seconds)} left"
        return f"{share}{self._rates()} after {_duration(self.seconds)}{left}"

    def _rates(self) -> str:
        amount, seconds = self.amount, max(self.seconds, 1e-9)
        rates = f"{amount.text_bytes / 1e6 / seconds:.1f} MB/s, {amount.tokens / 1e6 / seconds:.2f} M tokens/s"
        return f"{amount.documents:,} documents, {amount.text_bytes / 1e6:,.0f} MB, {rates}"

    def _new_bar(self) -> Any:
        if not sys.stderr.isatty():
            return None
        try:
            from tqdm import tqdm
        except ImportError:
            return None
        total = self._input_bytes or None
        return tqdm(total=total, desc="tokenizing", unit="B", unit_scale=True, delay=FIRST_SECONDS, leave=False)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
