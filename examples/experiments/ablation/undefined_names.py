"""Undefined names in a completed Python file, by static analysis with pyflakes, as in the paper.

A completion may end anywhere, and small models write much that is not Python. So the file is first cut back, by whole
lines, to the longest part that parses. Only names used in the completion count, not those in the prompt.
"""

import ast
import warnings
from typing import NamedTuple

from pyflakes import checker, messages


class CompletedFile(NamedTuple):
    """The analysis of a prompt and its completion."""

    parses: bool
    """Whether the file parses with at least one line of the completion."""
    undefined: tuple[str, ...]
    """Names used in that part of the completion, but defined nowhere."""


def check_completion(prompt: str, completion: str) -> CompletedFile:
    """Find undefined names in a completion."""
    lines = (prompt + completion).split("\n")
    first = prompt.count("\n")  # the line in which the prompt ends
    column = len(prompt.rpartition("\n")[2].encode())
    for end in range(len(lines), first, -1):
        written = lines[first:end]
        if "".join([written[0][len(prompt.rpartition("\n")[2]) :], *written[1:]]).strip():
            tree = _parsed("\n".join(lines[:end]) + "\n")
            if tree is not None:
                return CompletedFile(True, _undefined_after(tree, first + 1, column))
    return CompletedFile(False, ())


def _parsed(text: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in strings
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _undefined_after(tree: ast.Module, line: int, column: int) -> tuple[str, ...]:
    """Undefined names from a position on. Lines count from 1, columns are bytes and count from 0."""
    all_messages = checker.Checker(tree).messages
    undefined = [message for message in all_messages if isinstance(message, messages.UndefinedName)]
    return tuple(message.message_args[0] for message in undefined if (message.lineno, message.col) >= (line, column))
