"""The start-up file that brings ``--data-impl bfp`` into unedited scripts.

Python executes the lines of every .pth file in its site-packages when it starts. Ours looks at the command line and
does nothing unless ``--data-impl`` is on it. If this package has been uninstalled, it stays silent.
"""

import os
import site
import sysconfig

from ..errors import OptionError
from ..files import write_whole

NAME = "megatron_bfp.pth"

LINE = (
    "import sys; any(argument.startswith('--data-i') for argument in getattr(sys, 'argv', ())) and "
    "__import__('importlib.util').util.find_spec('megatron_bfp') and "
    "__import__('megatron_bfp.integrations.activation').integrations.activation.install()\n"
)
"""One line that starts with ``import``: Python executes such lines of a .pth file."""


def enable() -> str:
    """Write the file into this Python's site-packages, or the user's if that is read-only; returns its path.

    Raises:
        OptionError: neither can be written.
    """
    failures = []
    for folder in _folders():
        path = os.path.join(folder, NAME)
        try:
            os.makedirs(folder, exist_ok=True)
            write_whole(path, LINE.encode())
            return path
        except OSError as error:
            failures.append(f"{path}: {error.strerror}")
    raise OptionError(f"the start-up file cannot be written: {'; '.join(failures)}; use python -m megatron_bfp SCRIPT")


def disable() -> list[str]:
    """Remove the file wherever ``enable`` may have put it; returns the paths that were removed.

    Raises:
        OptionError: one cannot be removed.
    """
    removed = installed_at()
    for path in removed:
        try:
            os.remove(path)
        except OSError as error:
            raise OptionError(f"{path}: cannot be removed: {error.strerror}") from None
    return removed


def installed_at() -> list[str]:
    """Paths of the start-up files that this Python reads."""
    return [path for folder in _folders() if os.path.isfile(path := os.path.join(folder, NAME))]


def _folders() -> list[str]:
    """This Python's site-packages, then the user's if Python reads it."""
    return [sysconfig.get_path("purelib")] + ([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])
