"""Tables as aligned text, plain or in Markdown."""

import re
from collections.abc import Sequence
from typing import Any

NUMBER = re.compile(r"-|[0-9,]+(\.[0-9]+)?( %)?")


def format_table(header: Sequence[str], rows: Sequence[Sequence[Any]], markdown: bool = False) -> str:
    """Rows as aligned text: numbers to the right, the rest to the left. Integers get separators of thousands.

    A cell of "-" stands for a number that is not there.
    """
    cells = [[str(cell) if isinstance(cell, str) else f"{cell:,}" for cell in row] for row in [header, *rows]]
    widths = [max(3 * markdown, *(len(row[column]) for row in cells)) for column in range(len(header))]
    left = [not all(NUMBER.fullmatch(row[column]) for row in cells[1:]) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = [cell.ljust(n) if to_left else cell.rjust(n) for cell, n, to_left in zip(row, widths, left)]
        return f"| {' | '.join(padded)} |" if markdown else "  ".join(padded).rstrip()

    rule = ["-" * n if to_left or not markdown else "-" * (n - 1) + ":" for n, to_left in zip(widths, left)]
    return "\n".join(line(row) for row in [cells[0], rule, *cells[1:]])
