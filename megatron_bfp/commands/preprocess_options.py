"""The options of ``megatron-bfp preprocess``, and of its old form ``megatron-bfp-preprocess``.

What they are, which values are refused before anything is read, and the job that they ask for.
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from functools import partial

from ..arguments import checked_count
from ..console import typed_name, warn
from ..errors import OptionError
from ..preprocessing.executors.processes import run_in_processes
from ..preprocessing.job import Job
from ..preprocessing.megatron_options import (
    add_megatron_options,
    megatron_options_without_effect,
    refuse_megatron_options,
)
from ..preprocessing.readers.documents import STANDARD_INPUT
from ..preprocessing.readers.file_names import BAD_DOCUMENTS_SUFFIX
from ..preprocessing.readers.plain_text import UNITS
from ..preprocessing.readers.storage import is_stream
from ..preprocessing.write import Executor
from ..tokenizers.registry import OTHER_NAMES, TokenizerOptions, same_type
from ..tokenizers.tiktoken import PATTERNS, TiktokenOptions
from .shared import (
    OF_INDEX,
    Options,
    Parser,
    add_append_bos,
    add_cap,
    add_even,
    add_fim,
    add_output_prefix,
    add_overwrite,
    add_seq_length,
    add_split,
    add_targets_only,
    add_tokenizer,
    check_output_prefix,
    check_packing,
    dataset_prefix,
)

EXECUTORS = ("processes", "ray")
LARGEST_SHARD_COUNT = 99_999
OF_TIKTOKEN = ("tiktoken_pattern", "tiktoken_num_special_tokens", "tiktoken_special_tokens", "vocab_size")
GPT2 = "GPT2BPETokenizer"
OF_GPT2 = ("vocab_file", "merge_file")
OF_INPUT = (
    *("json_keys", "tokenizer_type", "tokenizer_model", "eod_token", "append_eod", "bos_token", "append_bos"),
    *("workers", "skip_bad_documents", "no_card", "executor", "ray_address", "text_documents", *OF_TIKTOKEN, *OF_GPT2),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``megatron-bfp preprocess``."""
    parser.usage = "%(prog)s --input FILE [FILE ...]\n       --output-prefix OUT --tokenizer-model PATH [options]"
    _add_all(parser, required=True)


