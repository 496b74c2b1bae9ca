"""What Megatron's options do with ``--data-impl bfp``: one table that refuses, reports, and is the documentation.

Megatron-LM and Megatron-DeepSpeed have a table each, in ``megatron_lm.option_table`` and
``megatron_deepspeed.option_table``. A row holds the options that share an outcome, and names the tests or the lines of
Megatron that show it. ``refusals`` and ``remarks`` go through the rows with the options of a run, and
``docs/write_options.py`` writes the tables of docs/megatron.md from the same rows.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ..errors import OptionError

Options = argparse.Namespace
"""What Megatron parsed."""

Condition = Callable[[Options], str | None]
"""Returns what was given, as on the command line (``--dataloader-type cyclic``), or None."""


@dataclass(frozen=True)
class Source:
    """A line of a Megatron that shows an outcome."""

    function: str
    """Where it is: ``package.module:name``."""
    says: str
    """A part of the line; a test against a checkout looks for it."""

    def __str__(self) -> str:
        return self.function


@dataclass(frozen=True, kw_only=True)
class Row:
    """Options that share an outcome."""

    options: tuple[str, ...]
    """As on the command line, ``--fim-data``."""
    label: str = ""
    """What the documentation calls them, in Markdown; empty for the options themselves."""
    condition: Condition | None = None
    """Tells whether the row concerns a run; None: it does if one of ``options`` has a value that is true."""
    shown_by: tuple[str | Source, ...]
    """Tests, as ``tests/FILE.py::NAME``, and lines of Megatron."""

    def given(self, args: Options) -> list[str]:
        """Which of the options a run has, as on its command line."""
        if self.condition is not None:
            given = self.condition(args)
            return [given] if given else []
        return [option for option in self.options if getattr(args, attribute_of(option), None)]


@dataclass(frozen=True, kw_only=True)
class Works(Row):
    """Options that work with packed samples; a test shows it."""

    how: str = ""
    """What there is to know about them, in Markdown."""
    is_new: bool = False
    """Whether this package adds them."""


@dataclass(frozen=True, kw_only=True)
class Refused(Row):
    """Options that stop the run."""

    why: str
    """The reason, which follows a colon."""
    instead: str = ""
    """What to do about it; empty if nothing can be done."""
    needs: str = ""
    """Another option with which these would be accepted."""
    beside: str = ""
    """Another option without which these would be accepted."""
    checked_by: str = ""
    """The function that refuses them, if options alone cannot tell; empty: ``refusals`` does."""

    def message(self, given: str) -> str:
        """The error's text.

        Args:
            given: the option, as on the command line.
        """
        if self.needs:
            return f"{given} needs {self.needs} with --data-impl bfp: {self.why}"
        both = "--data-impl bfp" + (f" and {self.beside}" if self.beside else "")
        return f"{given} cannot be used with {both}: {self.why}" + (f"; {self.instead}" if self.instead else "")


@dataclass(frozen=True, kw_only=True)
class Untried(Row):
    """Options that are accepted, with a line in the log that no test has run them."""

    why: str
    """What is known of them, and what is missing."""

    def line(self, given: str) -> str:
        """The line in the log.

        Args:
            given: the option, as on the command line.
        """
        return f"best-fit packing: {given} is accepted but not tested with packed samples: {self.why}"


@dataclass(frozen=True, kw_only=True)
class NotNeeded(Row):
    """Options that are accepted and ignored, with a line in the log; a test shows it."""

    why: str
    """What does their work."""

    def line(self, given: str) -> str:
        """The line in the log.

        Args:
            given: the option, as on the command line.
        """
        return f"best-fit packing: {given} is not needed: {self.why}"


def attribute_of(option: str) -> str:
    """The attribute of the parsed options that holds the value of an option."""
    return option.lstrip("-").replace("-", "_")


def refusals(
    table: Iterable[Row], args: Options, checks: Iterable[Callable[[Options], None]] = ()
) -> Iterator[OptionError]:
    """Everything that stops a run, not only the first.

    Args:
        table: of the Megatron that parsed ``args``.
        checks: raise ``OptionError`` for values that no option may have; they come first.
    """
    for check in checks:
        try:
            check(args)
        except OptionError as error:
            yield error
    for row in table:
        if isinstance(row, Refused) and not row.checked_by:
            yield from (OptionError(row.message(given)) for given in row.given(args))


def remarks(table: Iterable[Row], args: Options) -> list[str]:
    """A line for each option of a run that no test has tried, or that is ignored."""
    return [row.line(given) for row in table if isinstance(row, Untried | NotNeeded) for given in row.given(args)]
