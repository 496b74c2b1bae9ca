"""Progress of tokenizing: documents, MB/s, tokens/s, time left. A bar on a terminal, else a line from time to time."""

import sys
import time
from dataclasses import astuple, dataclass
from typing import Any

from ..console import tell
from ..progress import BAR, FIRST_SECONDS, terminal_bar

LINE_SECONDS = 30.0
"""Between two lines if standard error is not a terminal."""


@dataclass(frozen=True)
class Amount:
    """An amount of work; amounts can be added."""

    documents: int = 0
    """Good and bad ones."""
    text_bytes: int = 0
    """Of documents as they are in their files, decompressed."""
    tokens: int = 0
    input_bytes: float = 0.0
    """Of input files, as they are on disk."""

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(*map(sum, zip(astuple(self), astuple(other))))


class Meter:
    """Shows how much is done, on standard error.

    Args:
        input_bytes: of the whole input; 0 if that is unknown.
    """

    def __init__(self, input_bytes: int) -> None:
        self._input_bytes = input_bytes
        self._before = 0
        self._start = time.monotonic()
        self._due = self._start + FIRST_SECONDS
        self.amount = Amount()
        """The work since the start."""
        self._bar = self._new_bar()

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
        """Count bytes of input that were done before the start."""
        self._before += input_bytes
        self._show()

    def add(self, amount: Amount) -> None:
        """Count work that was just done."""
        self.amount += amount
        self._show()

    def _show(self) -> None:
        if self._bar is not None:
            self._bar.n = min(int(self._before + self.amount.input_bytes), self._bar.total or sys.maxsize)
            self._bar.bar_format = self._bar_format()
            self._bar.update(0)
        elif time.monotonic() >= self._due:
            tell(f"tokenizing: {self.line()}")
            self._due = time.monotonic() + LINE_SECONDS

    def line(self) -> str:
        """Everything that is known, on one line."""
        share = f"{100 * self._done / self._input_bytes:.0f} %, " if self._input_bytes else ""
        megabytes = f"{self.amount.text_bytes / 1e6:,.0f} MB"
        text_rate, token_rate = self._rates()
        rates = f"{text_rate:.1f} MB/s, {token_rate:.2f} M tokens/s"
        amount = f"{self.amount.documents:,} documents, {megabytes}, {rates}"
        return f"{share}{amount} after {_duration(self.seconds)}{self._left()}"

    @property
    def _done(self) -> float:
        """Bytes of input."""
        return min(self._before + self.amount.input_bytes, self._input_bytes)

    def _left(self) -> str:
        if not (self._input_bytes and self.amount.input_bytes):
            return ""
        return f", {_duration((self._input_bytes - self._done) / self.amount.input_bytes * self.seconds)} left"

    def _rates(self) -> tuple[float, float]:
        """MB of text and millions of tokens per second."""
        seconds = max(self.seconds, 1e-9)
        return self.amount.text_bytes / 1e6 / seconds, self.amount.tokens / 1e6 / seconds

    def _bar_format(self) -> str:
        """Short enough to leave room for a bar on 80 columns."""
        number = self.amount.documents
        documents = f"{number:,}" if number < 1_000_000 else f"{number / 1e6:.2f} M"
        text_rate, token_rate = self._rates()
        text = f"{documents} docs, {text_rate:.0f} MB/s, {token_rate:.1f} M tok/s{self._left()}"
        return f"{BAR if self._input_bytes else 'tokenizing:'} {text}"

    def _new_bar(self) -> Any:
        return terminal_bar(self._bar_format(), total=self._input_bytes or None)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
