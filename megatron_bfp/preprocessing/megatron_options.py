"""The options of Megatron's ``tools/preprocess_data.py`` that mean nothing here, and those that are refused by name.

So commands written for that tool go on working. Its other options have the same names and meanings here.
"""

import argparse
from collections.abc import Iterator
from typing import NamedTuple

from ..errors import OptionError


class Ignored(NamedTuple):
    """An option without effect."""

    why: str
    metavar: str | None = None
    """None for an option without a value."""
    is_list: bool = False


WITHOUT_EFFECT = {
    "--partitions": Ignored("input is split into tasks for --workers, also inside files", "N"),
    "--log-interval": Ignored("progress is printed every 30 seconds", "N"),
    "--keep-sequential-samples": Ignored("documents always keep the order of the input"),
    "--keep-newlines": Ignored("documents are not split into sentences, and keep their line ends"),
    "--lang": Ignored("documents are not split into sentences", "NAME"),
    "--workers-to-check": Ignored("the number of workers is not searched for; give --workers", "N", is_list=True),
    "--max-documents": Ignored("the number of workers is not searched for; all documents are read", "N"),
    "--trust-remote-code": Ignored("no code that comes with a tokenizer is run"),
    "--use-gigatoken": Ignored("gigatoken is used wherever its ids are those of the tokenizer's own library"),
}
"""Name -> why the option has no effect."""
REFUSED = {
    "--split-sentences": "documents are packed whole; give a document for each sentence to pack sentences",
    "--find-optimal-num-workers": "it measures and writes no dataset; give --workers, one for each core",
}
"""Name of an option without a value -> why it is refused, and what to do."""
DATASET_IMPLS = ("mmap", "lazy", "cached")
"""Values of ``--dataset-impl``; the first is what is written."""


def add_megatron_options(group: "argparse._ArgumentGroup") -> None:
    """Declare them."""
    for name, option in WITHOUT_EFFECT.items():
        text = f"no effect: {option.why}"
        if option.metavar is None:
            group.add_argument(name, action="store_true", help=text)
        else:
            nargs = "+" if option.is_list else None
            group.add_argument(name, metavar=option.metavar, nargs=nargs, help=f"{text} (default: none)")
    group.add_argument(
        "--dataset-impl",
        choices=DATASET_IMPLS,
        default=DATASET_IMPLS[0],
        help="Megatron's format of the dataset; others than mmap are refused (default: %(default)s)",
    )
    for name, why in REFUSED.items():
        group.add_argument(name, action="store_true", help=f"refused: {why}")


def refuse_megatron_options(options: argparse.Namespace) -> None:
    """Refuse what cannot be honoured.

    Raises:
        OptionError: such an option is given.
    """
    for name, why in REFUSED.items():
        if getattr(options, _attribute(name)):
            raise OptionError(f"{name}: {why}")
    if options.dataset_impl != DATASET_IMPLS[0]:
        raise OptionError(f"--dataset-impl {options.dataset_impl}: only mmap is written, Megatron's format")


def megatron_options_without_effect(options: argparse.Namespace) -> Iterator[str]:
    """A line for each that is given and means nothing here."""
    for name, option in WITHOUT_EFFECT.items():
        if getattr(options, _attribute(name)) not in (None, False):
            yield f"{name} has no effect here: {option.why}"


def _attribute(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")
