"""An error of this package in a training script: one line on standard error and exit status 2, without a traceback.

``python -m megatron_bfp`` catches it itself. For the other ways in, ``sys.excepthook`` is asked last of all, when
nothing in the script has caught it.
"""

import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from ..console import QUIET_SECONDS
from ..errors import BFPError

RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
"""Of torchrun and DeepSpeed; of programs that start ranks without them."""


def rank() -> int:
    """This process's rank as its launcher says; 0 without one."""
    for name in RANK_VARIABLES:
        if os.environ.get(name, "").isdecimal():
            return int(os.environ[name])
    return 0


def raise_together(error: BFPError | None) -> None:
    """Raise the error of the first rank that has one, on all ranks. To be called by all of them.

    Otherwise a rank without an error would go on to wait for the others, and end in a traceback of its own.
    """
    from torch import distributed

    errors = [error]
    if distributed.is_initialized():
        errors = [None] * distributed.get_world_size()
        distributed.all_gather_object(errors, error)
    first = next((found for found in errors if found is not None), None)
    if first is not None:
        first.on_every_rank = True
        raise first


def print_refusals_in_one_line() -> None:
    """Let errors of this package that end the process be printed as one line; a second call does nothing."""
    if not getattr(sys.excepthook, "is_of_megatron_bfp", False):
        sys.excepthook = _one_line(sys.excepthook)


def _one_line(others: Callable[..., Any]) -> Callable[..., Any]:
    def print_and_end(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if not isinstance(error, BFPError):
            others(kind, error, traceback)
            return
        if rank() == 0 or not error.on_every_rank:
            # not sys.stderr: torch's own hook puts a buffer there while it calls this one
            print(f"megatron_bfp: error: {error}", file=sys.__stderr__, flush=True)
        else:
            time.sleep(QUIET_SECONDS)
        raise SystemExit(2)  # which Python takes for the process's exit status

    print_and_end.is_of_megatron_bfp = True
    return print_and_end
