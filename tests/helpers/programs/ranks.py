"""Start the ranks of a training script as forks of one process that has imported what they import.

    python tests/helpers/programs/ranks.py RANKS PORT SCRIPT OPTIONS

The imports take 5 s of CPU for each process, and ``deepspeed`` starts two processes more than there are ranks. Tests
whose subject is not the launcher take this one. Its exit status is that of the first rank that failed; like a launcher
it then ends the others.
"""

import importlib
import multiprocessing
import os
import runpy
import sys
from multiprocessing.connection import wait
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))


def run_rank(rank: int, ranks: int, port: str, command: list[str]) -> None:
    """Run the script as one rank, in this process."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")


def main(arguments: list[str]) -> int:
    """Run all ranks; returns the exit status."""
    ranks, port, *command = arguments
    importlib.import_module("trainer.training")
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=run_rank, args=(rank, int(ranks), port, command)) for rank in range(int(ranks))]
    for process in processes:
        process.start()
    alive = {process.sentinel: process for process in processes}
    status = 0
    while alive:
        for sentinel in wait(alive):
            process = alive.pop(sentinel)
            process.join()
            if process.exitcode and not status:
                status = process.exitcode
                for other in alive.values():
                    other.terminate()
    return status % 256


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
