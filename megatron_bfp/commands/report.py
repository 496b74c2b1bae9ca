"""``megatron-bfp report``: what packing would save and cost on a dataset. It reads the .idx only.

``main`` and ``console`` are the older command ``megatron-bfp-report``, also ``tools/report_bfp.py``.
"""

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..arguments import checked_cap, checked_count, checked_seq_length
from ..console import run, say, typed_name
from ..errors import InputError, OptionError
from ..files import write_whole
from ..indexed_dataset.reader import IndexedDataset
from ..inspection.figures import can_draw, draw_sequences, draw_truncations
from ..inspection.report import Report, make_report, megatron_order
from ..inspection.report_pages import cut_needlessly, to_json, to_markdown
from ..inspection.waiting import ATTENTION_COEFFICIENT, HIDDEN_SIZE, MOST_SEQUENCES, Ranks
from ..optional import pip_command
from ..progress import terminal_progress
from ..sequence_index.key import split_range
from ..tables import wrap
from .json_output import say_json
from .shared import SEED, Parser, add_cap, add_json, add_prefix, add_seed, add_seq_length, add_split

CAPS = (32, 128)
"""Limits on the documents of a sequence that are compared by default."""
RANKS = (Ranks(64, 4),)
FIGURES = {
    "truncations.png": ("Truncations by document length", draw_truncations),
    "sequences.png": ("Documents and work per sequence", draw_sequences),
}

DESCRIPTION = (
    "Count what best-fit packing saves and costs on a dataset, beside concatenation, and how long ranks would "
    "wait for each other. Only the .idx is read."
)
EPILOG = """\
keys of --json:
  dataset: its prefix
  documents: the first and the end of those counted
  seed
  hidden_size, attention_coefficient: of the simulated ranks
  files: paths of what --output wrote
  reports: an object for each seq_length
    cut_needlessly: documents that fit into one sequence and are cut
      concatenation, packing
    seq_length, documents, empty_documents, one_token_documents, tokens,
    long_documents (longer than seq_length), long_tokens,
    concatenated_sequences
    packings: an object for each limit, null (no limit) first
      max_documents_per_sequence, sequences, padding (positions), lower_bound,
      documents_per_sequence, attention_work: median, p99, maximum
    even: the same with --even-sequences
    targets_only: the same with --targets-only
    distribution: sequences by what they hold, an object for each percentage
      percent (of the sequences), and what they have at most:
      documents, documents_even (with --even-sequences), work, work_even
    waiting: an object for each of --ranks; time lost, 0.1 is 10 %
      data_parallel_size, micro_batches
      best_fit, even (with --even-sequences)
        random, balanced, over_batches (over 8 global batches)
          once_per_step, every_micro_step
    length_classes: an object for each range of document lengths
      shortest, longest, documents, tokens,
      cut_by_concatenation, cut_by_packing (documents),
      cuts_of_concatenation, cuts_of_packing"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    parser.usage = "%(prog)s PREFIX --seq-length L [L ...] [options]"
    add_prefix(parser)
    add_seq_length(parser)
    add_split(parser, "all documents; with it, those of the train split")
    add_cap(parser, compared=CAPS)
    add_seed(parser, "which orders documents under concatenation, and simulated samples", default=SEED)
    parser.add_argument(
        "--ranks",
        nargs="+",
        type=ranks_of,
        default=RANKS,
        metavar="DxM",
        help="ranks to simulate: data-parallel size x micro-batches of one sequence, per step (default: 64x4)",
    )
    parser.add_argument(
        "--hidden-size",
        type=int,
        default=HIDDEN_SIZE,
        metavar="H",
        help="of the model that they train (default: %(default)s)",
    )
    parser.add_argument(
        "--output",
        metavar="FOLDER",
        help="write report.md, report.json and two figures into this folder (default: no files)",
    )
    add_json(parser)


def execute(options: argparse.Namespace) -> None:
    """Print the report, and write its files.

    Raises:
        BFPError: bad options, a damaged dataset, or a file that cannot be written.
    """
    caps = _checked_caps(options)
    dataset = IndexedDataset(options.prefix, needs_bin=False)
    first, end = _documents(dataset.num_documents, options.split)
    ordered = megatron_order(dataset.document_lengths.range(first, end), options.seed, terminal_progress)
    simulated = {"ranks": options.ranks, "hidden_size": options.hidden_size, "seed": options.seed}
    reports = [
        make_report(ordered, seq_length, caps, terminal_progress, **simulated) for seq_length in options.seq_length
    ]
    text = to_markdown(options.prefix, _order(dataset, options.seed, first, end), reports, options.hidden_size)
    title = {"dataset": options.prefix, "documents": [first, end], "seed": options.seed}
    title |= {"hidden_size": options.hidden_size, "attention_coefficient": ATTENTION_COEFFICIENT}
    written: list[str] = []
    if options.output:  # before anything is printed: whoever reads may stop after three lines
        written = _write(options.output, text, to_json(title, reports), reports if can_draw() else [])
    if options.json:
        say_json(title | {"files": written, "reports": [*map(_entry, reports)]})
        return
    lines = [f"wrote {path}" for path in written]
    if options.output and not can_draw():
        lines[:0] = [f"no {figure}: it needs matplotlib, {pip_command('matplotlib')}" for figure in FIGURES]
    say("\n".join([text, *lines]))


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line of ``megatron-bfp-report`` and do what it says.

    Raises:
        BFPError: bad options or input.
    """
    execute(parser().parse_args(argv))


