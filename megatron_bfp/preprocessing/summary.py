"""OUT.summary.json: what a finished run did, for people and for the run's own command, given again."""

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .._version import __version__
from ..errors import IndexedDatasetError, InputError
from ..files import sync_file, write_whole
from ..indexed_dataset.format import bin_path, idx_path
from ..indexed_dataset.reader import IndexedDataset
from ..tokenizers.interface import Tokenizer
from ..tokenizers.special_tokens import token_names
from .job import Run
from .job_folder import difference, read_json
from .readers.input_files import SUMMARY_SUFFIX
from .task import ShardRecord


@dataclass(frozen=True)
class WrittenDataset:
    """A dataset that was written, and what was left out of it."""

    dataset: IndexedDataset
    num_empty: int
    """Documents without text."""
    num_bad: int
    """Documents that cannot be used."""


@dataclass
class Totals:
    """The records of all shards of a run, added up."""

    num_documents: list[int]
    """[keys]."""
    num_empty: list[int]
    """[keys]."""
    num_tokens: list[int]
    """[keys]."""
    num_bad: int = 0
    text_bytes: int = 0
    num_shards: int = 0
    libraries: Counter = field(default_factory=Counter)
    """How many shards each library tokenized."""
    remarks: set[str] = field(default_factory=set)

    @classmethod
    def empty(cls, num_keys: int) -> "Totals":
        """Of no shard."""
        return cls([0] * num_keys, [0] * num_keys, [0] * num_keys)

    def add(self, record: ShardRecord) -> None:
        """Add one shard's."""
        for name in ("num_documents", "num_empty", "num_tokens"):
            setattr(self, name, list(map(sum, zip(getattr(self, name), getattr(record, name), strict=True))))
        self.num_bad += len(record.bad)
        self.text_bytes += record.amount.text_bytes
        self.num_shards += 1
        self.libraries[record.library] += 1
        self.remarks |= {record.remark} - {None}


def write_summary(
    run: Run,
    identity: dict[str, Any],
    tokenizer: Tokenizer,
    totals: Totals,
    datasets: Sequence[IndexedDataset],
    times: dict[str, float],
) -> None:
    """Write the summary, when all else is written.

    Args:
        times: seconds of each part of this call, and how many shards it did.

    Raises:
        InputError: it cannot be written.
    """
    described = {}
    for place, (key, dataset) in enumerate(zip(run.keys, datasets, strict=True)):
        described[key] = {
            "prefix": dataset.prefix,
            "documents": dataset.num_documents,
            "empty_documents": totals.num_empty[place],
            "tokens": dataset.num_tokens,
            "dtype": str(dataset.dtype),
            "bytes": _sizes(dataset.prefix),
        }
    template = run.tokenizer.template(tokenizer)
    summary = {
        "datasets": described,
        "each_document": {
            "begins_with_bos": bool(template.before),
            "ends_with_eod": template.ends_in(tokenizer.eod),
            "before": token_names(template.before, tokenizer),
            "after": token_names(template.after, tokenizer),
        },
        "bad_documents": totals.num_bad,
        "text_bytes": totals.text_bytes,
        "shards": totals.num_shards,
        "shards_by_library": dict(totals.libraries),
        "remarks": sorted(totals.remarks),
        "this_call": times,
        "run": identity,
        "version": __version__,
    }
    path = run.prefix + SUMMARY_SUFFIX
    try:
        write_whole(path, json.dumps(summary, indent=2).encode())
        sync_file(os.path.dirname(os.path.abspath(path)))  # all names, before the run's folder goes
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None


def finished_datasets(run: Run, identity: dict[str, Any]) -> list[WrittenDataset] | None:
    """The datasets of a run that was finished before; None if it was not, or they have changed since."""
    summary = read_json(run.prefix + SUMMARY_SUFFIX)
    if run.has_streams or summary is None or _run_of(summary) != identity:
        return None
    try:
        described = [summary["datasets"][key] for key in run.keys]
        if [_sizes(prefix) for prefix in run.dataset_prefixes] != [found["bytes"] for found in described]:
            return None
        return [
            WrittenDataset(IndexedDataset(prefix), found["empty_documents"], summary["bad_documents"])
            for prefix, found in zip(run.dataset_prefixes, described, strict=True)
        ]
    except (KeyError, TypeError, OSError, IndexedDatasetError):
        return None


def why_not_finished(run: Run, identity: dict[str, Any]) -> str:
    """In what the run that was finished under this name differs, as the end of a sentence; empty if not known."""
    summary = read_json(run.prefix + SUMMARY_SUFFIX)
    found = summary and _run_of(summary)
    return f"; {difference(found, identity)}" if found and found != identity else ""


def _run_of(summary: dict[str, Any]) -> dict[str, Any] | None:
    """The identity of a summary's run; earlier versions of this package counted their own as part of it."""
    found = summary.get("run")
    return {name: value for name, value in found.items() if name != "version"} if isinstance(found, dict) else None


def _sizes(prefix: str) -> list[int]:
    return [os.path.getsize(path(prefix)) for path in (bin_path, idx_path)]
