"""``megatron-bfp-report``, also ``tools/report_bfp.py``: what packing would save and cost on a dataset."""

import os
from collections.abc import Sequence

from ..arguments import checked_cap, checked_seq_length
from ..console import run, say, typed_name
from ..errors import InputError, OptionError
from ..files import write_whole
from ..indexed_dataset.reader import IndexedDataset
from ..inspection.report import make_report, megatron_order
from ..inspection.report_pages import can_draw, draw, to_json, to_markdown
from ..optional import pip_command
from ..progress import terminal_progress
from ..sequence_index.key import split_range
from .shared import Parser, dataset_prefix

CAPS = (32, 128)
"""Limits on the documents of a sequence that are compared where none are given."""
FIGURE = "truncations.png"


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and do what it says.

    Raises:
        BFPError: bad options or input.
    """
    description = "What best-fit packing saves and costs on a dataset, beside concatenation."
    parser = Parser(prog=typed_name(), description=description)
    parser.add_argument(
        "prefix", type=dataset_prefix, metavar="PREFIX", help="the dataset's path, with or without .bin or .idx"
    )
    parser.add_argument("--seq-length", nargs="+", type=int, required=True, metavar="L", help="tokens a sequence")
    parser.add_argument("--output", metavar="DIR", help="write report.md, report.json and truncations.png there")
    parser.add_argument("--seed", type=int, default=1234, help="Megatron's, which orders documents (default: 1234)")
    parser.add_argument("--split", help="as in training: report on its train split (default: all documents)")
    parser.add_argument(
        "--max-documents-per-sequence", nargs="+", type=int, default=CAPS, metavar="N", help="limits to compare"
    )
    options = parser.parse_args(argv)
    lengths = [checked_seq_length("--seq-length", seq_length) for seq_length in options.seq_length]
    caps = [None, *(checked_cap(cap) for cap in options.max_documents_per_sequence)]
    if not 0 <= options.seed < 1 << 32:
        raise OptionError(f"--seed {options.seed}: give an integer from 0 to 2**32 - 1, as numpy takes it")
    if split_range(0, options.split) is None:  # before anything is read
        raise OptionError(f"--split {options.split}: its train split has no documents")
    if options.output:
        _check_output(options.output)
    dataset = IndexedDataset(options.prefix, needs_bin=False)
    first, end = split_range(dataset.num_documents, options.split)
    ordered = megatron_order(dataset.document_lengths.range(first, end), options.seed, terminal_progress)
    reports = [make_report(ordered, seq_length, caps, terminal_progress) for seq_length in lengths]
    text = to_markdown(options.prefix, _order(dataset, options.seed, first, end), reports)
    written = []
    if options.output:  # before anything is printed: whoever reads may stop after three lines
        title = {"dataset": options.prefix, "documents": [first, end], "seed": options.seed}
        written = _write(options.output, text, to_json(title, reports), draw(reports) if can_draw() else None)
    say("\n".join([text, *written]))


def console() -> int:
    """Run the command; returns its exit status: 0 done, 2 bad options or input, 130 interrupted."""
    return run(main, typed_name())


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


def _write(directory: str, text: str, figures: str, image: bytes | None) -> list[str]:
    """Write the files; returns a line about each."""
    contents = {"report.json": figures.encode()}
    lines = [f"no {FIGURE}: it needs matplotlib, {pip_command('matplotlib')}"]
    if image is not None:
        text += f"![Truncations by document length]({FIGURE})\n"
        contents[FIGURE] = image
        lines = []
    for name, content in ({"report.md": text.encode()} | contents).items():
        path = os.path.join(directory, name)
        try:
            write_whole(path, content)
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error.strerror}") from None
        lines.append(f"wrote {path}")
    return lines
