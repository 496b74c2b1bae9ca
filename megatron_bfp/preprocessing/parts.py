"""Datasets of several jobs, before they are merged: they must be parts of one input, and all of them.

Each job with ``--shard-index`` plans the whole input and does its part of it. If a file changed between two jobs, their
parts do not fit: documents are lost or come twice, and nothing in the datasets shows it. Their summaries do.
"""

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import InputError, OptionError
from .job_folder import difference, read_json
from .readers.input_files import SUMMARY_SUFFIX

PART = re.compile(r"(?P<output>.*)-(?P<index>\d{5})-of-(?P<count>\d{5})(?P<key>_.*)")


def check_parts(prefixes: Sequence[str]) -> Iterator[str]:
    """Check datasets that are named as parts are.

    Yields:
        What may be a mistake: parts that are not given.

    Raises:
        OptionError: a part is given twice.
        InputError: two parts are of other inputs, or were made with other options.
    """
    outputs: dict[tuple[str, ...], dict[int, re.Match[str]]] = {}
    for prefix in prefixes:
        if part := PART.fullmatch(os.path.realpath(prefix)):
            parts = outputs.setdefault(part.group("output", "count", "key"), {})
            if int(part["index"]) in parts:
                raise OptionError(
                    f"--merge {prefix}: this part is given twice; give it once, or its documents come twice"
                )
            parts[int(part["index"])] = part
    for (output, count, key), parts in outputs.items():
        _refuse_other_runs(list(parts.values()))
        missing = sorted(set(range(int(count))) - set(parts))
        if missing:
            first, more = missing[0], len(missing) - 1
            others = f" and {more} more" if more else ""
            yield f"{output}-{first:05d}-of-{count}{key}{others} of these {int(count)} parts not merged: not given"


def _refuse_other_runs(parts: Sequence[re.Match[str]]) -> None:
    first, first_run = "", None
    for part in parts:
        name = f"{part['output']}-{part['index']}-of-{part['count']}"
        run = _run_of(name)
        if run is None:  # its summary was not kept
            continue
        if first_run is not None and run != first_run:
            raise InputError(
                f"{name}: is no part of what {first} is a part of: {difference(first_run, run)}. Documents would be "
                "lost or come twice; do the parts again, with --overwrite, while the input does not change"
            )
        first, first_run = name, run


def _run_of(name: str) -> dict[str, Any] | None:
    """What a job did, but for which part of it."""
    summary = read_json(name + SUMMARY_SUFFIX)
    run = summary and summary.get("run")
    return (
        {key: value for key, value in run.items() if key not in ("part", "version")} if isinstance(run, dict) else None
    )
