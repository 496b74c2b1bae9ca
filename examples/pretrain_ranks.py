"""What one rank does for all: printing, and work that the others wait for."""

import datetime
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from torch import distributed

from megatron_bfp.errors import BFPError, OptionError

LONGEST_WAIT = datetime.timedelta(days=1)
"""For rank 0. Other process groups give up after DeepSpeed's ten minutes; an index or a conversion can take longer."""


def log(line: str) -> None:
    """Print a line from rank 0. A reader that is gone, as a launcher that was killed, is no reason to stop."""
    if distributed.get_rank() == 0:
        try:
            print(line, flush=True)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def on_first_rank(work: Callable[[], Any]) -> Any:
    """Do something on rank 0 while the others wait, and give its result to all. Call it on all ranks.

    Args:
        work: its result must be one that pickle takes.

    Raises:
        OptionError: on all ranks, if the work raised one of the project's errors on rank 0.
    """
    answer = [None, None]
    if distributed.get_rank() == 0:
        try:
            answer[0] = work()
        except BFPError as error:
            answer[1] = str(error)
    distributed.broadcast_object_list(answer, group=_patient_group())
    if answer[1] is not None:
        raise OptionError(answer[1])
    return answer[0]


@functools.cache
def _patient_group() -> distributed.ProcessGroup:
    return distributed.new_group(backend="gloo", timeout=LONGEST_WAIT)
