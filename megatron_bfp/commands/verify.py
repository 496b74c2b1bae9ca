"""``megatron-bfp verify``: every byte of the indexes of datasets, and with ``--tokens`` every token."""

import argparse
import os
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from ..arguments import checked_count
from ..console import say
from ..errors import OptionError
from ..indexed_dataset.reader import IndexedDataset
from ..indexed_dataset.verify import verify_tokens
from ..progress import terminal_progress
from ..sequence_index.reader import SequenceIndex
from ..sequence_index.verify import verify_all
from ..tables import format_table
from ..tokenizers.registry import load_tokenizer
from ..tokenizers.special_tokens import document_template
from .json_output import KEYS_OF_DATASET, dataset_entry, index_entry, say_json
from .shared import add_append_bos, add_cache_path, add_json, add_prefixes, add_tokenizer, columns_of_counts

DESCRIPTION = (
    "Check every index of datasets against their .idx, byte for byte. With --tokens, also check every token of the "
    ".bin. The first fault is an error that names the file, and exit status 2."
)
EPILOG = f"""\
keys of --json, printed if nothing is wrong:
{KEYS_OF_DATASET}
    tokens_checked: whether --tokens was given"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    add_prefixes(parser)
    add_cache_path(parser)
    parser.add_argument(
        "--tokens",
        action="store_true",
        help="also read the .bin: ids must be in the vocabulary, and BOS and EOD where each document begins and ends",
    )
    add_tokenizer(parser, "--tokens takes --vocab-size")
    add_append_bos(parser, "each document begins with the BOS token, or need not")
    numbers = parser.add_argument_group("numbers instead of a tokenizer, for --tokens")
    numbers.add_argument("--vocab-size", type=int, metavar="N", help="ids are below N (default: the tokenizer's)")
    numbers.add_argument("--eod-id", type=int, metavar="ID", help="documents end with this id (default: not checked)")
    numbers.add_argument("--bos-id", type=int, metavar="ID", help="documents begin with this id (default: not checked)")
    add_json(parser)


def execute(options: argparse.Namespace) -> None:
    """Verify the datasets, and print a row for each index.

    Raises:
        BFPError: bad options, or something is wrong.
    """
    vocabulary = _vocabulary(options)
    verified = [_verify(prefix, options.data_cache_path, vocabulary) for prefix in options.prefixes]
    if options.json:
        entries = [
            dataset_entry(dataset)
            | {"tokens_checked": options.tokens, "indexes": [index_entry(index) for index in indexes]}
            for dataset, indexes in verified
        ]
        say_json({"datasets": entries})
        return
    parts = []
    for dataset, indexes in verified:
        if options.tokens:
            amount = f"{dataset.num_tokens:,} tokens of {dataset.num_documents:,} documents"
            parts.append(f"{dataset.prefix}:\n{amount} are right")
        for folder, in_folder in groupby(indexes, key=lambda index: os.path.dirname(index.path)):
            parts.append(f"{folder}:\n{_table(list(in_folder))}")
    say("\n\n".join(parts))


def _verify(
    prefix: str, cache_path: str | None, vocabulary: "_Vocabulary | None"
) -> tuple[IndexedDataset, list[SequenceIndex]]:
    """Check one dataset; returns it and its indexes."""
    if vocabulary is not None:
        verify_tokens(IndexedDataset(prefix), vocabulary.size, vocabulary.eod, terminal_progress, vocabulary.before)
    indexes = verify_all(prefix, cache_path, terminal_progress)
    return indexes[0].dataset, indexes


def _table(indexes: Sequence[SequenceIndex]) -> str:
    columns = columns_of_counts(index.counts for index in indexes)
    rows = [[index.key.name, "whole", *(index.counts.get(name, "") for name in columns.values())] for index in indexes]
    return format_table(["index", "state", *columns], rows)


class _Vocabulary(NamedTuple):
    """What tokens are checked against."""

    size: int
    eod: int | None
    """The token that ends every document; None if that is not checked."""
    before: tuple[int, ...]
    """Tokens that each document begins with."""


OF_TOKENIZER = ("tokenizer_model", "eod_token", "bos_token", "append_bos")
OF_NUMBERS = ("vocab_size", "eod_id", "bos_id")


def _vocabulary(options: argparse.Namespace) -> _Vocabulary | None:
    """What tokens are checked against; None without ``--tokens``."""
    given = [name for name in (*OF_TOKENIZER, *OF_NUMBERS) if getattr(options, name) is not None]
    if not options.tokens:
        if given:
            raise OptionError(f"{_option(given[0])} is for --tokens; give it, too")
        return None
    if (options.tokenizer_model is None) == (options.vocab_size is None):
        raise OptionError("--tokens needs either --tokenizer-model or --vocab-size, with --eod-id if there is an EOD")
    return _of_numbers(options) if options.tokenizer_model is None else _of_tokenizer(options)


def _of_numbers(options: argparse.Namespace) -> _Vocabulary:
    """From ``--vocab-size``, ``--eod-id`` and ``--bos-id``."""
    vocab_size = checked_count("--vocab-size", options.vocab_size)
    for name in OF_TOKENIZER:
        if getattr(options, name) is not None:
            raise OptionError(f"{_option(name)} is of a tokenizer; with --vocab-size, give --eod-id and --bos-id")
    for name in ("eod_id", "bos_id"):
        number = getattr(options, name)
        if number is not None and not 0 <= number < vocab_size:
            raise OptionError(f"{_option(name)} {number}: is outside the vocabulary of --vocab-size {vocab_size}")
    return _Vocabulary(vocab_size, options.eod_id, () if options.bos_id is None else (options.bos_id,))


def _of_tokenizer(options: argparse.Namespace) -> _Vocabulary:
    """From ``--tokenizer-model``."""
    for name in ("eod", "bos"):
        if getattr(options, f"{name}_id") is not None:
            raise OptionError(f"--{name}-id goes with --vocab-size; name a tokenizer's token by --{name}-token")
    tokenizer = load_tokenizer(
        options.tokenizer_type, options.tokenizer_model, options.eod_token, bos_token=options.bos_token
    )
    template = document_template(tokenizer, options.append_bos, append_eod=True)
    return _Vocabulary(tokenizer.vocab_size, tokenizer.eod, template.before)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
