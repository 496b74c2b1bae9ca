"""OUT.card.md and OUT.card.json: what a dataset was made from, with what, and what is in it.

The card describes the datasets, not the run: the same input and options give the same card, byte for byte, whatever
the number of workers and however often the job was killed. What the run did is in ``OUT.summary.json``.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from threading import Thread
from typing import Any

import numpy as np

from .._version import __version__
from ..errors import InputError
from ..files import write_whole
from ..indexed_dataset.format import bin_path, idx_path
from ..indexed_dataset.reader import IndexedDataset
from ..progress import Progress, without_progress
from ..tables import format_table
from ..tokenizers.interface import Tokenizer
from ..tokenizers.special_tokens import token_names
from .job import Job
from .readers.documents import Location
from .readers.file_names import BAD_DOCUMENTS_SUFFIX, CARD_SUFFIX
from .summary import Totals

HASHED_AT_ONCE = 1 << 20
"""Bytes."""
LENGTHS_AT_ONCE = 1 << 20
"""Documents."""
SHORT = 1 << 20
"""Tokens. Documents below are counted by their exact length; longer ones are few."""
PERCENT = {"shortest": 0, "median": 50, "p90": 90, "p99": 99, "longest": 100}
LISTED_FILES = 20
"""Input files that the page lists; the JSON has all."""
BAR = 30
"""Columns of the longest bar."""


class FileHash:
    """The SHA-256 of a file, in a thread of its own: a core's work, at the speed at which the disk is read.

    The file is open at once, so it may get another name meanwhile. The thread ends with the process, so that an
    interrupted one does not wait for it.

    Raises:
        InputError: the file cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._digest = hashlib.sha256()
        self._error: OSError | None = None
        try:
            self._file = open(path, "rb", buffering=0)
        except OSError as error:
            raise self._unreadable(error) from None
        self._thread = Thread(target=self._read, daemon=True)
        self._thread.start()

    def hexdigest(self) -> str:
        """The hash as `sha256sum` prints it; waits for it.

        Raises:
            InputError: the file cannot be read.
        """
        self._thread.join()
        if self._error:
            raise self._unreadable(self._error)
        return self._digest.hexdigest()

    def _read(self) -> None:
        try:
            with self._file as file:
                while block := file.read(HASHED_AT_ONCE):
                    self._digest.update(block)
        except OSError as error:
            self._error = error

    def _unreadable(self, error: OSError) -> InputError:
        return InputError(f"{self._path}: cannot be read: {error.strerror}")


def describe_datasets(
    job: Job,
    identity: dict[str, Any],
    tokenizer: Tokenizer,
    totals: Totals,
    datasets: Sequence[IndexedDataset],
    hashes: Sequence[FileHash],
    progress: Progress = without_progress,
) -> dict[str, Any]:
    """The content of the card, as JSON. Lengths are read once.

    Args:
        identity: of the job, with its inputs as they were read.
        totals: of its tasks.
        datasets: one for each key of the documents, opened under their names.
        hashes: of their .bin files, perhaps not finished.

    Raises:
        InputError: a dataset's file cannot be read.
    """
    template = job.tokenizer.template(tokenizer)
    tokenizer_type, tokenizer_files, tiktoken = identity["tokenizer"]
    described = {
        key: {
            "name": os.path.basename(dataset.prefix),
            "documents": dataset.num_documents,
            "empty_documents_left_out": num_empty,
            "tokens": dataset.num_tokens,
            "dtype": str(dataset.dtype),
            "lengths": _lengths(dataset, progress),
        }
        for key, dataset, num_empty in zip(job.keys, datasets, totals.num_empty, strict=True)
    }
    for entry, dataset, bin_hash in zip(described.values(), datasets, hashes, strict=True):
        idx = idx_path(dataset.prefix)
        for _ in progress(range(1), 1, f"hashing {entry['name']}"):
            entry["files"] = [_file(bin_path(dataset.prefix), bin_hash), _file(idx, FileHash(idx))]
    return {
        "made_by": f"megatron_bfp {__version__}",
        "inputs": [{"path": path, "bytes": num_bytes} for path, num_bytes, _ in identity["inputs"]],
        "part": identity["part"],
        "bad_documents_left_out": totals.num_bad,
        "tokenizer": {"type": tokenizer_type, **tokenizer_files, "vocab_size": tokenizer.vocab_size},
        "tiktoken": tiktoken if tokenizer_type == "TikTokenizer" else None,
        "each_document": {
            "before": token_names(template.before, tokenizer),
            "after": token_names(template.after, tokenizer),
        },
        "datasets": described,
    }


def write_card(prefix: str, card: dict[str, Any]) -> None:
    """Write the card as a page and as JSON; existing ones are replaced.

    Raises:
        InputError: a file cannot be written.
    """
    contents = {".json": json.dumps(card, indent=2) + "\n", ".md": card_page(prefix, card)}
    for ending, content in contents.items():
        path = prefix + CARD_SUFFIX + ending
        try:
            write_whole(path, content.encode(errors="backslashreplace"))
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error.strerror}") from None


