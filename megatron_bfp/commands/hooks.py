"""``enable``, ``disable`` and ``status``: the start-up file that lets unedited scripts take ``--data-impl bfp``."""

import argparse
import sys

from ..console import say
from ..integrations import startup_file

DESCRIPTION = (
    "enable writes a start-up file into the site-packages of this Python. From then on every Megatron script that it "
    "runs takes --data-impl bfp, without an edit; without that option, scripts run as before. disable removes the "
    "file; status says whether it exists."
)
EPILOG = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The three verbs take no options of their own."""


def execute(options: argparse.Namespace) -> None:
    """Write, remove or look for the start-up file, and say where it is.

    Raises:
        OptionError: it cannot be written or removed.
    """
    if options.verb == "enable":
        say(f"enabled for {sys.executable}: {startup_file.enable()}")
    elif options.verb == "disable":
        say("\n".join(f"removed {path}" for path in startup_file.disable()) or "it was not enabled")
    else:
        say("\n".join(f"enabled: {path}" for path in startup_file.installed_at()) or "not enabled")
