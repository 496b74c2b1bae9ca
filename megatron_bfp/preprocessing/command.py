"""``megatron-bfp-preprocess``, also ``tools/preprocess_bfp.py``: documents to a dataset, datasets to indexes."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from ..command_line import run, typed_name
from ..index_building import build
from ..index_format import IndexKey, index_directory
from ..indexed_dataset import IndexedDataset
from ..merging import merge
from ..progress import terminal_progress
from ..report import count_cuts
from ..sequence_index import SequenceIndex
from ..splits import SPLIT_NAMES
from ..tables import format_table
from .dataset import write_datasets
from .input_files import input_files
from .options import executor_of, parse, run_of
from .parts import check_parts
from .shards import load_tokenizers
from .special_tokens import template_in_words
from .summary import WrittenDataset


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and do what it says.

    Raises:
        BFPError: bad options or input.
    """
    options = parse(argv)
    if options.merge:
        for warning in check_parts(options.merge):
            print(f"{typed_name()}: warning: {warning}", file=sys.stderr)
        datasets = [WrittenDataset(merge(options.output_prefix, options.merge, terminal_progress), 0, 0)]
    elif options.indexed:
        datasets = [WrittenDataset(IndexedDataset(prefix, needs_bin=False), 0, 0) for prefix in options.indexed]
    else:
        datasets = _written(options)
    rows = [row for written in datasets for row in _build_indexes(written.dataset, options)]
    _print_datasets(datasets)
    if rows:
        _print_indexes(rows)


def console() -> int:
    """Run the command; returns its exit status: 0 done, 2 bad options or input, 130 interrupted, 143 terminated."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that unfinished files are removed
    return run(main, typed_name())


def _written(options: argparse.Namespace) -> list[WrittenDataset]:
    """The datasets of documents, written or finished before."""
    files = input_files(options.input)
    for line in [*map(str, files.left_out), *(f"warning: {warning}" for warning in files.warnings)]:
        print(f"{typed_name()}: {line}", file=sys.stderr)
    run = run_of(options, files.paths)
    datasets = write_datasets(run, executor_of(options), terminal_progress)
    tokenizer = load_tokenizers(run.tokenizer)[0]
    print(f"Each document: {template_in_words(run.tokenizer.template(tokenizer), tokenizer)}")
    return datasets


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


def _print_datasets(datasets: list[WrittenDataset]) -> None:
    rows = []
    for written in datasets:
        dataset = written.dataset
        left_out = (written.num_empty, written.num_bad)
        rows.append([dataset.prefix, dataset.num_documents, *left_out, dataset.num_tokens, str(dataset.dtype)])
    print(format_table(["dataset", "documents", "empty, left out", "bad, left out", "tokens", "dtype"], rows))
    print()


def _print_indexes(rows: list[tuple[str, SequenceIndex]]) -> None:
    header = [
        "dataset",
        "index",
        "split",
        "documents",
        "empty documents",
        "tokens",
        "sequences",
        "padding",
        "padding %",
    ]
    counts, cuts = [], []
    for split, index in rows:
        key, found = index.key, index.counts
        positions = found["sequences"] * key.seq_length
        share = f"{100 * found['padding'] / positions:.4f}" if positions else "0"
        names = ("documents", "empty_documents", "tokens", "sequences", "padding")
        counts.append(
            [os.path.basename(index.dataset.prefix), key.name, split, *(found[name] for name in names), share]
        )
        lengths = index.dataset.document_lengths.range(key.first_document, key.end_document)
        fitting, longer = count_cuts(lengths, key.seq_length, [key.seq_length], terminal_progress)
        for way in ("concatenation", "packing"):
            needlessly, needed = (getattr(found, f"cut_by_{way}") for found in (fitting, longer))
            cuts.append([*counts[-1][:3], way, needlessly + needed, needlessly])
    print(format_table(header, counts))
    print()
    print(format_table([*header[:3], "cut by", "documents cut", "of these, at most seq_length tokens long"], cuts))
    print("Concatenation joins documents in file order and cuts every seq_length tokens.", flush=True)
