"""Input files to PREFIX.bin/.idx: documents are read here, tokenized by workers, and written here in order.

The order of documents is the order of the files and of the documents in them, whatever the number of workers.
"""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from ..errors import InputError
from ..indexed_dataset import IndexedDataset, IndexedDatasetWriter, optimal_dtype
from ..progress import Progress, without_progress
from .bad_documents import BadDocuments
from .documents import Place
from .inputs import read_batches
from .tokenization import TokenizedBatch, TokenizerOptions
from .verification import remove_dataset, verify_documents
from .workers import tokenized


@dataclass(frozen=True)
class WrittenDataset:
    """A dataset that was written, and what was left out of it."""

    dataset: IndexedDataset
    num_empty: int
    """Documents without text."""
    num_bad: int
    """Documents that cannot be used."""


def write_datasets(
    paths: Sequence[str],
    prefixes: dict[str, str],
    options: TokenizerOptions,
    bad: BadDocuments,
    workers: int = 1,
    progress: Progress = without_progress,
) -> list[WrittenDataset]:
    """Tokenize input files into a dataset for each key: all of them, or none.

    Args:
        paths: as ``input_files`` gives them.
        prefixes: for each key of the documents, the path of its dataset.
        bad: takes the bad documents.

    Raises:
        OptionError: the tokenizer or an input's library cannot be used.
        InputError: a document or file is bad, or there is no document at all. No file is left behind.
        IndexedDatasetError: a dataset cannot be written, or what is on disk is not right. No file is left behind.
    """
    tokenizer = options.load()
    keys = list(prefixes)
    with ExitStack() as stack:
        writers = [
            stack.enter_context(IndexedDatasetWriter(prefix, optimal_dtype(tokenizer.vocab_size)))
            for prefix in prefixes.values()
        ]
        batches = progress((batch for path in paths for batch in read_batches(path, keys)), None, "tokenizing")
        num_documents, num_empty = _write(writers, tokenized(batches, keys, options, tokenizer, workers), bad)
        _refuse_none(num_documents, num_empty, keys, paths, bad)
        for writer in writers:
            writer.finalize()
    try:
        eod = tokenizer.eod if options.append_eod else None
        datasets = [verify_documents(prefix, tokenizer.vocab_size, eod, progress) for prefix in prefixes.values()]
        bad.finalize()
    except BaseException:
        for prefix in prefixes.values():
            remove_dataset(prefix)
        raise
    return [WrittenDataset(dataset, empty, bad.number) for dataset, empty in zip(datasets, num_empty, strict=True)]


def _write(
    writers: list[IndexedDatasetWriter], batches: Iterable[TokenizedBatch], bad: BadDocuments
) -> tuple[list[int], list[int]]:
    """Write batches; returns the numbers of documents and of empty ones of each writer."""
    num_documents, num_empty = ([0] * len(writers) for _ in range(2))
    for batch in batches:
        bad.add(batch.bad)
        for place, (writer, texts) in enumerate(zip(writers, batch.texts, strict=True)):
            writer.add(texts.tokens, texts.lengths)
            num_documents[place] += len(texts.lengths)
            num_empty[place] += texts.num_empty
    return num_documents, num_empty


def _refuse_none(
    num_documents: list[int], num_empty: list[int], keys: Sequence[str], paths: Sequence[str], bad: BadDocuments
) -> None:
    """Refuse to write a dataset without a document."""
    for key, documents, empty in zip(keys, num_documents, num_empty, strict=True):
        if not documents:
            first = f"; the first bad one: {bad.first}" if bad.first else ""
            raise InputError(
                f"{_names(paths)}: 0 documents with text under {key!r} ({empty} empty ones, {bad.number} bad ones); "
                f"nothing to write{first}"
            )


def _names(paths: Sequence[str]) -> str:
    names = [Place(path).name for path in paths[:3]]
    return ", ".join(names) + (f" and {len(paths) - 3} more files" if len(paths) > 3 else "")
