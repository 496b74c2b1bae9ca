"""``python -m megatron_bfp verify``: every byte of a dataset's indexes, and with ``--tokens`` every token."""

import argparse
import os
from collections.abc import Sequence
from itertools import groupby

from .command_line import dataset_prefix, say
from .errors import OptionError
from .index_verification import verify_all
from .indexed_dataset import IndexedDataset
from .packing import checked_count
from .preprocessing.tokenizers import load_tokenizer
from .progress import terminal_progress
from .sequence_index import SequenceIndex
from .tables import format_table
from .token_verification import verify_tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    parser.add_argument(
        "prefix", type=dataset_prefix, metavar="PREFIX", help="the dataset's path, with or without .bin or .idx"
    )
    parser.add_argument("--data-cache-path", help="also check the dataset's indexes in this cache")
    parser.add_argument(
        "--tokens", action="store_true", help="read the .bin, too: ids in the vocabulary, an EOD at each document's end"
    )
    parser.add_argument("--tokenizer-type", default="HuggingFaceTokenizer", help="default: %(default)s")
    parser.add_argument("--tokenizer-model", metavar="PATH", help="the tokenizer that --tokens goes by")
    parser.add_argument("--eod-token", metavar="TEXT", help="its end-of-document token, where it names none")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="in place of a tokenizer: ids are below N")
    parser.add_argument("--eod-id", type=int, metavar="ID", help="in place of a tokenizer: the id of the EOD")


def verify_command(options: argparse.Namespace) -> None:
    """Verify what the options name, and print a row for each index.

    Raises:
        BFPError: bad options, or something is wrong.
    """
    vocabulary = _vocabulary(options)
    parts = []  # printed at the end: whoever reads may stop before it
    if vocabulary is not None:
        dataset = IndexedDataset(options.prefix)
        verify_tokens(dataset, *vocabulary, terminal_progress)
        parts.append(
            f"{options.prefix}:\n{dataset.num_tokens:,} tokens of {dataset.num_documents:,} documents are right"
        )
    indexes = verify_all(options.prefix, options.data_cache_path, terminal_progress)
    for folder, those_there in groupby(indexes, key=lambda index: os.path.dirname(index.path)):
        parts.append(f"{folder}:\n{_table(list(those_there))}")
    say("\n\n".join(parts))


def _table(indexes: Sequence[SequenceIndex]) -> str:
    names = ("documents", "empty_documents", "tokens", "sequences", "padding")
    rows = [[index.key.name, "whole", *(index.counts[name] for name in names)] for index in indexes]
    return format_table(["index", "state", "documents", "empty", "tokens", "sequences", "padding"], rows)


def _vocabulary(options: argparse.Namespace) -> tuple[int, int | None] | None:
    """The size of the vocabulary and the EOD that tokens are checked by; None where they are not to be checked."""
    numbers = (options.vocab_size, options.eod_id)
    if not options.tokens:
        if options.tokenizer_model is not None or numbers != (None, None):
            raise OptionError("--tokenizer-model, --vocab-size and --eod-id are for --tokens; give it, too")
        return None
    if (options.tokenizer_model is None) == (options.vocab_size is None):
        raise OptionError("--tokens needs either --tokenizer-model or --vocab-size, with --eod-id if there is an EOD")
    if options.tokenizer_model is None:
        vocab_size = checked_count("--vocab-size", options.vocab_size)
        if options.eod_id is not None and not 0 <= options.eod_id < vocab_size:
            raise OptionError(f"--eod-id {options.eod_id}: is outside the vocabulary of --vocab-size {vocab_size}")
        return vocab_size, options.eod_id
    if options.eod_id is not None:
        raise OptionError("--eod-id goes with --vocab-size; name the EOD of a tokenizer by --eod-token")
    tokenizer = load_tokenizer(options.tokenizer_type, options.tokenizer_model, options.eod_token)
    return tokenizer.vocab_size, tokenizer.eod