def old_parser() -> Parser:
    """The parser of ``megatron-bfp-preprocess``: the verbs index and merge are its ``--indexed`` and ``--merge``."""
    parser = Parser(
        prog=typed_name(),
        description="Tokenize documents into a Megatron dataset (.bin/.idx) and build its sequence indexes; or build "
        "the indexes of existing datasets (--indexed); or join datasets (--merge). The same is done by megatron-bfp "
        "preprocess, megatron-bfp index and megatron-bfp merge.",
    )
    _add_all(parser, required=False)
    existing = parser.add_argument_group("existing datasets")
    for option, name, text in (
        ("--indexed", "prefixes", "build the indexes of these datasets"),
        ("--merge", "parts", "join these datasets, in this order, to OUT.bin and OUT.idx"),
    ):
        existing.add_argument(option, dest=name, nargs="+", type=dataset_prefix, metavar="PREFIX", help=text)
    parser.set_defaults(parser=parser, json=False)
    return parser


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options of ``megatron-bfp-preprocess``, checked as far as can be done before anything is read.

    Raises:
        OptionError: one of them is wrong, or they do not go together.
    """
    options = old_parser().parse_args(argv)
    if [bool(options.input), bool(options.prefixes), bool(options.parts)].count(True) != 1:
        raise OptionError("give one of --input, --indexed and --merge")
    check_packing(options)
    _check_part(options)
    if not options.prefixes:
        if not options.output_prefix:
            raise OptionError("--output-prefix is needed with --input and --merge")
        check_output_prefix(options)
    if options.input:
        check(options)
    warn_of_options_without_effect(options)
    return options


def check(options: argparse.Namespace) -> None:
    """Refuse what cannot work before anything is read or written.

    Raises:
        OptionError: an option is wrong, or two do not go together.
    """
    check_packing(options)
    checked_count("--workers", options.workers)
    _check_part(options)
    check_output_prefix(options)
    _check_keys(options.json_keys)
    _check_tokenizer(options)
    refuse_megatron_options(options)
    for name in ("tiktoken_num_special_tokens", "vocab_size"):
        if getattr(options, name) is not None:
            checked_count(f"--{name.replace('_', '-')}", getattr(options, name))


def warn_of_options_without_effect(options: argparse.Namespace) -> None:
    """Print a line for each option that is given and has no effect."""
    given = [name for name, value in vars(options).items() if value != options.parser.get_default(name)]
    for line in [*without_effect(options, given), *megatron_options_without_effect(options)]:
        warn(options.parser.prog, line)
    if options.input and options.tokenizer_type in OTHER_NAMES:
        same = OTHER_NAMES[options.tokenizer_type]
        warn(options.parser.prog, f"--tokenizer-type {options.tokenizer_type} is {same} here: its ids are the same")


def _add_all(parser: argparse.ArgumentParser, required: bool) -> None:
    """Add all options, in groups.

    Args:
        required: whether the options that name input and output must be given.
    """
    _add_documents(parser.add_argument_group("documents to a dataset"), required)
    _add_tokens(parser.add_argument_group("tokenizer"))
    _add_tiktoken(parser.add_argument_group("tokenizers of type TikTokenizer"))
    _add_gpt2(parser.add_argument_group(f"tokenizers of type {GPT2}"))
    _add_index(parser.add_argument_group("sequence indexes"))
    _add_processes(parser.add_argument_group("processes, on one machine or on several that share a file system"))
    add_megatron_options(parser.add_argument_group("options of Megatron's preprocess_data.py that mean nothing here"))


def _add_documents(group: Options, required: bool) -> None:
    group.add_argument(
        "--input",
        nargs="+",
        metavar="FILE",
        required=required,
        help="JSON Lines, plain or compressed (gzip, zstd, bzip2, xz), Parquet, Arrow or WARC: files, folders (also of "
        "Hugging Face datasets), patterns; s3://, gs://, abfs:// and hf:// URLs; - for standard input",
    )
    group.add_argument(
        "--text-documents",
        choices=UNITS,
        help="read files that are not of these formats as plain text, a document for each file, paragraph (between "
        "blank lines) or line; .txt in folders, too (default: plain text is refused)",
    )
    group.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys or columns that hold text, a dataset for each; meta.text is text inside meta (default: text)",
    )
    add_output_prefix(
        group,
        "writes OUT_KEY_document.bin, .idx and .bfp/, OUT.card.md and OUT.summary.json; unfinished work is in "
        "OUT.shards, and the same command resumes it",
        required,
    )
    group.add_argument(
        "--skip-bad-documents",
        action="store_true",
        help=f"leave out bad documents and list them in OUT{BAD_DOCUMENTS_SUFFIX}; without it, the first one is an "
        "error",
    )
    group.add_argument(
        "--no-card",
        action="store_true",
        help="do not write OUT.card.md and OUT.card.json, which describe the dataset and have the SHA-256 of its files",
    )
    add_overwrite(group, "a dataset or an index that exists, or unfinished work of another command")


def _add_tokens(group: Options) -> None:
    add_tokenizer(group, without=f"--vocab-file with {GPT2}, else required")
    group.add_argument("--append-eod", action="store_true", help="end every document with the EOD token")
    add_append_bos(group, "begin every document with the BOS token, or do not")


def _add_tiktoken(group: Options) -> None:
    group.add_argument(
        "--tiktoken-pattern",
        metavar="NAME",
        help=f"how texts are split: {', '.join(PATTERNS)}, or a regular expression (default: v2 for Megatron's JSON; "
        "a .tiktoken file needs one)",
    )
    group.add_argument(
        "--tiktoken-num-special-tokens",
        type=int,
        default=1000,
        metavar="N",
        help="special tokens in the vocabulary (default: %(default)s)",
    )
    group.add_argument(
        "--tiktoken-special-tokens",
        nargs="+",
        metavar="TEXT",
        help="special tokens in the order of their ids (default: Megatron's, or those of the public encoding that "
        "--tiktoken-pattern names)",
    )
    group.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="tokens in the vocabulary, special tokens included (default: all of them, at most 2**17)",
    )


def _add_gpt2(group: Options) -> None:
    for option, text in (("--vocab-file", "its vocab.json"), ("--merge-file", "its merges.txt")):
        group.add_argument(option, metavar="PATH", help=f"{text} (default: in the folder --tokenizer-model)")


def _add_index(group: Options) -> None:
    add_seq_length(group, without="required without --shard-index")
    add_split(group, "one index of all documents")
    add_cap(group)
    add_even(group)
    add_targets_only(group)
    add_fim(group)


def _add_processes(group: Options) -> None:
    group.add_argument(
        "--workers", type=int, default=1, metavar="N", help="processes that tokenize (default: %(default)s)"
    )
    group.add_argument(
        "--executor", default="processes", choices=EXECUTORS, help="what runs the workers (default: %(default)s)"
    )
    group.add_argument(
        "--ray-address",
        default="auto",
        metavar="ADDRESS",
        help="of the Ray cluster (default: %(default)s, the cluster of this machine)",
    )
    group.add_argument(
        "--shard-count",
        type=int,
        metavar="N",
        help="split the input into N parts, one for each job (default: one job does all)",
    )
    group.add_argument(
        "--shard-index",
        type=int,
        metavar="I",
        help="the part that this job does, counted from 0; writes OUT-0000I-of-0000N_KEY_document (default: one job "
        "does all)",
    )


def without_effect(options: argparse.Namespace, given: Sequence[str]) -> Iterator[str]:
    """A line for each option that is given and has no effect.

    Args:
        given: names of the options whose values are not the defaults.
    """
    for name in given:
        where = _needed_for(name, options)
        if where:
            yield f"--{name.replace('_', '-')} has no effect here: it is for {where}"


def _needed_for(name: str, options: argparse.Namespace) -> str | None:
    """The option that an option needs to have an effect, if that one is not given."""
    if name in OF_INPUT and not options.input:
        return "--input"
    if name == "output_prefix" and not (options.input or options.parts):
        return "--input and --merge"
    if name in OF_GPT2 and options.tokenizer_type != GPT2:
        return f"--tokenizer-type {GPT2}"
    if name in OF_TIKTOKEN and options.tokenizer_type != "TikTokenizer":
        return "--tokenizer-type TikTokenizer"
    if name == "ray_address" and options.executor != "ray":
        return "--executor ray"
    if name in OF_INDEX and not options.seq_length:
        return "--seq-length, which is given to megatron-bfp merge when it joins the parts"
    return None


def _check_part(options: argparse.Namespace) -> None:
    """Refuse an impossible ``--shard-index`` or ``--shard-count``, and an index of a part, which nobody could use."""
    index, count = options.shard_index, options.shard_count
    if index is None and count is None:
        if not options.seq_length:
            raise OptionError("--seq-length is needed: an index is built for each length of training sequences")
        return
    if index is None or count is None:
        raise OptionError("--shard-index and --shard-count are needed together")
    if not options.input:
        raise OptionError("--shard-index is for --input: only documents are split into parts")
    if options.seq_length:
        raise OptionError("--seq-length: a part of a dataset needs no index; give it to megatron-bfp merge")
    if not 0 <= index < checked_count("--shard-count", count) <= LARGEST_SHARD_COUNT:
        raise OptionError(f"--shard-index {index}: is not from 0 to {count - 1}, or there are over 99,999 parts")
    for value in options.input:
        if value == STANDARD_INPUT or (os.path.exists(value) and not os.path.isdir(value) and is_stream(value)):
            raise OptionError(
                f"--shard-index: {value} can be read once only, so it cannot be split into parts; give files"
            )


def _check_tokenizer(options: argparse.Namespace) -> None:
    """Refuse a type that cannot be used, and a tokenizer whose files are not all named."""
    if same_type(options.tokenizer_type) == GPT2:
        both = options.vocab_file and options.merge_file
        if not (both or (options.tokenizer_model and not options.vocab_file and not options.merge_file)):
            raise OptionError(f"--tokenizer-type {GPT2}: needs --vocab-file and --merge-file, or --tokenizer-model")
    elif not options.tokenizer_model:
        raise OptionError("--tokenizer-model is needed with --input")


def _check_keys(keys: Sequence[str]) -> None:
    """Refuse keys that cannot be a part of a dataset's name, or that are given twice."""
    for key in keys:
        if not key or "/" in key or "\0" in key:
            raise OptionError(
                f"--json-keys {key!r}: a key is part of a file's name and cannot be empty or hold a slash"
            )
        if keys.count(key) > 1:
            raise OptionError(f"--json-keys {key!r}: is given twice; a dataset is written for each key")


