"""Tables as aligned text, plain or in Markdown, for terminals of 80 columns."""

import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

NUMBER = re.compile(r"-|[0-9,]+(\.[0-9]+)?( %)?")
WIDTH = 80
"""Columns of a terminal."""


def format_table(
    header: Sequence[str], rows: Sequence[Sequence[Any]], markdown: bool = False, width: int | None = WIDTH
) -> str:
    """Rows as aligned text: numbers to the right, the rest to the left. Integers get separators of thousands.

    A cell of "-" stands for a missing number.

    Args:
        width: columns of the terminal. A wider table continues below, with its first column repeated; None: any width.
    """
    cells = [[str(cell) if isinstance(cell, str) else f"{cell:,}" for cell in row] for row in [header, *rows]]
    widths = [max(3 * markdown, *(len(row[column]) for row in cells)) for column in range(len(header))]
    left = [not all(NUMBER.fullmatch(row[column]) for row in cells[1:]) for column in range(len(header))]

    def line(row: Sequence[str], columns: Sequence[int]) -> str:
        padded = [row[n].ljust(widths[n]) if left[n] else row[n].rjust(widths[n]) for n in columns]
        return f"| {' | '.join(padded)} |" if markdown else "  ".join(padded).rstrip()

    rule = ["-" * n if to_left or not markdown else "-" * (n - 1) + ":" for n, to_left in zip(widths, left)]
    return "\n\n".join(
        "\n".join(line(row, columns) for row in [cells[0], rule, *cells[1:]])
        for columns in _columns_side_by_side(widths, markdown, width)
    )


def wrap(text: str) -> str:
    """A paragraph in lines of at most 80 columns. Words stay whole, so paths can be copied."""
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _columns_side_by_side(widths: Sequence[int], markdown: bool, width: int | None) -> Iterator[list[int]]:
    """Lists of columns that fit beside each other; each begins with the first column."""
    between, around = (3, 4) if markdown else (2, 0)
    columns = [0]
    for column in range(1, len(widths)):
        taken = sum(widths[n] + between for n in columns) + widths[column] + around
        if width is not None and taken > width and len(columns) > 1:
            yield columns
            columns = [0]
        columns.append(column)
    yield columns
