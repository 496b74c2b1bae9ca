"""Turning ``--data-impl bfp`` on for a training script. Without it on the command line, nothing is changed.

There are three ways in: ``python -m megatron_bfp script.py``, ``megatron_bfp.install()`` in a script, and the start-up
file for unedited scripts. All call ``install``, which sets hooks on modules of Megatron-LM and of Megatron-DeepSpeed; a
process imports those of one of them. Importing this module needs numpy alone.
"""

import os
import runpy
import sys
from collections.abc import Sequence
from types import ModuleType

from ..console import tell
from ..errors import OptionError, UnsupportedMegatronError
from .data_impl import OPTION, data_impls
from .hooks import AfterImport, Hook, wait_for
from .megatron_deepspeed import changes as megatron_deepspeed
from .megatron_lm import changes as megatron_lm
from .refusals import print_refusals_in_one_line, rank


def install() -> None:
    """Prepare this process for ``--data-impl bfp`` if it is on its command line; a second call does nothing.

    Call it before anything of Megatron is imported. From then on, an error of this package that ends the process is
    printed as one line; if all ranks meet it, only one of them prints it.

    Raises:
        UnsupportedMegatronError: a module that must be changed was already imported.
    """
    values = data_impls(getattr(sys, "argv", ()))
    hooks = _hooks_for(values)
    if not hooks or any(isinstance(finder, AfterImport) for finder in sys.meta_path):
        return
    if "bfp" in values:
        print_refusals_in_one_line()
    too_late = sorted(hooks.keys() & sys.modules.keys(), key=lambda name: (-len(name), name))  # inner modules first
    if too_late:
        raise UnsupportedMegatronError(
            f"{too_late[0]} was imported before megatron_bfp.install(); make that the first line of the script"
        )
    wait_for(hooks)


def _hooks_for(values: list[str]) -> dict[str, Hook]:
    """The hook of each module to change.

    Args:
        values: of ``--data-impl`` on the command line.
    """
    if "bfp" in values and len(set(values)) > 1:
        refuse = {megatron_lm.OPTIONS: _refuse_several(list(dict.fromkeys(values)))}
        return megatron_lm.HOOKS | megatron_deepspeed.HOOKS | refuse
    if "bfp" in values:
        return megatron_lm.HOOKS | megatron_deepspeed.HOOKS
    if "mmap" in values:
        return megatron_lm.HOOKS_FOR_MMAP
    return {}


def _refuse_several(values: list[str]) -> Hook:
    """A hook that stops Megatron-LM before it parses its options. ``install`` must not do it: the start-up file calls
    it for every program, and in another program these words may mean something else. In Megatron-DeepSpeed another
    value is no contradiction: it names the format of the files, and all its scripts give it."""

    def refuse(_: ModuleType) -> None:
        given = " and ".join(f"{OPTION} {value}" for value in values)
        raise OptionError(f"{given} are both on the command line; leave out all but one")

    return refuse


def is_script(argument: str) -> bool:
    """Whether an argument of ``python -m megatron_bfp`` is a training script to run."""
    return argument.endswith(".py")


def run_script(arguments: Sequence[str]) -> None:
    """Run a training script as ``python SCRIPT OPTIONS`` would, with ``install`` before its first line.

    Args:
        arguments: the script's path and its options; launchers put ``--local_rank=N`` before the path.

    Raises:
        OptionError: there is no such script.
        UnsupportedMegatronError: as ``install``.
    """
    position = next(position for position, argument in enumerate(arguments) if is_script(argument))
    script = arguments[position]
    if not os.path.isfile(script):
        raise OptionError(f"{script}: no such training script")
    sys.argv[:] = [script, *arguments[:position], *arguments[position + 1 :]]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    if not data_impls(sys.argv) and rank() == 0:
        tell(
            f"megatron_bfp: there is no --data-impl bfp on the command line: {script} runs as it would without "
            "megatron_bfp"
        )
    install()
    runpy.run_path(script, run_name="__main__")
