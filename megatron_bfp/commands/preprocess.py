"""``megatron-bfp preprocess``: documents to a dataset and its sequence indexes.

``main`` and ``console`` are the older command ``megatron-bfp-preprocess``, also ``tools/preprocess_bfp.py``, which does
the work of the verbs index and merge, too.
"""

import argparse
from collections.abc import Sequence

from ..console import exit_on_sigterm, run, say, tell, typed_name
from ..preprocessing.readers.input_files import input_files
from ..preprocessing.summary import WrittenDataset
from ..preprocessing.task import load_tokenizers
from ..preprocessing.write import write_datasets
from ..progress import terminal_progress
from ..tables import wrap
from ..tokenizers.special_tokens import template_in_words
from .built_indexes import build_indexes, describe
from .preprocess_options import add_arguments, check, executor_of, job_of, parse, warn_of_options_without_effect

__all__ = ["DESCRIPTION", "EPILOG", "add_arguments", "console", "execute", "main"]

DESCRIPTION = (
    "Tokenize documents into a Megatron dataset (.bin/.idx) and build its sequence indexes. The bytes do not depend on "
    "the number of workers. A command that was interrupted resumes when it is given again."
)
EPILOG = None


def execute(options: argparse.Namespace) -> None:
    """Write the datasets of documents and their indexes, and print the documents that are cut with and without them.

    Raises:
        BFPError: bad options or input.
    """
    check(options)
    warn_of_options_without_effect(options)
    _preprocess(options)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line of ``megatron-bfp-preprocess`` and do what it says.

    Raises:
        BFPError: bad options or input.
    """
    options = parse(argv)
    if options.parts:
        from . import merge  # not above: the verb preprocess imports no other verb

        merge.execute(options)
    elif options.prefixes:
        from . import index

        index.execute(options)
    else:
        _preprocess(options)


def console() -> int:
    """Run the command; returns its exit status: 0 done, 2 bad options or input, 130 interrupted, 143 terminated."""
    exit_on_sigterm()
    return run(main, typed_name())


def _preprocess(options: argparse.Namespace) -> None:
    """Do the job, or what is left of it."""
    files = input_files(options.input, is_text_read=options.text_documents is not None)
    for line in [*map(str, files.left_out), *(f"warning: {warning}" for warning in files.warnings)]:
        tell(f"{options.parser.prog}: {line}")
    job = job_of(options, files.paths)
    datasets = write_datasets(job, executor_of(options), terminal_progress)
    tokenizer = load_tokenizers(job.tokenizer)[0]
    note = wrap(f"Each document: {template_in_words(job.tokenizer.template(tokenizer), tokenizer)}")
    say("\n\n".join([*(_description(written, options) for written in datasets), note]))


def _description(written: WrittenDataset, options: argparse.Namespace) -> str:
    """Build a dataset's indexes, and say what it has become."""
    left_out = f"{written.num_empty:,} empty and {written.num_bad:,} bad ones left out"
    if written.num_left_out:
        left_out += f"; {written.num_left_out:,} WARC records that are not plain text left out"
    return describe(written.dataset, build_indexes(written.dataset, options), left_out)
