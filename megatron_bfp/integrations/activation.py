"""Whether ``--data-impl bfp`` is on the command line, and what happens then. Without it nothing is changed.

The hooks wait for modules of Megatron-LM and of Megatron-DeepSpeed; a process imports those of one of them. The three
ways in, ``python -m megatron_bfp script.py``, ``megatron_bfp.install()`` in a script, and the start-up file for
unedited scripts, all end in ``install``.
"""

import os
import runpy
import sys
from collections.abc import Sequence

from ..errors import IntegrationError, OptionError
from . import megatron_deepspeed, megatron_lm
from .hooks import AfterImport, Hook

OPTION = "--data-impl"


def data_impl(arguments: Sequence[str]) -> str | None:
    """The value of ``--data-impl`` on a command line, as argparse takes it: the last one counts. None without it."""
    value = None
    for place, argument in enumerate(arguments):
        if argument == OPTION and place + 1 < len(arguments):
            value = arguments[place + 1]
        elif argument.startswith(OPTION + "="):
            value = argument.removeprefix(OPTION + "=")
    return value


def install() -> None:
    """Prepare this process for ``--data-impl bfp``, if that is on its command line; a second call does nothing.

    Call it before anything of Megatron is imported.

    Raises:
        IntegrationError: a module that it has to change was imported already.
    """
    hooks = _hooks_for(data_impl(getattr(sys, "argv", ())))
    if not hooks or any(isinstance(finder, AfterImport) for finder in sys.meta_path):
        return
    too_late = sorted(hooks.keys() & sys.modules.keys(), key=lambda name: (-len(name), name))  # inner modules first
    if too_late:
        raise IntegrationError(
            f"{too_late[0]} was imported before megatron_bfp.install(); make that the first line of the script"
        )
    sys.meta_path.insert(0, AfterImport(hooks))


def _hooks_for(value: str | None) -> dict[str, Hook]:
    """Module name -> what to do with it."""
    if value == "bfp":
        return megatron_lm.HOOKS | megatron_deepspeed.HOOKS
    if value == "mmap":
        return megatron_lm.HOOKS_FOR_MMAP
    return {}


def is_script(argument: str) -> bool:
    """Whether an argument of ``python -m megatron_bfp`` is a training script to run."""
    return argument.endswith(".py")


def run_script(arguments: Sequence[str]) -> None:
    """Run a training script as ``python SCRIPT OPTIONS`` would, with ``install`` before its first line.

    Args:
        arguments: the script's path and its options; launchers put ``--local_rank=N`` before the path.

    Raises:
        OptionError: there is no such script.
        IntegrationError: as ``install``.
    """
    place = next(place for place, argument in enumerate(arguments) if is_script(argument))
    script = arguments[place]
    if not os.path.isfile(script):
        raise OptionError(f"{script}: no such training script")
    sys.argv[:] = [script, *arguments[:place], *arguments[place + 1 :]]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    install()
    runpy.run_path(script, run_name="__main__")
