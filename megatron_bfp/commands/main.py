"""``megatron-bfp`` and ``python -m megatron_bfp``: look after sequence indexes, or run a Megatron training script.

``python -m megatron_bfp SCRIPT.py OPTIONS`` runs a training script of Megatron-LM or Megatron-DeepSpeed, which then
knows ``--data-impl bfp``.
"""

import sys
from collections.abc import Sequence

from ..console import run, typed_name
from ..integrations.activation import is_script, run_script
from ..integrations.refusals import rank
from . import show as show_command
from . import verify as verify_command
from .hooks import startup_command
from .shared import Parser


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and do what it says.

    Raises:
        BFPError: bad options, an index that is not right, or a Megatron that is not known.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    first = next((argument for argument in arguments if not argument.startswith("-")), "")
    if is_script(first):
        run_script(arguments)
        return
    options = _parser().parse_args(arguments)
    if options.verb == "show":
        show_command.show(options)
    elif options.verb == "verify":
        verify_command.verify_command(options)
    else:
        startup_command(options.verb)


def console() -> int:
    """Run the command; returns its exit status: 0 done, 2 bad options or input, 130 interrupted."""
    return run(main, typed_name(), quiet=rank() != 0)


def _parser() -> Parser:
    parser = Parser(
        prog="python -m megatron_bfp",
        description="Look after sequence indexes, or run a training script: python -m megatron_bfp SCRIPT.py OPTIONS.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    verify_help = "check every index of a dataset against its .idx, byte for byte"
    verify_command.add_arguments(verbs.add_parser("verify", help=verify_help))
    show_command.add_arguments(verbs.add_parser("show", help="show what one training sequence consists of"))
    verbs.add_parser("enable", help="let unedited Megatron scripts of this Python take --data-impl bfp")
    verbs.add_parser("disable", help="undo enable")
    verbs.add_parser("status", help="say whether it is enabled")
    return parser
