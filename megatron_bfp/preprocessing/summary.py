"""OUT.summary.json: what a finished job did, for people and for the same command, given again."""

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .._version import __version__
from ..errors import IndexedDatasetError, InputError
from ..files import read_json_object, sync_file, write_whole
from ..indexed_dataset.format import bin_path, idx_path
from ..indexed_dataset.reader import IndexedDataset
from ..tokenizers.interface import Tokenizer
from ..tokenizers.special_tokens import token_names
from .job import Job, difference
from .readers.file_names import SUMMARY_SUFFIX
from .task import TaskRecord


@dataclass(frozen=True)
class WrittenDataset:
    """A dataset that was written, and what was left out of it."""

    dataset: IndexedDataset
    num_empty: int
    """Documents without text."""
    num_bad: int
    """Documents that cannot be used."""
    num_left_out: int = 0
    """Records of WARC files that are not plain text."""


@dataclass
class Totals:
    """The records of all tasks of a job, added up."""

    num_documents: list[int]
    """[keys]."""
    num_empty: list[int]
    """[keys]."""
    num_tokens: list[int]
    """[keys]."""
    num_bad: int = 0
    num_left_out: int = 0
    text_bytes: int = 0
    num_tasks: int = 0
    libraries: Counter = field(default_factory=Counter)
    """How many tasks each library tokenized."""
    remarks: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, num_keys: int, records: Iterable[TaskRecord]) -> "Totals":
        """The sums of all records."""
        totals = cls([0] * num_keys, [0] * num_keys, [0] * num_keys)
        for record in records:
            totals._add(record)
        return totals

    def _add(self, record: TaskRecord) -> None:
        for key in range(len(self.num_documents)):
            self.num_documents[key] += record.num_documents[key]
            self.num_empty[key] += record.num_empty[key]
            self.num_tokens[key] += record.num_tokens[key]
        self.num_bad += len(record.bad)
        self.num_left_out += record.num_left_out
        self.text_bytes += record.amount.text_bytes
        self.num_tasks += 1
        self.libraries[record.library] += 1
        if record.remark is not None:
            self.remarks.add(record.remark)


def write_summary(
    job: Job,
    identity: dict[str, Any],
    tokenizer: Tokenizer,
    totals: Totals,
    datasets: Sequence[IndexedDataset],
    times: dict[str, float],
) -> None:
    """Write the summary, after everything else.

    Args:
        times: seconds of this call's steps, and how many tasks it did.

    Raises:
        InputError: it cannot be written.
    """
    described = {}
    for index, (key, dataset) in enumerate(zip(job.keys, datasets, strict=True)):
        described[key] = {
            "prefix": dataset.prefix,
            "documents": dataset.num_documents,
            "empty_documents": totals.num_empty[index],
            "tokens": dataset.num_tokens,
            "dtype": str(dataset.dtype),
            "bytes": _file_sizes(dataset.prefix),
        }
    template = job.tokenizer.template(tokenizer)
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
        "shards": totals.num_tasks,
        "shards_by_library": dict(totals.libraries),
        "remarks": sorted(totals.remarks),
        "this_call": times,
        "run": identity,
        "version": __version__,
    }
    if totals.num_left_out:
        summary["records_without_text"] = totals.num_left_out
    path = job.prefix + SUMMARY_SUFFIX
    try:
        write_whole(path, json.dumps(summary, indent=2).encode())
        sync_file(os.path.dirname(os.path.abspath(path)))  # all names, before the job's folder goes
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None


def finished_datasets(job: Job, identity: dict[str, Any]) -> list[WrittenDataset] | None:
    """The datasets of a job that was finished before; None if it was not, or if they have changed since."""
    summary = read_json_object(job.prefix + SUMMARY_SUFFIX)
    if job.has_streams or summary is None or _identity_in(summary) != identity:
        return None
    try:
        described = [summary["datasets"][key] for key in job.keys]
        if [_file_sizes(prefix) for prefix in job.dataset_prefixes] != [dataset["bytes"] for dataset in described]:
            return None
        return [
            WrittenDataset(
                IndexedDataset(prefix),
                dataset["empty_documents"],
                summary["bad_documents"],
                summary.get("records_without_text", 0),
            )
            for prefix, dataset in zip(job.dataset_prefixes, described, strict=True)
        ]
    except (KeyError, TypeError, OSError, IndexedDatasetError):
        return None


def why_not_finished(job: Job, identity: dict[str, Any]) -> str:
    """How the job differs that was finished under this name, as the end of a sentence; empty if that is unknown."""
    summary = read_json_object(job.prefix + SUMMARY_SUFFIX)
    finished = summary and _identity_in(summary)
    return f"; {difference(finished, identity)}" if finished and finished != identity else ""


def _identity_in(summary: dict[str, Any]) -> dict[str, Any] | None:
    """The identity of a summary's job, without the version that earlier versions of this package put in it."""
    identity = summary.get("run")
    if not isinstance(identity, dict):
        return None
    return {name: value for name, value in identity.items() if name != "version"}


def _file_sizes(prefix: str) -> list[int]:
    return [os.path.getsize(path(prefix)) for path in (bin_path, idx_path)]
