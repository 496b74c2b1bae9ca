"""``megatron-bfp show``: what one training sequence consists of."""

import argparse
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..arguments import checked_cap, checked_count, checked_seq_length
from ..console import say
from ..errors import InputError, OptionError
from ..files import write_whole
from ..indexed_dataset.reader import IndexedDataset
from ..inspection.page import to_html
from ..inspection.view import SequenceView, ShownChunk, to_text, view_sequence
from ..integrations.fill_in_the_middle import fim_form, sentinel_ids
from ..samples.balanced_dataset import BalancedDataset
from ..samples.fill_in_the_middle import FimEpoch
from ..sequence_index.key import SPLIT_NAMES
from ..sequence_index.split import PackedSplit
from ..tokenizers.interface import Tokenizer
from ..tokenizers.registry import load_tokenizer
from .json_output import say_json
from .shared import (
    SEED,
    add_cache_path,
    add_cap,
    add_even,
    add_fim_rate,
    add_json,
    add_prefix,
    add_seed,
    add_seq_length,
    add_split,
    add_targets_only,
    add_tokenizer,
    fim_documents,
)

DESCRIPTION = (
    "Show what one training sequence consists of: which parts of which documents, and with a tokenizer their text. "
    "Name it by --sequence, or by --sample and the run's --seed. In a blend, samples are counted in each dataset, in "
    "the order without balancing."
)
EPILOG = """\
keys of --json:
  prefix, index (path), split (null without --split), seq_length
  sequence, num_sequences (of the index)
  sample, seed, epoch (null without --sample)
  global_batch_size, micro_batch_size (null without them)
  tokens, padding, targets (positions with loss)
  chunks: an object for each chunk, in order
    position (its first one in the sequence), length (inputs), targets
    document, offset (tokens of the document before the chunk),
    document_length, part: whole, first, middle, last or rearranged
    text (with --tokenizer-model)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    add_prefix(parser)
    add_seq_length(parser, several=False)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--sequence", type=int, metavar="I", help="a sequence of the index, counted from 0")
    which.add_argument("--sample", type=int, metavar="S", help="a sample of a training run, counted from 0")
    add_seed(parser, "which orders its samples")
    add_split(parser, "the index of all documents")
    parser.add_argument(
        "--global-batch-size",
        type=int,
        metavar="B",
        help="of a run with balanced batches: count --sample in their order (default: the order without balancing)",
    )
    parser.add_argument(
        "--micro-batch-size", type=int, metavar="M", help="of that run, with --global-batch-size (default: 1)"
    )
    parser.add_argument(
        "--split-name", choices=SPLIT_NAMES, help=f"which of the splits of --split (default: {SPLIT_NAMES[0]})"
    )
    add_cap(parser)
    add_even(parser)
    add_targets_only(parser)
    add_fim_rate(parser)
    parser.add_argument(
        "--fim-spm-rate",
        type=float,
        default=0.5,
        metavar="R",
        help="share of them that are shown as suffix, prefix and middle (default: %(default)s)",
    )
    for name in ("prefix", "middle", "suffix"):
        parser.add_argument(
            f"--fim-{name}-token",
            default=f"<fim_{name}>",
            metavar="TEXT",
            help=f"the token before the {name} (default: <fim_{name}>)",
        )
    add_cache_path(parser)
    add_tokenizer(parser, "no text is shown")
    parser.add_argument("--text", action="store_true", help="print the text of every chunk in full")
    parser.add_argument(
        "--html",
        metavar="FILE",
        help="write a page that shows every token and what it predicts (default: no page)",
    )
    add_json(parser)


def execute(options: argparse.Namespace) -> None:
    """Print a sequence and write its page.

    Raises:
        BFPError: bad options, no such index or sequence, damaged data, or a page that cannot be written.
    """
    _check(options)
    tokenizer = _load_tokenizer(options)
    packed_split = _open_split(options)
    wanted = _wanted(packed_split, options)
    view = view_sequence(packed_split.index, wanted.sequence, wanted.origin, _fim_epoch(options, wanted, tokenizer))
    content = _entry(view, packed_split, wanted, options, tokenizer) if options.json else None
    text = "" if options.json else to_text(view, tokenizer, options.text)
    if options.html is not None:
        _write_page(options.html, to_html(view, tokenizer))
        text += f"\n\nwrote {options.html}"
    if content is None:
        say(text)
    else:
        say_json(content)


def _fim_epoch(options: argparse.Namespace, wanted: "_Wanted", tokenizer: Tokenizer | None) -> FimEpoch | None:
    """How rearranged documents are shown in the epoch of the sample, else in the first one."""
    fim = fim_documents(options)
    if fim is None or tokenizer is None:
        return None
    form = fim_form(
        sentinel_ids(options, lambda texts: [*map(tokenizer.token_id, texts)]), tokenizer.eod, options.fim_spm_rate
    )
    return None if form is None else FimEpoch(form, fim.seed, wanted.epoch or 0)


class _Wanted(NamedTuple):
    """The sequence to show."""

    sequence: int
    seed: int | None = None
    """If it was named by its sample."""
    epoch: int | None = None
    origin: str = ""
    """Sample, seed and epoch, in words."""


def _wanted(packed_split: PackedSplit, options: argparse.Namespace) -> _Wanted:
    if options.sample is None or not len(packed_split):  # an index without sequences is refused by whoever reads it
        return _Wanted(options.sequence or 0)
    seed = SEED if options.seed is None else options.seed
    epoch, sample, size = options.sample // len(packed_split), options.sample, options.global_batch_size
    if size is not None:
        samples = _Samples(packed_split, seed, (epoch + 1) * len(packed_split))
        ordered = BalancedDataset(samples, size, micro_batch_size=options.micro_batch_size or 1)
        sample = ordered.sample_of(sample)
    batches = "" if size is None else f" and balanced batches of {size:,}"
    origin = f"sample {options.sample} with seed {seed}{batches} (epoch {epoch})"
    return _Wanted(packed_split.sequence_of(sample, seed), seed, epoch, origin)


@dataclass(frozen=True)
class _Samples:
    """The samples of a run, as far as ``BalancedDataset`` needs them to order batches."""

    packed_split: PackedSplit
    seed: int
    num_samples: int
    """In whole epochs."""

    def __len__(self) -> int:
        return self.num_samples

    @property
    def samples_per_epoch(self) -> int:
        return len(self.packed_split)

    def work_of(self, samples: np.ndarray) -> np.ndarray:
        return self.packed_split.work_of(samples, self.seed)


def _load_tokenizer(options: argparse.Namespace) -> Tokenizer | None:
    """The tokenizer that gives texts, if one is named."""
    if options.tokenizer_model is None:
        return None
    return load_tokenizer(
        options.tokenizer_type,
        options.tokenizer_model,
        options.eod_token,
        needs_eod=False,
        bos_token=options.bos_token,
    )


def _entry(
    view: SequenceView,
    packed_split: PackedSplit,
    wanted: _Wanted,
    options: argparse.Namespace,
    tokenizer: Tokenizer | None,
) -> dict[str, Any]:
    """The object of ``--json``."""
    return {
        "prefix": view.prefix,
        "index": packed_split.index.path,
        "split": None if options.split is None else options.split_name or SPLIT_NAMES[0],
        "seq_length": view.seq_length,
        "sequence": view.sequence,
        "num_sequences": view.num_sequences,
        "sample": options.sample,
        "seed": wanted.seed,
        "epoch": wanted.epoch,
        "global_batch_size": options.global_batch_size,
        "micro_batch_size": options.micro_batch_size,
        "tokens": view.num_tokens,
        "padding": view.padding,
        "targets": view.num_targets,
        "chunks": [_chunk_entry(chunk, view, tokenizer) for chunk in view.chunks],
    }


def _chunk_entry(chunk: ShownChunk, view: SequenceView, tokenizer: Tokenizer | None) -> dict[str, Any]:
    entry = {
        "position": chunk.begin,
        "length": chunk.length,
        "targets": chunk.targets,
        "document": chunk.document,
        "offset": chunk.offset,
        "document_length": chunk.document_length,
        "part": chunk.short_part,
    }
    if tokenizer is not None:
        entry["text"] = tokenizer.decode(view.sample.tokens[chunk.begin : chunk.end].tolist())
    return entry


def _check(options: argparse.Namespace) -> None:
    """Refuse what cannot work before anything is read."""
    checked_seq_length("--seq-length", options.seq_length)
    checked_cap(options.max_documents_per_sequence)
    if options.sample is not None and options.sample < 0:
        raise OptionError(f"--sample {options.sample}: samples are counted from 0")
    if fim_documents(options) is not None and options.tokenizer_model is None:
        raise OptionError("--fim-rate needs --tokenizer-model, which has the tokens that it adds")
    if options.seed is not None and options.sample is None and options.fim_rate is None:
        raise OptionError("--seed orders samples: give it with --sample, not with --sequence")
    if options.global_batch_size is not None:
        checked_count("--global-batch-size", options.global_batch_size)
        if options.sample is None:
            raise OptionError("--global-batch-size orders samples: give it with --sample, not with --sequence")
    if options.micro_batch_size is not None:
        checked_count("--micro-batch-size", options.micro_batch_size)
        if options.global_batch_size is None:
            raise OptionError("--micro-batch-size orders balanced batches: give --global-batch-size, too")
    if options.split_name is not None and options.split is None:
        raise OptionError(f"--split-name {options.split_name}: give --split too, as in training")
    for name in ("text", "eod_token", "bos_token"):
        if getattr(options, name) and options.tokenizer_model is None:
            raise OptionError(f"--{name.replace('_', '-')} needs --tokenizer-model")


def _open_split(options: argparse.Namespace) -> PackedSplit:
    """The split that the options name."""
    dataset, split_name = IndexedDataset(options.prefix), options.split_name or SPLIT_NAMES[0]
    packed_split = PackedSplit.open(
        dataset,
        options.seq_length,
        options.split,
        split_name,
        options.max_documents_per_sequence,
        options.data_cache_path,
        even_sequences=options.even_sequences,
        targets_only=options.targets_only,
        fim=fim_documents(options),
        builds=False,
    )
    if packed_split is None:
        raise OptionError(f"--split {options.split}: its {split_name} split has no documents")
    return packed_split


def _write_page(path: str, page: str) -> None:
    try:
        write_whole(path, page.encode())
    except OSError as error:
        raise InputError(f"--html {path}: cannot be written: {error.strerror}") from None