def job_of(options: argparse.Namespace, paths: Sequence[str]) -> Job:
    """The job that the options ask for.

    Args:
        paths: the input files.
    """
    tokenizer_type = same_type(options.tokenizer_type)
    tokenizer = TokenizerOptions(
        tokenizer_type,
        options.vocab_file if tokenizer_type == GPT2 and options.vocab_file else options.tokenizer_model,
        options.eod_token,
        options.append_eod,
        _tiktoken_options(options),
        options.bos_token,
        options.append_bos,
        options.merge_file if tokenizer_type == GPT2 else None,
    )
    part = None if options.shard_index is None else (options.shard_index, options.shard_count)
    return Job(
        tuple(paths),
        tuple(options.json_keys),
        options.output_prefix,
        tokenizer,
        options.skip_bad_documents,
        options.overwrite,
        part,
        options.text_documents,
        not options.no_card,
    )


def executor_of(options: argparse.Namespace) -> Executor:
    """What runs the tasks: processes of this machine, or Ray.

    Raises:
        OptionError: Ray is not installed, or there is no cluster.
    """
    if options.executor == "ray":
        from ..preprocessing.executors.ray import run_in_ray

        return partial(run_in_ray, address=options.ray_address, workers=options.workers)
    return partial(run_in_processes, workers=options.workers)


def _tiktoken_options(options: argparse.Namespace) -> TiktokenOptions:
    """What the options say about a TikTokenizer."""
    names = options.tiktoken_special_tokens
    return TiktokenOptions(
        options.tiktoken_pattern,
        options.tiktoken_num_special_tokens,
        None if names is None else tuple(names),
        options.vocab_size,
    )
