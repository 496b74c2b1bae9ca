"""An error of this package in a training script: one line on standard error and exit status 2, without a traceback.

``python -m megatron_bfp`` catches it itself. For the other ways in it is done in ``sys.excepthook``, which Python calls
if nothing in the script has caught the error.
"""

import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from ..console import QUIET_SECONDS, tell
from ..errors import BFPError

RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
"""Set by torchrun and DeepSpeed; by Open MPI, MPICH and Slurm."""


def rank() -> int:
    """This process's rank as its launcher gave it; 0 without a launcher."""
    for name in RANK_VARIABLES:
        if os.environ.get(name, "").isdecimal():
            return int(os.environ[name])
    return 0


def raise_together(error: BFPError | None) -> None:
    """Raise the error of the first rank that has one, on all ranks. All ranks must call it.

    Otherwise a rank without an error would wait for the others, and end in a traceback of its own.
    """
    from torch import distributed

    errors: list[BFPError | None] = [error]
    if distributed.is_initialized():
        errors = [None] * distributed.get_world_size()
        distributed.all_gather_object(errors, error)
    first = next((error for error in errors if error is not None), None)
    if first is not None:
        first.on_every_rank = True
        raise first


def print_refusals_in_one_line() -> None:
    """Print an error of this package that ends the process as one line; a second call does nothing."""
    if not isinstance(sys.excepthook, _OneLine):
        sys.excepthook = _OneLine(sys.excepthook)


class _OneLine:
    """A ``sys.excepthook`` that prints errors of this package as one line, and leaves others to the hook before it."""

    def __init__(self, others: Callable[..., Any]) -> None:
        self._others = others

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if not isinstance(error, BFPError):
            self._others(kind, error, traceback)
            return
        if rank() == 0 or not error.on_every_rank:
            # not sys.stderr: torch's own hook puts a buffer there while it calls this one
            tell(f"megatron_bfp: error: {error}", sys.__stderr__)
        else:
            time.sleep(QUIET_SECONDS)
        raise SystemExit(2)  # Python takes it as the exit status of the process