def card_page(prefix: str, card: dict[str, Any]) -> str:
    """The card in Markdown."""
    inputs, tokenizer = card["inputs"], card["tokenizer"]
    part = card["part"]
    lines = [f"- `{Location(file['path']).name}` ({file['bytes']:,} bytes)" for file in inputs[:LISTED_FILES]]
    if len(inputs) > LISTED_FILES:
        lines.append(f"- and {len(inputs) - LISTED_FILES:,} more: see `{os.path.basename(prefix)}{CARD_SUFFIX}.json`")
    of_part = f" This is part {part[0]} (from 0) of {part[1]}." if part else ""
    bad = card["bad_documents_left_out"]
    listed = f", listed in `{os.path.basename(prefix)}{BAD_DOCUMENTS_SUFFIX}`" if bad else ""
    before, after = ([f"`{token}`" for token in card["each_document"][side]] for side in ("before", "after"))
    parts = [
        f"# {os.path.basename(prefix)}",
        f"A tokenized dataset for Megatron, written by {card['made_by']}.",
        "## Made from",
        f"{len(inputs):,} file{'s' * (len(inputs) != 1)}, {sum(file['bytes'] for file in inputs):,} bytes."
        f"{of_part} Bad documents left out: {bad:,}{listed}.",
        "\n".join(lines),
        "## Tokenizer",
        "\n".join(f"- {name.replace('_', ' ')}: {value}" for name, value in tokenizer.items() if name != "class"),
        f"Each document: {', '.join([*before, 'its text', *after])}.",
        *(_dataset_section(key, dataset) for key, dataset in card["datasets"].items()),
    ]
    return "\n\n".join(parts) + "\n"


def _dataset_section(key: str, dataset: dict[str, Any]) -> str:
    files = [[f"`{file['name']}`", file["bytes"]] for file in dataset["files"]]
    hashes = "\n".join(f"{file['sha256']}  {file['name']}" for file in dataset["files"])
    return "\n\n".join(
        [
            f"## {dataset['name']}",
            f"Texts under `{key}`: {dataset['documents']:,} documents ({dataset['empty_documents_left_out']:,} empty "
            f"ones left out), {dataset['tokens']:,} tokens, {dataset['dtype']}.",
            *(_length_tables(dataset["lengths"]) if dataset["documents"] else ()),
            format_table(["file", "bytes"], files, markdown=True, width=None),
            "Check the files with `sha256sum --check`:",
            f"```\n{hashes}\n```",
        ]
    )


def _length_tables(lengths: dict[str, Any]) -> Iterator[str]:
    """Percentiles, and the histogram as bars of text: every viewer of Markdown shows them."""
    names, histogram = [name for name in lengths if name != "histogram"], lengths["histogram"]
    most = max(row["documents"] for row in histogram)
    bars = [
        [f"{row['longest']:,}", row["documents"], row["tokens"], "█" * -(-row["documents"] * BAR // most)]
        for row in histogram
    ]
    yield "Tokens per document:"
    yield format_table(names, [[lengths[name] for name in names]], markdown=True)
    yield format_table(["up to", "documents", "tokens", "share of documents"], bars, markdown=True, width=None)


def _lengths(dataset: IndexedDataset, progress: Progress) -> dict[str, Any]:
    """Percentiles by nearest rank, and a histogram by powers of two, in memory that depends on neither."""
    short, long = np.zeros(SHORT, np.int64), [np.empty(0, np.int64)]
    steps = range(0, dataset.num_documents, LENGTHS_AT_ONCE)
    for first in progress(steps, len(steps), "reading lengths"):
        lengths = dataset.document_lengths[first : first + LENGTHS_AT_ONCE]
        short += np.bincount(lengths[lengths < SHORT], minlength=SHORT)
        long.append(lengths[lengths >= SHORT].astype(np.int64))
    long_values, long_counts = np.unique(np.concatenate(long), return_counts=True)
    present = np.flatnonzero(short)
    values = np.concatenate([present, long_values])
    documents = np.cumsum(np.concatenate([short[present], long_counts]))
    tokens = np.cumsum(values * np.diff(documents, prepend=0))
    if not len(values):
        return {"histogram": []}
    ranks = [max(1, -(-int(documents[-1]) * percent // 100)) for percent in PERCENT.values()]
    percentiles = dict(zip(PERCENT, values[np.searchsorted(documents, ranks)].tolist(), strict=True))
    edges = 1 << np.arange(int(values[-1] - 1).bit_length() + 1, dtype=np.int64)
    ends = np.searchsorted(values, edges, side="right")
    in_class = [np.diff(np.concatenate([[0], total])[ends], prepend=0).tolist() for total in (documents, tokens)]
    rows = zip(edges.tolist(), *in_class, strict=True)
    histogram = [{"longest": edge, "documents": n, "tokens": t} for edge, n, t in rows if n]
    return {**percentiles, "mean": round(dataset.num_tokens / int(documents[-1]), 1), "histogram": histogram}


def _file(path: str, sha256: FileHash) -> dict[str, Any]:
    return {"name": os.path.basename(path), "bytes": os.path.getsize(path), "sha256": sha256.hexdigest()}
