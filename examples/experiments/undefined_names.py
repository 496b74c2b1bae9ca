"""Names that a completed Python file uses without having them, by static analysis with pyflakes, as the paper did.

A completion ends somewhere, and a small model writes much that is no Python. So a file is first cut back to the longest
part that parses, by whole lines. What counts are names used in the completion, not those in the prompt.
"""

import ast
import warnings
from typing import NamedTuple

from pyflakes import checker, messages


class CompletedFile(NamedTuple):
    """What is known of a prompt and its completion."""

    parses: bool
    """Whether it does with at least one line that the completion has added to or written."""
    undefined: tuple[str, ...]
    """Names used in that part of the completion that nothing defines."""


def check_completion(prompt: str, completion: str) -> CompletedFile:
    """Look for undefined names in a completion."""
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
            warnings.simplefilter("ignore")  # of escapes in strings
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _undefined_after(tree: ast.Module, line: int, column: int) -> tuple[str, ...]:
    """Undefined names at or after a place; lines count from 1, columns are bytes from 0."""
    found = checker.Checker(tree).messages
    undefined = [message for message in found if isinstance(message, messages.UndefinedName)]
    return tuple(message.message_args[0] for message in undefined if (message.lineno, message.col) >= (line, column))
