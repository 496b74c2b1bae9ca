"""``python -m megatron_bfp VERB``: look after sequence indexes and the start-up file.

``python -m megatron_bfp SCRIPT.py OPTIONS`` runs a training script of Megatron-LM or Megatron-DeepSpeed, which then
knows ``--data-impl bfp``.
"""

import sys
from collections.abc import Sequence

from . import show_command, verify_command
from .command_line import Parser, run, say, typed_name
from .integrations import startup_file
from .integrations.activation import is_script, run_script
from .integrations.refusals import rank


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


def startup_command(verb: str) -> None:
    """Write, remove or look for the start-up file, and say where it is."""
    if verb == "enable":
        say(f"enabled for {sys.executable}: {startup_file.enable()}")
    elif verb == "disable":
        say("\n".join(f"removed {path}" for path in startup_file.disable()) or "it was not enabled")
    else:
        say("\n".join(f"enabled: {path}" for path in startup_file.installed_at()) or "not enabled")


if __name__ == "__main__":
    sys.exit(run(main, typed_name(), quiet=rank() != 0))
