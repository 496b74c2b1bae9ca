"""What all verbs share: the parser, each option that several of them take, and the prefix that a path stands for.

An option has one definition here, so its name, type and meaning are the same wherever it is taken.
"""

import argparse
import os
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from .._version import __version__
from ..arguments import checked_cap, checked_seq_length
from ..errors import OptionError
from ..indexed_dataset.format import idx_path
from ..samples.fill_in_the_middle import FimDocuments
from ..sequence_index.key import index_directory, split_fractions
from ..tokenizers.registry import TOKENIZER_TYPES

SEED = 1234
"""Megatron's default for --seed."""

OF_INDEX = ("split", "max_documents_per_sequence", "even_sequences", "targets_only", "fim_rate", "seed")
"""Options that say which index is built for a ``--seq-length``."""

Options = argparse._ActionsContainer
"""A parser or a group of one: whatever options are added to."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are ours, and which takes ``--split -1,1,0`` for a value and not an option."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.add_argument(
            "--version", action="version", version=f"%(prog)s {__version__}", help="print the version and exit"
        )

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse's, after joining ``--split VALUE`` to ``--split=VALUE``."""
        words = list(sys.argv[1:] if args is None else args)
        for position in range(len(words) - 1):
            if words[position] == "--split":
                words[position : position + 2] = [f"--split={words[position + 1]}"]
                break
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise an OptionError."""
        raise OptionError(message)

    def _print_message(self, message: str, file: Any = None) -> None:
        """As argparse's, which hides that a long help text could not be written."""
        if message:
            (file or sys.stderr).write(message)


def dataset_prefix(path: str) -> str:
    """The prefix of the dataset that a path names, for ``type=`` of an option.

    People complete file names with the tab key and copy what was printed: ``X.idx``, ``X.bin``, ``X.bfp/``,
    ``X.bfp/s2048-d0-9`` and ``X/`` all mean the dataset X. A dataset whose prefix ends so is still that dataset, if its
    .idx exists.
    """
    prefix = path.rstrip("/") or path
    if os.path.exists(idx_path(prefix)):
        return prefix
    indexes = index_directory("")
    if os.path.dirname(prefix).endswith(indexes):
        prefix = os.path.dirname(prefix)
    for suffix in (".bin", ".idx", indexes):
        if prefix.endswith(suffix) and os.path.basename(prefix) != suffix:
            return prefix.removesuffix(suffix)
    return prefix


def tokens_per_sequence(word: str) -> int:
    """An integer, for ``type=`` of ``--seq-length``. A path after it is a common slip, and told as such."""
    try:
        return int(word)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{word!r} is not a number of tokens; give the paths of datasets before --seq-length"
        ) from None


def add_prefix(options: Options) -> None:
    """``PREFIX``: one dataset."""
    options.add_argument(
        "prefix", type=dataset_prefix, metavar="PREFIX", help="path of the dataset, with or without .bin or .idx"
    )


def add_prefixes(options: Options) -> None:
    """``PREFIX ...``: one or more datasets. They are typed before ``--seq-length``, which takes all words after it."""
    options.add_argument(
        "prefixes",
        nargs="+",
        type=dataset_prefix,
        metavar="PREFIX",
        help="paths of the datasets, with or without .bin or .idx",
    )


def add_output_prefix(options: Options, meaning: str, required: bool) -> None:
    """``--output-prefix OUT``.

    Args:
        meaning: which files are written.
    """
    options.add_argument("--output-prefix", metavar="OUT", required=required, help=meaning)


def add_seq_length(options: Options, several: bool = True, without: str = "") -> None:
    """``--seq-length L ...``.

    Args:
        several: whether several lengths may be given, each of which is done.
        without: when it can be left out and what happens then; "" if it is always required.
    """
    meaning = "tokens per training sequence" + several * "; with several lengths, each is done"
    settings: dict[str, Any] = {"nargs": "+", "default": []} if several else {}
    options.add_argument(
        "--seq-length",
        type=tokens_per_sequence,
        required=not without,
        metavar="L",
        help=f"{meaning} ({without})" if without else meaning,
        **settings,
    )


def add_split(options: Options, default: str) -> None:
    """``--split``.

    Args:
        default: what is done without it.
    """
    options.add_argument(
        "--split", metavar="S", help=f"the split of your training, such as 969,30,1 (default: {default})"
    )


def add_cap(options: Options, compared: tuple[int, ...] = ()) -> None:
    """``--max-documents-per-sequence N``.

    Args:
        compared: limits that are compared with each other by default; without them, one limit is obeyed.
    """
    settings: dict[str, Any] = {"help": "put at most N documents into a sequence (default: no limit)"}
    if compared:
        default = " ".join(map(str, compared))
        settings = {"help": f"limits to compare with packing without a limit (default: {default})"}
        settings |= {"nargs": "+", "default": compared}
    options.add_argument("--max-documents-per-sequence", type=int, metavar="N", **settings)


def add_even(options: Options) -> None:
    """``--even-sequences``."""
    options.add_argument(
        "--even-sequences",
        action="store_true",
        help="spread short documents over all sequences, so that each holds about as many documents as the others "
        "(default: pack best fit)",
    )


