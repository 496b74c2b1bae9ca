"""``megatron-bfp-preprocess``, also ``tools/preprocess_bfp.py``: documents to a dataset, datasets to indexes."""

import argparse
import signal
import sys
from collections.abc import Sequence

from ..console import run, say, typed_name
from ..indexed_dataset.merging import merge
from ..indexed_dataset.reader import IndexedDataset
from ..inspection.report import count_cuts
from ..preprocessing.job import check_parts
from ..preprocessing.readers.input_files import input_files
from ..preprocessing.summary import WrittenDataset
from ..preprocessing.task import load_tokenizers
from ..preprocessing.write import write_datasets
from ..progress import terminal_progress
from ..sequence_index.builder import build
from ..sequence_index.key import SPLIT_NAMES, IndexKey, index_directory
from ..sequence_index.reader import SequenceIndex
from ..tables import format_table, wrap
from ..tokenizers.special_tokens import template_in_words
from .preprocess_options import executor_of, job_of, parse


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and do what it says.

    Raises:
        BFPError: bad options or input.
    """
    options, notes = parse(argv), []
    if options.merge:
        for warning in check_parts(options.merge):
            print(f"{typed_name()}: warning: {warning}", file=sys.stderr)
        datasets = [WrittenDataset(merge(options.output_prefix, options.merge, terminal_progress), 0, 0)]
    elif options.indexed:
        datasets = [WrittenDataset(IndexedDataset(prefix, needs_bin=False), 0, 0) for prefix in options.indexed]
    else:
        datasets, note = _written(options)
        notes = [wrap(note)]
    indexes = [_build_indexes(written.dataset, options) for written in datasets]
    say("\n\n".join([*map(_description, datasets, indexes), *notes]))


def console() -> int:
    """Run the command; returns its exit status: 0 done, 2 bad options or input, 130 interrupted, 143 terminated."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that unfinished files are removed
    return run(main, typed_name())


def _written(options: argparse.Namespace) -> tuple[list[WrittenDataset], str]:
    """The datasets of documents, written or finished before, and which special tokens each document has."""
    files = input_files(options.input)
    for line in [*map(str, files.left_out), *(f"warning: {warning}" for warning in files.warnings)]:
        print(f"{typed_name()}: {line}", file=sys.stderr)
    job = job_of(options, files.paths)
    datasets = write_datasets(job, executor_of(options), terminal_progress)
    tokenizer = load_tokenizers(job.tokenizer)[0]
    return datasets, f"Each document: {template_in_words(job.tokenizer.template(tokenizer), tokenizer)}"


def _build_indexes(dataset: IndexedDataset, options: argparse.Namespace) -> list[tuple[str, SequenceIndex]]:
    """The indexes of a dataset, each with its split's name."""
    names = {"all": "train"} if options.split is None else dict(zip(SPLIT_NAMES, SPLIT_NAMES))
    cap, directory, built = options.max_documents_per_sequence, index_directory(dataset.prefix), []
    for seq_length in options.seq_length:
        for label, name in names.items():
            key = IndexKey.for_split(dataset.num_documents, seq_length, options.split, name, cap)
            if key is not None:
                built.append((label, build(dataset, key, directory, options.overwrite, terminal_progress)))
    return built


def _description(written: WrittenDataset, indexes: list[tuple[str, SequenceIndex]]) -> str:
    """What a dataset and its indexes are, for a terminal of 80 columns: first the documents that are cut."""
    dataset = written.dataset
    left_out = f"{written.num_empty:,} empty and {written.num_bad:,} bad ones left out"
    size = wrap(f"{dataset.num_documents:,} documents ({left_out}), {dataset.num_tokens:,} tokens, {dataset.dtype}")
    if not indexes:
        return f"{dataset.prefix}\n{size}"
    note = (
        "Documents cut needlessly, that is, though they fit into one sequence: by concatenation, which joins documents "
        "in file order and cuts every L tokens, and by packing. Longer ones must be cut."
    )
    return "\n\n".join([f"{dataset.prefix}\n{wrap(note)}", _cuts(indexes), size, _sizes(indexes)])


def _cuts(indexes: list[tuple[str, SequenceIndex]]) -> str:
    """A row for each index: its documents that are cut, before and after."""
    rows = []
    for split, index in indexes:
        key = index.key
        lengths = index.dataset.document_lengths.range(key.first_document, key.end_document)
        fitting, longer = count_cuts(lengths, key.seq_length, [key.seq_length], terminal_progress)
        needlessly = [fitting.cut_by_concatenation, fitting.cut_by_packing]
        rows.append([key.name, split, *needlessly, longer.documents])
    return format_table(["index", "split", "concatenation", "packing", "longer than L"], rows)


def _sizes(indexes: list[tuple[str, SequenceIndex]]) -> str:
    """A row for each index: what it holds."""
    rows = []
    for _, index in indexes:
        counts, positions = index.counts, index.counts["sequences"] * index.key.seq_length
        share = f"{100 * counts['padding'] / positions:.4f}" if positions else "0"
        names = ("documents", "empty_documents", "tokens", "sequences", "padding")
        rows.append([index.key.name, *(counts[name] for name in names), share])
    return format_table(["index", "documents", "empty", "tokens", "sequences", "padding", "padding %"], rows)
