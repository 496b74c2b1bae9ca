"""``megatron-bfp run SCRIPT.py OPTIONS``: a Megatron training script that takes ``--data-impl bfp``, unedited.

``main`` runs the script itself, because all that follows its name is the script's. Only help and mistakes come here.
"""

import argparse

from ..errors import OptionError

DESCRIPTION = (
    "Run a training script of Megatron-LM or Megatron-DeepSpeed as python SCRIPT.py OPTIONS would, and let it "
    "take --data-impl bfp. With torchrun: torchrun -m megatron_bfp run SCRIPT.py OPTIONS. With DeepSpeed: "
    "deepspeed --module megatron_bfp run SCRIPT.py OPTIONS."
)
EPILOG = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    parser.add_argument("script", metavar="SCRIPT.py", help="the training script; its name ends in .py")
    parser.add_argument(
        "options", nargs=argparse.REMAINDER, metavar="OPTIONS", help="of the script, such as --data-impl bfp"
    )


def execute(options: argparse.Namespace) -> None:
    """Refuse what is no script.

    Raises:
        OptionError: always, as ``main`` runs scripts.
    """
    raise OptionError(f"{options.script}: is not a training script, whose name ends in .py")