def add_targets_only(options: Options) -> None:
    """``--targets-only``."""
    options.add_argument(
        "--targets-only",
        action="store_true",
        help="leave the last token of each document out of the inputs, as nothing is learned from it: fewer sequences, "
        "the same targets (default: every token is an input)",
    )


def add_fim(options: Options) -> None:
    """``--fim-rate R`` and the ``--seed`` that goes with it, for verbs that build indexes."""
    add_fim_rate(options)
    add_seed(options, "which chooses these documents")


def add_fim_rate(options: Options) -> None:
    """``--fim-rate R``; a ``--seed`` goes with it."""
    options.add_argument(
        "--fim-rate",
        type=float,
        metavar="R",
        help="rearrange so many of the documents for fill-in-the-middle, as 0.5 for half of them (default: none)",
    )


def fim_documents(options: argparse.Namespace) -> FimDocuments | None:
    """Which documents ``--fim-rate`` and ``--seed`` choose, for verbs that take them; None without.

    Raises:
        OptionError: a value is impossible.
    """
    rate = options.fim_rate
    return None if rate is None else FimDocuments(rate, SEED if options.seed is None else options.seed)


def add_seed(options: Options, meaning: str, default: int | None = None) -> None:
    """``--seed``.

    Args:
        meaning: what it does.
        default: None if it must be seen whether the option was given; then None stands for ``SEED``.
    """
    options.add_argument(
        "--seed",
        type=int,
        default=default,
        metavar="SEED",
        help=f"the --seed of your training, {meaning} (default: {SEED}, as in Megatron)",
    )


def add_overwrite(options: Options, what: str) -> None:
    """``--overwrite``.

    Args:
        what: what is replaced.
    """
    options.add_argument("--overwrite", action="store_true", help=f"replace {what}")


def add_cache_path(options: Options) -> None:
    """``--data-cache-path``."""
    options.add_argument(
        "--data-cache-path",
        metavar="FOLDER",
        help="the data cache of your training runs; its indexes of this dataset are used too (default: only those "
        "beside the dataset)",
    )


def add_tokenizer(options: Options, without: str) -> None:
    """``--tokenizer-type``, ``--tokenizer-model``, ``--eod-token`` and ``--bos-token``.

    Args:
        without: what is done if no tokenizer is given.
    """
    model = "a tokenizer.json, its folder or a name on the Hugging Face Hub; a SentencePiece model; a tiktoken file"
    options.add_argument(
        "--tokenizer-type",
        default="HuggingFaceTokenizer",
        metavar="TYPE",
        help=f"one of {', '.join(TOKENIZER_TYPES)} (default: %(default)s)",
    )
    options.add_argument(
        "--tokenizer-model",
        metavar="PATH",
        help=f"{model} (default: {without})",
    )
    options.add_argument(
        "--eod-token", metavar="TEXT", help="the end-of-document token (default: the one that the tokenizer names)"
    )
    options.add_argument(
        "--bos-token",
        metavar="TEXT",
        help="the begin-of-document token (default: the one that the tokenizer names)",
    )


def add_append_bos(options: Options, meaning: str) -> None:
    """``--append-bos`` and ``--no-append-bos``.

    Args:
        meaning: what the two say.
    """
    options.add_argument(
        "--append-bos",
        action=argparse.BooleanOptionalAction,
        help=f"{meaning} (default: as Megatron's own tool does with this tokenizer)",
    )


def add_json(options: Options) -> None:
    """``--json``."""
    options.add_argument("--json", action="store_true", help="print one JSON object instead of text; keys: see below")


def columns_of_counts(counts: Iterable[dict[str, int]]) -> dict[str, str]:
    """The columns of a table of indexes: for the title of each, its name among the counts of an index.

    Args:
        counts: of each index; some counts are of some indexes only.
    """
    names = {name for of_index in counts for name in of_index}
    columns = {"documents": "documents", "empty": "empty_documents", "one token": "one_token_documents"}
    columns |= {"fim": "fim_documents", "too long": "fim_too_long_documents"}
    columns |= {"tokens": "tokens", "sequences": "sequences", "padding": "padding"}
    return {title: name for title, name in columns.items() if name in names}


def check_packing(options: argparse.Namespace) -> None:
    """Refuse sequence lengths, a cap, a split or a choice of documents that cannot be, before anything is read.

    Raises:
        OptionError: one of them is wrong.
    """
    for seq_length in options.seq_length:
        checked_seq_length("--seq-length", seq_length)
    checked_cap(options.max_documents_per_sequence)
    if options.split is not None:
        split_fractions(options.split)
    if options.seed is not None and options.fim_rate is None:
        raise OptionError("--seed chooses documents for fill-in-the-middle: give it with --fim-rate")
    fim_documents(options)  # it refuses impossible values


def check_output_prefix(options: argparse.Namespace) -> None:
    """Refuse an ``--output-prefix`` whose folder does not exist.

    Raises:
        OptionError: it does not.
    """
    folder = os.path.dirname(os.path.abspath(options.output_prefix))
    if not os.path.isdir(folder):
        raise OptionError(f"--output-prefix {options.output_prefix}: there is no folder {folder}")
