"""``megatron-bfp VERB``, also ``python -m megatron_bfp VERB``: the one command line.

Only the module of the verb that was typed is imported, so help and errors in options take a fraction of a second.
``megatron-bfp run SCRIPT.py OPTIONS``, also ``python -m megatron_bfp SCRIPT.py OPTIONS``, runs a training script of
Megatron-LM or Megatron-DeepSpeed, which then knows ``--data-impl bfp``.
"""

import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

from ..console import exit_on_sigterm, run, typed_name
from ..integrations.activation import is_script, run_script
from ..integrations.refusals import rank
from ..tables import wrap
from .shared import Parser


class Verb(NamedTuple):
    """A verb, without its module."""

    module: str
    """Of this package. It has ``DESCRIPTION``, ``EPILOG``, ``add_arguments(parser)`` and ``execute(options)``."""
    help: str
    """One line."""


VERBS = {
    "preprocess": Verb("preprocess", "tokenize documents into a dataset and build its sequence indexes"),
    "index": Verb("index", "build the sequence indexes of existing datasets"),
    "merge": Verb("merge", "join datasets into one"),
    "report": Verb("report", "count what packing saves and costs on a dataset"),
    "show": Verb("show", "show what one training sequence consists of"),
    "verify": Verb("verify", "check the indexes of datasets byte for byte, and their tokens"),
    "export-huggingface": Verb("huggingface.export", "write a trained model for transformers to load"),
    "enable": Verb("hooks", "let unedited Megatron scripts of this Python take --data-impl bfp"),
    "disable": Verb("hooks", "undo enable"),
    "status": Verb("hooks", "say whether enable is in effect"),
    "run": Verb("run", "run a Megatron training script so that it takes --data-impl bfp"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and do what it says.

    Raises:
        BFPError: bad options, bad data, or a Megatron that is not supported.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if (script := _script_and_options(arguments)) is not None:
        run_script(script)
        return
    verb = _verb_of(arguments)
    options = parser_for(verb).parse_args(arguments)
    module_of(verb).execute(options)


def console() -> int:
    """Run the command; returns its exit status: 0 done, 2 bad options or input, 130 interrupted, 143 terminated."""
    arguments = sys.argv[1:]
    verb = _verb_of(arguments)
    name = f"{typed_name()} {verb}" if verb in VERBS else typed_name()
    if _script_and_options(arguments) is not None:  # SIGTERM is the script's own affair
        return run(main, name, quiet=rank() != 0)
    exit_on_sigterm()
    return run(main, name)


def parser_for(verb: str) -> Parser:
    """The parser of the command line. Only ``verb`` has its options; the modules of the others are not imported.

    Args:
        verb: one of ``VERBS``; anything else for none.
    """
    parser = Parser(
        prog=typed_name(),
        formatter_class=RawDescriptionHelpFormatter,
        description=wrap("Best-fit packing for Megatron: make, check and look at datasets and their sequence indexes."),
        epilog="\n".join(["verbs:", *(f"  {name:10}  {entry.help}" for name, entry in VERBS.items())]),
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", help="its options: VERB --help")
    for name in VERBS:
        of_verb = verbs.add_parser(name, formatter_class=RawDescriptionHelpFormatter)
        if name == verb:
            _add_verb(of_verb, module_of(name))
    return parser


def module_of(verb: str) -> ModuleType:
    """The module of a verb, imported now."""
    return import_module(f".{VERBS[verb].module}", __package__)


def _add_verb(parser: Parser, module: ModuleType) -> None:
    """Give a verb's parser what its module says."""
    parser.description, parser.epilog = wrap(module.DESCRIPTION), module.EPILOG
    module.add_arguments(parser)
    parser.set_defaults(parser=parser)


def _verb_of(arguments: Sequence[str]) -> str:
    """The first argument that is no option: a verb or a script. Launchers put ``--local_rank=N`` before it."""
    return next((argument for argument in arguments if not argument.startswith("-")), "")


def _script_and_options(arguments: Sequence[str]) -> list[str] | None:
    """The training script with all of its options, and those that stand before it; None if a verb was typed."""
    words = list(arguments)
    if _verb_of(words) == "run":
        words.remove("run")
    return words if is_script(_verb_of(words)) else None
