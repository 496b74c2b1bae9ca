"""Write the tables of options into the documentation, from the tables that the plugin itself goes by.

python docs/write_options.py
"""

import re
from collections.abc import Iterable
from pathlib import Path

from megatron_bfp.integrations.megatron_deepspeed.option_table import OPTIONS as MEGATRON_DEEPSPEED
from megatron_bfp.integrations.megatron_lm.option_table import OPTIONS as MEGATRON_LM
from megatron_bfp.integrations.option_table import NotNeeded, Refused, Row, Source, Untried, Works

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"outcomes": ROOT / "docs/megatron.md", "evidence": ROOT / "docs/options.md"}
TABLES = {"Megatron-LM": MEGATRON_LM, "Megatron-DeepSpeed": MEGATRON_DEEPSPEED}


def label(row: Row) -> str:
    """What a row is about."""
    return row.label or ", ".join(f"`{option}`" for option in row.options)


def outcome(row: Row) -> str:
    """What happens with ``--data-impl bfp``."""
    match row:
        case Works(is_new=True):
            return f"new: {row.how}"
        case Works():
            return f"works: {row.how}" if row.how else "works"
        case Untried():
            return f"not tested: {in_code(row.why)}"
        case NotNeeded():
            return f"not needed: {in_code(row.why)}"
        case Refused():
            return f"refused: {in_code(row.why)}"
    raise TypeError(row)


def instead(row: Row) -> str:
    """What to do in its place."""
    if not isinstance(row, Refused):
        return ""
    return in_code(f"add {row.needs}" if row.needs else row.instead)


def in_code(text: str) -> str:
    """A message with its options in Markdown's marks of code."""
    return re.sub(r"--[a-z][\w-]*(?: (?:alltoall|local)\b)?|\.idx", r"`\g<0>`", text)


def outcomes(rows: Iterable[Row]) -> str:
    """The table that is read before a run."""
    lines = [f"| {label(row)} | {outcome(row)} | {instead(row)} |".replace("|  |", "| |") for row in rows]
    return "\n".join(["| Option | With `--data-impl bfp` | Instead |", "|---|---|---|", *lines])


def evidence(rows: Iterable[Row]) -> str:
    """The tests and the lines of Megatron behind each row."""
    lines = [f"| {label(row)} | {kind(row)} | {', '.join(map(link, row.shown_by))} |" for row in rows]
    return "\n".join(["| Option | | Shown by |", "|---|---|---|", *lines])


def link(shown: str | Source) -> str:
    """A test, or a function of Megatron with what it says there."""
    return f"`{shown}`" + (f": `{shown.says}`" if isinstance(shown, Source) else "")


def kind(row: Row) -> str:
    """A row's outcome in a word."""
    return {Works: "works", Refused: "refused", Untried: "not tested", NotNeeded: "not needed"}[type(row)]


def with_tables(page: str, write: str) -> str:
    """A page with its tables written anew, between the marks ``<!-- options: NAME -->`` and ``<!-- end -->``.

    Args:
        write: ``outcomes`` or ``evidence``.
    """
    for name, rows in TABLES.items():
        table = {"outcomes": outcomes, "evidence": evidence}[write](rows)
        start, end = f"<!-- options: {name} -->", "<!-- end -->"
        before, old = page.split(start)
        page = f"{before}{start}\n\n{table}\n\n{end}{old.partition(end)[2]}"
    return page


if __name__ == "__main__":
    for write, path in PAGES.items():
        path.write_text(with_tables(path.read_text(encoding="utf-8"), write), encoding="utf-8")
