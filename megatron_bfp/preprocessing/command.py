"""``megatron-bfp-preprocess``, also ``tools/preprocess_bfp.py``: documents to a dataset, datasets to indexes."""

import argparse
import os
import shutil
import signal
import sys
from collections.abc import Sequence

from ..command_line import Parser, run
from ..errors import OptionError
from ..index_building import build
from ..index_format import IndexKey, document_range, index_directory
from ..indexed_dataset import IndexedDataset, bin_path, idx_path
from ..packing import checked_cap, checked_count
from ..progress import terminal_progress
from ..report import count_cuts
from ..sequence_index import SequenceIndex
from ..splits import SPLIT_NAMES, split_fractions
from ..tables import format_table
from .bad_documents import BadDocuments
from .dataset import WrittenDataset, write_datasets
from .documents import Place
from .inputs import BAD_DOCUMENTS_SUFFIX, input_files
from .tiktoken_tokenizer import PATTERNS, TiktokenOptions
from .tokenization import TokenizerOptions
from .tokenizers import TOKENIZER_TYPES

NAME = "preprocess_bfp"


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and do what it says.

    Raises:
        BFPError: bad options or input.
    """
    options = _parse(argv)
    if options.indexed:
        datasets = [WrittenDataset(IndexedDataset(prefix, needs_bin=False), 0, 0) for prefix in options.indexed]
    else:
        datasets = _write(options)
    rows = [row for written in datasets for row in _build_indexes(written.dataset, options)]
    _print_datasets(datasets)
    _print_indexes(rows)


def console() -> int:
    """Run the command; returns its exit status: 0 done, 2 bad options or input, 130 interrupted, 143 terminated."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that unfinished files are removed
    return run(main, NAME)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog=NAME,
        description="Tokenize documents into a Megatron dataset (.bin/.idx) and build its best-fit packed sequence "
        "index, or build the index of a dataset that exists (--indexed).",
    )
    source = parser.add_argument_group("documents to a dataset")
    source.add_argument(
        "--input",
        nargs="+",
        metavar="FILE",
        help="JSON Lines, plain or compressed (gzip, zstd, bzip2, xz), or Parquet: files, folders, patterns; - for "
        "standard input",
    )
    source.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys or columns, a dataset for each; meta.text is text inside meta (default: text)",
    )
    source.add_argument("--output-prefix", metavar="OUT", help="writes OUT_KEY_document.bin, .idx and .bfp/")
    source.add_argument("--tokenizer-type", default="HuggingFaceTokenizer", help=f"{', '.join(TOKENIZER_TYPES)}")
    source.add_argument(
        "--tokenizer-model", metavar="PATH", help="a tokenizer.json or its folder, a SentencePiece or a tiktoken file"
    )
    source.add_argument("--eod-token", metavar="TEXT", help="the end-of-document token, where the tokenizer names none")
    source.add_argument("--append-eod", action="store_true", help="end every document with the EOD token")
    source.add_argument("--workers", type=int, default=1, metavar="N", help="processes that tokenize (default: 1)")
    source.add_argument(
        "--skip-bad-documents", action="store_true", help=f"leave them out and list them in OUT{BAD_DOCUMENTS_SUFFIX}"
    )
    source.add_argument("--overwrite", action="store_true", help="replace a dataset or index that is there")
    tiktoken = parser.add_argument_group("TikTokenizer")
    tiktoken.add_argument(
        "--tiktoken-pattern",
        metavar="NAME",
        help=f"how texts are split: {', '.join(PATTERNS)}, or a regular expression (default in Megatron's JSON: v2)",
    )
    tiktoken.add_argument("--tiktoken-num-special-tokens", type=int, default=1000, metavar="N", help="default: 1000")
    tiktoken.add_argument("--tiktoken-special-tokens", nargs="+", metavar="TEXT", help="in the order of their ids")
    tiktoken.add_argument(
        "--vocab-size", type=int, metavar="N", help="special tokens included (default: at most 2**17)"
    )
    existing = parser.add_argument_group("datasets that exist")
    existing.add_argument("--indexed", nargs="+", metavar="PREFIX", help="paths without .bin or .idx")
    index = parser.add_argument_group("sequence index")
    index.add_argument("--seq-length", nargs="+", type=int, required=True, metavar="L", help="tokens a sequence")
    index.add_argument("--split", help="an index for each split, as in training: 969,30,1 (default: one for all)")
    index.add_argument("--max-documents-per-sequence", type=int, metavar="N", help="default: no limit")
    options = parser.parse_args(argv)
    _check(options)
    return options


