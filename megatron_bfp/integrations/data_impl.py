"""``--data-impl`` on a command line, read as argparse would, before any parser exists."""

from collections.abc import Sequence

OPTION = "--data-impl"

SHORTEST = "--data-i"
"""The shortest unambiguous abbreviation, for parsers that accept abbreviations."""


def _is_option(argument: str) -> bool:
    name = argument.partition("=")[0]
    return name.startswith(SHORTEST) and OPTION.startswith(name)


def data_impls(arguments: Sequence[str]) -> list[str]:
    """All values of ``--data-impl`` and its abbreviations, in order."""
    values = []
    for position, argument in enumerate(arguments):
        if not _is_option(argument):
            continue
        _, equals, value = argument.partition("=")
        if equals:
            values.append(value)
        elif position + 1 < len(arguments):
            values.append(arguments[position + 1])
    return values


def data_impl(arguments: Sequence[str]) -> str | None:
    """The value that argparse would use, which is the last one; None if there is none."""
    return next(reversed(data_impls(arguments)), None)


def without_data_impl(arguments: Sequence[str]) -> list[str]:
    """The command line without ``--data-impl`` and its values."""
    kept, skip = [], False
    for argument in arguments:
        if not skip and not _is_option(argument):
            kept.append(argument)
        skip = not skip and _is_option(argument) and "=" not in argument
    return kept
