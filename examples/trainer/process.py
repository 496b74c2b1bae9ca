"""How a rank starts and ends: the launcher's variables, wrong options, and an error that waits for nothing.

A rank that fails does not wait for its workers, which ignore the signals that end runs, nor for other ranks, which wait
for it. It prints its error, tells the other ranks, kills its children and exits.

Imports no torch: wrong options are reported before it is loaded.
"""

import contextlib
import importlib.util
import os
import socket
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from megatron_bfp.console import run, tell
from megatron_bfp.errors import OptionError

from .lifeline import CRASHED, Lifeline, kill_children

RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that a launcher sets for each rank."""
OTHER_LAUNCHERS = {"SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpiexec"}
"""Variables with the number of processes, by launchers that do not set ``RENDEZVOUS``."""


def run_rank(main: Callable[[], int | None], name: str) -> int:
    """Run a rank's work. After an error, end this process with all its children.

    Args:
        main: as for ``megatron_bfp.console.run``.
        name: of the command, for messages.

    Returns:
        The exit status of work that finished. After an error the process ends here: with 2 for one of the project's
        errors, 130 for an interrupt, 1 for all others.
    """
    is_done = False

    def work() -> int | None:
        nonlocal is_done
        status = main()
        is_done = True
        return status

    try:
        status = run(work, _title(name), quiet=_is_quiet())
    except SystemExit as error:
        status = _status_of(error)
    except BaseException:
        status = CRASHED
        with contextlib.suppress(OSError, ValueError):  # the reader is gone
            traceback.print_exc()
    if not is_done:
        _leave(status)
    Lifeline.tell_all("done")
    kill_children()  # Python would wait for one that hangs
    return status


def check_command_line(parse: Callable[[], object], name: str) -> None:
    """Answer ``--help`` and wrong options, and end the process then.

    Args:
        parse: raises one of the project's errors for wrong options.
    """
    status = run(lambda: None if parse() else 0, _title(name), quiet=_is_quiet())
    if status:
        sys.exit(status)


def complete_environment(local_rank: int = 0) -> None:
    """Complete the launcher's variables. Without a launcher this process is the only rank.

    Args:
        local_rank: for launchers that pass it as an option and not in the environment.

    Raises:
        OptionError: some variables are missing, or several processes were started that do not know each other.
    """
    missing = [name for name in RENDEZVOUS if not os.environ.get(name)]
    if not missing:
        os.environ.setdefault("LOCAL_RANK", str(local_rank))
        return
    if os.environ.get("RANK") or os.environ.get("WORLD_SIZE"):
        raise OptionError(f"the launcher has not set {', '.join(missing)}; start with deepspeed or torchrun")
    for name, launcher in OTHER_LAUNCHERS.items():
        if os.environ.get(name, "1") != "1":
            if importlib.util.find_spec("mpi4py"):
                return  # DeepSpeed asks MPI
            raise OptionError(
                f"{launcher} started {os.environ[name]} processes that do not know each other: RANK and WORLD_SIZE are "
                "not set, and mpi4py is not installed; let it start torchrun once on each node, as "
                "examples/cluster/launch/slurm.sh does"
            )
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(_free_port())


def _title(name: str) -> str:
    """What messages of this rank begin with."""
    rank = os.environ.get("RANK", "0")
    return name if rank == "0" else f"{name} (rank {rank})"


def _is_quiet() -> bool:
    """Whether another rank of this node reports wrong options."""
    return os.environ.get("LOCAL_RANK", "0") != "0"


def _status_of(error: SystemExit) -> int:
    """The status as Python has it: a number is the status, anything else is printed."""
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    tell(str(error.code))
    return CRASHED


def end_process(status: int) -> NoReturn:
    """End this process at once, without what Python does at its end: Gloo's threads sometimes abort it there, and a run
    that has finished would be one that failed."""
    try:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    finally:
        os._exit(status)


def _leave(status: int) -> NoReturn:
    """Tell the other ranks, and end this process at once with its children. No signal can intervene."""
    try:
        Lifeline.tell_all(f"failed {status}")
        kill_children()
    finally:
        end_process(status)


def _free_port() -> int:
    """A free port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