def _check(options: argparse.Namespace) -> None:
    """Refuse what cannot work before anything is read or written."""
    if bool(options.input) == bool(options.indexed):
        raise OptionError("give either --input or --indexed")
    for seq_length in options.seq_length:
        checked_count("--seq-length", seq_length)
    checked_count("--workers", options.workers)
    checked_cap(options.max_documents_per_sequence)
    if options.split is not None:
        split_fractions(options.split)
    if options.indexed:
        return
    for name in ("output_prefix", "tokenizer_model"):
        if not getattr(options, name):
            raise OptionError(f"--{name.replace('_', '-')} is needed with --input")
    _check_keys(options.json_keys)
    for name in ("tiktoken_num_special_tokens", "vocab_size"):
        if getattr(options, name) is not None:
            checked_count(f"--{name.replace('_', '-')}", getattr(options, name))
    folder = os.path.dirname(os.path.abspath(options.output_prefix))
    if not os.path.isdir(folder):
        raise OptionError(f"--output-prefix {options.output_prefix}: there is no folder {folder}")
    for prefix in _prefixes(options).values():
        if not options.overwrite and _is_there(prefix):
            raise OptionError(
                f"{prefix}: a dataset of this name exists; choose another --output-prefix, give --overwrite, or build "
                f"its sequence indexes with --indexed {prefix}"
            )


def _check_keys(keys: Sequence[str]) -> None:
    """Refuse keys that cannot name a dataset each."""
    for key in keys:
        if not key or "/" in key or "\0" in key:
            raise OptionError(
                f"--json-keys {key!r}: a key is part of a file's name and cannot be empty or hold a slash"
            )
        if keys.count(key) > 1:
            raise OptionError(f"--json-keys {key!r}: is given twice; a dataset is written for each key")


def _is_there(prefix: str) -> bool:
    """Whether writing a dataset would replace one. A .bin without its .idx may be what a killed run left."""
    if os.path.exists(idx_path(prefix)) or os.path.exists(index_directory(prefix)):
        return True
    return os.path.exists(bin_path(prefix)) and not os.path.exists(idx_path(prefix) + ".part")


def _write(options: argparse.Namespace) -> list[WrittenDataset]:
    """Write and open the datasets."""
    paths, others = input_files(options.input)
    if others:
        first = Place(others[0]).name
        number = f"{len(others)} other file{'s' if len(others) > 1 else ''}"
        print(f"{NAME}: {number} in the folders given not read, by name: {first} ...", file=sys.stderr)
    prefixes = _prefixes(options)
    tokenizer = TokenizerOptions(
        options.tokenizer_type,
        options.tokenizer_model,
        options.eod_token,
        options.append_eod,
        _tiktoken_options(options),
    )
    with BadDocuments(options.output_prefix + BAD_DOCUMENTS_SUFFIX, options.skip_bad_documents) as bad:
        written = write_datasets(paths, prefixes, tokenizer, bad, options.workers, terminal_progress)
    for prefix in prefixes.values():
        shutil.rmtree(index_directory(prefix), ignore_errors=True)  # with --overwrite: of the dataset before
    return written


def _tiktoken_options(options: argparse.Namespace) -> TiktokenOptions:
    names = options.tiktoken_special_tokens
    return TiktokenOptions(
        options.tiktoken_pattern,
        options.tiktoken_num_special_tokens,
        None if names is None else tuple(names),
        options.vocab_size,
    )


def _prefixes(options: argparse.Namespace) -> dict[str, str]:
    """The path of each key's dataset, as Megatron names it."""
    return {key: f"{options.output_prefix}_{key}_document" for key in options.json_keys}


def _build_indexes(dataset: IndexedDataset, options: argparse.Namespace) -> list[tuple[str, SequenceIndex]]:
    """The indexes of a dataset, each with its split's name."""
    if options.split is None:
        splits = {"all": (0.0, 1.0)}
    else:
        splits = {name: fractions for name, fractions in zip(SPLIT_NAMES, split_fractions(options.split)) if fractions}
    built = []
    for seq_length in options.seq_length:
        for name, fractions in splits.items():
            first, end = document_range(fractions, dataset.num_documents)
            key = IndexKey(seq_length, first, end, options.max_documents_per_sequence)
            directory = index_directory(dataset.prefix)
            built.append((name, build(dataset, key, directory, options.overwrite, terminal_progress)))
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
