"""The options of ``megatron-bfp-preprocess``: what they are, what cannot be, and what they stand for."""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial

from ..arguments import checked_cap, checked_count, checked_seq_length
from ..console import typed_name
from ..errors import OptionError
from ..preprocessing.executors.processes import run_in_processes
from ..preprocessing.job import Job
from ..preprocessing.plan import is_stream
from ..preprocessing.readers.documents import STANDARD_INPUT
from ..preprocessing.readers.input_files import BAD_DOCUMENTS_SUFFIX
from ..preprocessing.write import Executor, refuse_to_replace
from ..sequence_index.key import split_fractions
from ..tokenizers.registry import TOKENIZER_TYPES, TokenizerOptions
from ..tokenizers.tiktoken import PATTERNS, TiktokenOptions
from .shared import Parser, dataset_prefix

EXECUTORS = ("processes", "ray")
LARGEST_SHARD_COUNT = 99_999
OF_TIKTOKEN = ("tiktoken_pattern", "tiktoken_num_special_tokens", "tiktoken_special_tokens", "vocab_size")
OF_INPUT = (
    *("json_keys", "tokenizer_type", "tokenizer_model", "eod_token", "append_eod", "bos_token", "append_bos"),
    *("workers", "skip_bad_documents", "executor", "ray_address", *OF_TIKTOKEN),
)
OF_INDEX = ("split", "max_documents_per_sequence")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked as far as can be done before anything is read.

    Raises:
        OptionError: one of them is wrong, or they do not go together.
    """
    parser = Parser(
        prog=typed_name(),
        description="Tokenize documents into a Megatron dataset (.bin/.idx) and build its best-fit packed sequence "
        "index, build the index of a dataset that exists (--indexed), or join datasets (--merge).",
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
    source.add_argument(
        "--output-prefix",
        metavar="OUT",
        help="writes OUT_KEY_document.bin, .idx and .bfp/, and OUT.summary.json; what is done before the end is in "
        "OUT.shards, and the same command goes on with it",
    )
    source.add_argument("--tokenizer-type", default="HuggingFaceTokenizer", help=f"{', '.join(TOKENIZER_TYPES)}")
    source.add_argument(
        "--tokenizer-model", metavar="PATH", help="a tokenizer.json or its folder, a SentencePiece or a tiktoken file"
    )
    source.add_argument("--eod-token", metavar="TEXT", help="the end-of-document token, where the tokenizer names none")
    source.add_argument("--append-eod", action="store_true", help="end every document with the EOD token")
    source.add_argument("--bos-token", metavar="TEXT", help="the token that --append-bos writes, where none is named")
    source.add_argument(
        "--append-bos",
        action=argparse.BooleanOptionalAction,
        help="begin every document with the BOS token, or do not (default: as Megatron's own tool does with this "
        "tokenizer, which is printed)",
    )
    source.add_argument("--workers", type=int, default=1, metavar="N", help="processes that tokenize (default: 1)")
    source.add_argument(
        "--skip-bad-documents", action="store_true", help=f"leave them out and list them in OUT{BAD_DOCUMENTS_SUFFIX}"
    )
    source.add_argument(
        "--overwrite", action="store_true", help="replace a dataset, an index or another run's shards that are there"
    )
    machines = parser.add_argument_group("several machines, on a shared file system")
    machines.add_argument(
        "--executor", default="processes", choices=EXECUTORS, help="what runs the workers (default: %(default)s)"
    )
    machines.add_argument(
        "--ray-address", default="auto", metavar="ADDRESS", help="of the Ray cluster (default: the one of this machine)"
    )
    machines.add_argument(
        "--shard-count", type=int, metavar="N", help="number of jobs that each do a part of the input"
    )
    machines.add_argument(
        "--shard-index", type=int, metavar="I", help="this job's, from 0: writes OUT-0000I-of-0000N_KEY_document"
    )
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
    existing.add_argument("--indexed", nargs="+", type=dataset_prefix, metavar="PREFIX", help="build their indexes")
    existing.add_argument(
        "--merge",
        nargs="+",
        type=dataset_prefix,
        metavar="PREFIX",
        help="join them, in this order, to OUT.bin and OUT.idx",
    )
    index = parser.add_argument_group("sequence index")
    index.add_argument("--seq-length", nargs="+", type=int, default=[], metavar="L", help="tokens a sequence")
    index.add_argument("--split", help="an index for each split, as in training: 969,30,1 (default: one for all)")
    index.add_argument("--max-documents-per-sequence", type=int, metavar="N", help="default: no limit")
    options = parser.parse_args(argv)
    _check(options)
    given = [name for name, value in vars(options).items() if value != parser.get_default(name)]
    for line in without_effect(options, given):
        print(f"{parser.prog}: warning: {line}", file=sys.stderr, flush=True)
    return options


def without_effect(options: argparse.Namespace, given: Sequence[str]) -> Iterator[str]:
    """A line for each option that is given and changes nothing.

    Args:
        given: names of the options that are not as they are by default.
    """
    for name in given:
        where = _needed_for(name, options)
        if where:
            yield f"--{name.replace('_', '-')} has no effect here: it is for {where}"


def _needed_for(name: str, options: argparse.Namespace) -> str | None:
    """The option without which an option changes nothing, if that is not given."""
    if name in OF_INPUT and not options.input:
        return "--input"
    if name == "output_prefix" and options.indexed:
        return "--input and --merge"
    if name in OF_TIKTOKEN and options.tokenizer_type != "TikTokenizer":
        return "--tokenizer-type TikTokenizer"
    if name == "ray_address" and options.executor != "ray":
        return "--executor ray"
    if name in OF_INDEX and not options.seq_length:
        return "--seq-length, which --merge takes when it joins the parts"
    return None


def _check(options: argparse.Namespace) -> None:
    """Refuse what cannot work before anything is read or written."""
    if [bool(options.input), bool(options.indexed), bool(options.merge)].count(True) != 1:
        raise OptionError("give one of --input, --indexed and --merge")
    for seq_length in options.seq_length:
        checked_seq_length("--seq-length", seq_length)
    checked_count("--workers", options.workers)
    checked_cap(options.max_documents_per_sequence)
    if options.split is not None:
        split_fractions(options.split)
    _check_part(options)
    if options.indexed:
        return
    if not options.output_prefix:
        raise OptionError("--output-prefix is needed with --input and --merge")
    folder = os.path.dirname(os.path.abspath(options.output_prefix))
    if not os.path.isdir(folder):
        raise OptionError(f"--output-prefix {options.output_prefix}: there is no folder {folder}")
    if options.merge:
        options.output_prefix = options.output_prefix.removesuffix(".bin").removesuffix(".idx")
        if not options.overwrite:
            refuse_to_replace([options.output_prefix])
        return
    if not options.tokenizer_model:
        raise OptionError("--tokenizer-model is needed with --input")
    _check_keys(options.json_keys)
    for name in ("tiktoken_num_special_tokens", "vocab_size"):
        if getattr(options, name) is not None:
            checked_count(f"--{name.replace('_', '-')}", getattr(options, name))


def _check_part(options: argparse.Namespace) -> None:
    """Refuse a part of the input that is none, and an index of a part, which is of no use."""
    index, count = options.shard_index, options.shard_count
    if index is None and count is None:
        if not options.seq_length:
            raise OptionError("--seq-length is needed (for each length of training sequences, an index is built)")
        return
    if index is None or count is None:
        raise OptionError("--shard-index and --shard-count are needed together")
    if not options.input:
        raise OptionError("--shard-index: only the documents of --input are cut into parts")
    if options.seq_length:
        raise OptionError("--seq-length: a part of a dataset needs no index; give it to --merge, which joins the parts")
    if not 0 <= index < checked_count("--shard-count", count) <= LARGEST_SHARD_COUNT:
        raise OptionError(f"--shard-index {index}: is not from 0 to {count - 1}, or there are over 99,999 parts")
    for value in options.input:
        if value == STANDARD_INPUT or (os.path.exists(value) and not os.path.isdir(value) and is_stream(value)):
            raise OptionError(f"--shard-index: {value} can be read once, so parts cannot be cut; give files")


def _check_keys(keys: Sequence[str]) -> None:
    """Refuse keys that cannot name a dataset each."""
    for key in keys:
        if not key or "/" in key or "\0" in key:
            raise OptionError(
                f"--json-keys {key!r}: a key is part of a file's name and cannot be empty or hold a slash"
            )
        if keys.count(key) > 1:
            raise OptionError(f"--json-keys {key!r}: is given twice; a dataset is written for each key")


def job_of(options: argparse.Namespace, paths: Sequence[str]) -> Job:
    """What the options ask to be done with documents in these files."""
    tokenizer = TokenizerOptions(
        options.tokenizer_type,
        options.tokenizer_model,
        options.eod_token,
        options.append_eod,
        _tiktoken_options(options),
        options.bos_token,
        options.append_bos,
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
    )


def executor_of(options: argparse.Namespace) -> Executor:
    """What runs the tasks.

    Raises:
        OptionError: Ray is not installed, or there is no cluster.
    """
    if options.executor == "ray":
        from ..preprocessing.executors.ray import run_in_ray

        return partial(run_in_ray, address=options.ray_address, workers=options.workers)
    return partial(run_in_processes, workers=options.workers)


def _tiktoken_options(options: argparse.Namespace) -> TiktokenOptions:
    names = options.tiktoken_special_tokens
    return TiktokenOptions(
        options.tiktoken_pattern,
        options.tiktoken_num_special_tokens,
        None if names is None else tuple(names),
        options.vocab_size,
    )