def parser() -> Parser:
    """The parser of ``megatron-bfp-report``."""
    of_report = Parser(
        prog=typed_name(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=wrap(DESCRIPTION),
        epilog=EPILOG,
    )
    add_arguments(of_report)
    return of_report


def console() -> int:
    """Run the command; returns its exit status: 0 done, 2 bad options or input, 130 interrupted."""
    return run(main, typed_name())


def ranks_of(word: str) -> Ranks:
    """The ranks that ``64x4`` stands for, for ``type=`` of ``--ranks``."""
    match = re.fullmatch(r"([1-9][0-9]*)x([1-9][0-9]*)", word, re.ASCII)
    if match is None:
        raise argparse.ArgumentTypeError(f"{word!r} is not DxM, such as 64x4: data-parallel size x micro-batches")
    ranks = Ranks(*map(int, match.groups()))
    if ranks.global_batch_size > MOST_SEQUENCES:
        raise argparse.ArgumentTypeError(f"{word}: steps of over {MOST_SEQUENCES:,} sequences are not simulated")
    return ranks


def _checked_caps(options: argparse.Namespace) -> list[int | None]:
    """The limits to compare; refuses what cannot be, before anything is read."""
    for seq_length in options.seq_length:
        checked_seq_length("--seq-length", seq_length)
    caps = [None, *(checked_cap(cap) for cap in options.max_documents_per_sequence)]
    if not 0 <= options.seed < 1 << 32:
        raise OptionError(f"--seed {options.seed}: give an integer from 0 to 2**32 - 1, as numpy takes it")
    checked_count("--hidden-size", options.hidden_size)
    _documents(0, options.split)
    if options.output:
        _check_output(options.output)
    return caps


def _documents(num_documents: int, split: str | None) -> tuple[int, int]:
    """First and end document of the train split."""
    documents = split_range(num_documents, split)
    if documents is None:
        raise OptionError(f"--split {split}: its train split has no documents")
    return documents


def _entry(report: Report) -> dict[str, Any]:
    """The object of one sequence length."""
    concatenation, packing = cut_needlessly(report)
    return {"cut_needlessly": {"concatenation": concatenation, "packing": packing}} | asdict(report)


def _order(dataset: IndexedDataset, seed: int, first: int, end: int) -> str:
    """The sentence on the order of documents under concatenation."""
    sentence = (
        f"Documents {first} to {end} of {dataset.num_documents}. Concatenation joins them in the order of "
        f"megatron-core's GPTDataset with --seed {seed}, one epoch, and cuts every L tokens."
    )
    if dataset.num_sequences != dataset.num_documents:
        sentence += " Documents of several sequences are counted as if it kept these together."
    return sentence


def _check_output(directory: str) -> None:
    """Refuse what could not be written, before the work."""
    try:
        os.makedirs(directory, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output {directory}: {error.strerror}") from None
    if not os.access(directory, os.W_OK):
        raise InputError(f"--output {directory}: not writable")


def _write(directory: str, text: str, figures: str, drawn: Sequence[Report]) -> list[str]:
    """Write the files; returns their paths.

    Args:
        drawn: the reports to draw figures of; none without matplotlib.
    """
    contents = {"report.json": figures.encode()}
    if drawn:
        for name, (title, draw) in FIGURES.items():
            contents[name] = draw(drawn)
            text += f"![{title}]({name})\n"
    paths = []
    for name, content in ({"report.md": text.encode()} | contents).items():
        path = os.path.join(directory, name)
        try:
            write_whole(path, content)
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error.strerror}") from None
        paths.append(path)
    return paths
