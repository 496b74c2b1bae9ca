"""``enable``, ``disable`` and ``status``: the start-up file that lets unedited scripts take ``--data-impl bfp``."""

import sys

from ..console import say
from ..integrations import startup_file


def startup_command(verb: str) -> None:
    """Write, remove or look for the start-up file, and say where it is."""
    if verb == "enable":
        say(f"enabled for {sys.executable}: {startup_file.enable()}")
    elif verb == "disable":
        say("\n".join(f"removed {path}" for path in startup_file.disable()) or "it was not enabled")
    else:
        say("\n".join(f"enabled: {path}" for path in startup_file.installed_at()) or "not enabled")
