"""``python -m megatron_bfp verify``: every byte of a dataset's indexes, and with ``--tokens`` every token."""

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
from .shared import dataset_prefix


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    parser.add_argument(
        "prefix", type=dataset_prefix, metavar="PREFIX", help="the dataset's path, with or without .bin or .idx"
    )
    parser.add_argument("--data-cache-path", help="also check the dataset's indexes in this cache")
    parser.add_argument(
        "--tokens", action="store_true", help="read the .bin, too: ids in the vocabulary, BOS and EOD of each document"
    )
    parser.add_argument("--tokenizer-type", default="HuggingFaceTokenizer", help="default: %(default)s")
    parser.add_argument("--tokenizer-model", metavar="PATH", help="the tokenizer that --tokens goes by")
    parser.add_argument("--eod-token", metavar="TEXT", help="its end-of-document token, where it names none")
    parser.add_argument("--bos-token", metavar="TEXT", help="its token that begins a document, where it names none")
    parser.add_argument(
        "--append-bos",
        action=argparse.BooleanOptionalAction,
        help="each document begins with the BOS, or need not (default: it does if Megatron's own tool writes one)",
    )
    parser.add_argument("--vocab-size", type=int, metavar="N", help="in place of a tokenizer: ids are below N")
    parser.add_argument("--eod-id", type=int, metavar="ID", help="in place of a tokenizer: the id of the EOD")
    parser.add_argument("--bos-id", type=int, metavar="ID", help="in place of a tokenizer: the id of the BOS")


def verify_command(options: argparse.Namespace) -> None:
    """Verify what the options name, and print a row for each index.

    Raises:
        BFPError: bad options, or something is wrong.
    """
    vocabulary = _vocabulary(options)
    parts = []  # printed at the end: whoever reads may stop before it
    if vocabulary is not None:
        dataset = IndexedDataset(options.prefix)
        verify_tokens(dataset, vocabulary.size, vocabulary.eod, terminal_progress, vocabulary.before)
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


class _Vocabulary(NamedTuple):
    """What tokens are checked by."""

    size: int
    eod: int | None
    before: tuple[int, ...]
    """Tokens that each document begins with."""


OF_TOKENIZER = ("tokenizer_model", "eod_token", "bos_token", "append_bos")
OF_NUMBERS = ("vocab_size", "eod_id", "bos_id")


def _vocabulary(options: argparse.Namespace) -> _Vocabulary | None:
    """What tokens are checked by; None where they are not to be checked."""
    given = [name for name in (*OF_TOKENIZER, *OF_NUMBERS) if getattr(options, name) is not None]
    if not options.tokens:
        if given:
            raise OptionError(f"--{given[0].replace('_', '-')} is for --tokens; give it, too")
        return None
    if (options.tokenizer_model is None) == (options.vocab_size is None):
        raise OptionError("--tokens needs either --tokenizer-model or --vocab-size, with --eod-id if there is an EOD")
    if options.tokenizer_model is None:
        vocab_size = checked_count("--vocab-size", options.vocab_size)
        for name in set(given) & set(OF_TOKENIZER):
            raise OptionError(f"--{name.replace('_', '-')} is of a tokenizer; with --vocab-size, give ids")
        for name in ("eod_id", "bos_id"):
            number = getattr(options, name)
            if number is not None and not 0 <= number < vocab_size:
                option = f"--{name.replace('_', '-')} {number}"
                raise OptionError(f"{option}: is outside the vocabulary of --vocab-size {vocab_size}")
        return _Vocabulary(vocab_size, options.eod_id, () if options.bos_id is None else (options.bos_id,))
    for name in ("eod", "bos"):
        if getattr(options, f"{name}_id") is not None:
            raise OptionError(f"--{name}-id goes with --vocab-size; name a tokenizer's token by --{name}-token")
    tokenizer = load_tokenizer(
        options.tokenizer_type, options.tokenizer_model, options.eod_token, bos_token=options.bos_token
    )
    template = document_template(tokenizer, options.append_bos, append_eod=True)
    return _Vocabulary(tokenizer.vocab_size, tokenizer.eod, template.before)
