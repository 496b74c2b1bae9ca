"""``python -m megatron_bfp show``: what one training sequence consists of."""

import argparse

from ..arguments import checked_cap, checked_seq_length
from ..console import say
from ..errors import InputError, OptionError
from ..files import write_whole
from ..indexed_dataset.reader import IndexedDataset
from ..inspection.page import to_html
from ..inspection.view import to_text, view_sequence
from ..sequence_index.key import SPLIT_NAMES
from ..sequence_index.split import PackedSplit
from ..tokenizers.registry import load_tokenizer
from .shared import dataset_prefix

SEED = 1234
"""Megatron's default for --seed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    parser.add_argument(
        "prefix", type=dataset_prefix, metavar="PREFIX", help="the dataset's path, with or without .bin or .idx"
    )
    parser.add_argument("--seq-length", type=int, required=True, metavar="L", help="tokens a sequence")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--sequence", type=int, metavar="I", help="a sequence of the index, counted from 0")
    which.add_argument("--sample", type=int, metavar="S", help="a sample of the dataset in training, counted from 0")
    parser.add_argument("--seed", type=int, help=f"the run's, which orders its samples (default: {SEED})")
    parser.add_argument("--split", help="as in training: 969,30,1 (default: an index of all documents)")
    parser.add_argument("--split-name", choices=SPLIT_NAMES, help="which of its splits (default: train)")
    parser.add_argument("--max-documents-per-sequence", type=int, metavar="N", help="as in training")
    parser.add_argument("--data-cache-path", metavar="P", help="where the index is if it is not beside the data")
    parser.add_argument("--tokenizer-type", default="HuggingFaceTokenizer", help="default: %(default)s")
    parser.add_argument("--tokenizer-model", metavar="PATH", help="show text: a tokenizer.json, or its folder")
    parser.add_argument("--eod-token", metavar="TEXT", help="the end-of-document token, where the tokenizer names none")
    parser.add_argument("--bos-token", metavar="TEXT", help="the token that begins documents, where it names none")
    parser.add_argument("--text", action="store_true", help="print the text of every chunk in full")
    parser.add_argument("--html", metavar="FILE", help="write a page that shows every token and what it predicts")


def show(options: argparse.Namespace) -> None:
    """Print a sequence and write its page.

    Raises:
        BFPError: bad options, no such index or sequence, damaged data, or a page that cannot be written.
    """
    _check(options)
    tokenizer = None
    if options.tokenizer_model is not None:
        tokenizer = load_tokenizer(
            options.tokenizer_type,
            options.tokenizer_model,
            options.eod_token,
            needs_eod=False,
            bos_token=options.bos_token,
        )
    packed_split = _open_split(options)
    sequence, origin = options.sequence, ""
    if options.sample is not None and len(packed_split):
        seed = SEED if options.seed is None else options.seed
        sequence = packed_split.sequence_of(options.sample, seed)
        origin = f"sample {options.sample} with seed {seed} (epoch {options.sample // len(packed_split)})"
    view = view_sequence(packed_split.index, sequence, origin)
    text = to_text(view, tokenizer, options.text)
    if options.html is not None:
        _write_page(options.html, to_html(view, tokenizer))
    say(text)
    if options.html is not None:
        say(f"\nwrote {options.html}")


def _check(options: argparse.Namespace) -> None:
    """Refuse what cannot work before anything is read."""
    checked_seq_length("--seq-length", options.seq_length)
    checked_cap(options.max_documents_per_sequence)
    if options.sample is not None and options.sample < 0:
        raise OptionError(f"--sample {options.sample}: samples are counted from 0")
    if options.seed is not None and options.sample is None:
        raise OptionError("--seed orders samples: give it with --sample, not with --sequence")
    if options.split_name is not None and options.split is None:
        raise OptionError(f"--split-name {options.split_name}: give --split too, as in training")
    for name in ("text", "eod_token", "bos_token"):
        if getattr(options, name) and options.tokenizer_model is None:
            raise OptionError(f"--{name.replace('_', '-')} needs --tokenizer-model")


def _open_split(options: argparse.Namespace) -> PackedSplit:
    """The split that the options name."""
    dataset, split_name = IndexedDataset(options.prefix), options.split_name or SPLIT_NAMES[0]
    cap, cache_path = options.max_documents_per_sequence, options.data_cache_path
    packed_split = PackedSplit.open(
        dataset, options.seq_length, options.split, split_name, cap, cache_path, builds=False
    )
    if packed_split is None:
        raise OptionError(f"--split {options.split}: its {split_name} split has no documents")
    return packed_split


def _write_page(path: str, page: str) -> None:
    try:
        write_whole(path, page.encode())
    except OSError as error:
        raise InputError(f"--html {path}: cannot be written: {error.strerror}") from None
