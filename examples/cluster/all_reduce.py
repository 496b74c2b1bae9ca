"""The preflight's all-reduce between all GPUs of all nodes, or between one CPU rank of each: a process for each rank.

A rank that hangs in a driver or in the network cannot be interrupted from inside. So the preflight starts each rank as
a process of ``all_reduce_rank``, and kills it after a time limit. A rank prints a line of JSON, the fields of a
``Measurement``, for each stage that it reaches.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from megatron_bfp.console import tell

MEGABYTES = {"nccl": 256, "gloo": 16}
"""By default. Enough to measure bandwidth rather than latency, little enough to take a moment."""
LEAVE_SECONDS = 5.0
"""How long ranks may take, after the time limit, to say why they stopped."""


class Rank(NamedTuple):
    """A rank that runs."""

    rank: int
    process: subprocess.Popen
    output: TextIO
    errors: TextIO


def backend_of(options: argparse.Namespace) -> str:
    """nccl, or gloo on CPUs."""
    return "nccl" if options.gpus_per_node else "gloo"


def size_of(options: argparse.Namespace) -> int:
    """Bytes to reduce."""
    megabytes = options.all_reduce_mb
    return 2**20 * (MEGABYTES[backend_of(options)] if megabytes is None else megabytes)


def ranks_of_a_node(options: argparse.Namespace) -> int:
    """One for each GPU, or one."""
    return options.gpus_per_node or 1


def measure(options: argparse.Namespace, store_port: int) -> list[dict[str, Any]]:
    """Run this node's ranks, until all end or the time is up.

    Args:
        options: the preflight's.
        store_port: where rank 0 will listen, on ``--master-addr``.

    Returns:
        For each rank, the fields of a ``Measurement``.
    """
    first = options.node_rank * ranks_of_a_node(options)
    ranks = [_start(rank, options, store_port) for rank in range(first, first + ranks_of_a_node(options))]
    end = time.monotonic() + options.timeout + LEAVE_SECONDS
    while time.monotonic() < end and any(rank.process.poll() is None for rank in ranks):
        time.sleep(0.05)
    return [_result(rank) for rank in ranks]


def _start(rank: int, options: argparse.Namespace, store_port: int) -> Rank:
    examples = Path(__file__).resolve().parents[1]
    paths = [str(examples), str(examples.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    words = [options.master_addr, store_port, rank, options.nodes, ranks_of_a_node(options)]
    words += [backend_of(options), size_of(options), options.timeout]
    command = [sys.executable, "-m", "cluster.all_reduce_rank", *map(str, words)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    output, errors = (tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") for _ in range(2))
    return Rank(rank, subprocess.Popen(command, env=environment, stdout=output, stderr=errors), output, errors)


def _result(rank: Rank) -> dict[str, Any]:
    """What a rank printed last, and why it failed, if it did not say so itself."""
    has_ended = rank.process.poll() is not None
    rank.process.kill()
    status = rank.process.wait()
    output, errors = _lines(rank.output), _lines(rank.errors)
    stages = [line for line in output if line.startswith('{"rank"')]
    result = {"rank": rank.rank, "stage": "started", **(json.loads(stages[-1]) if stages else {})}
    for line in output:
        if line not in stages:  # NCCL's messages
            tell(line)
    if has_ended and status:
        result["error"] = errors[-1] if errors else f"exit status {status}"
    return result


def _lines(file: TextIO) -> list[str]:
    """The lines of a file that are not blank; it is closed."""
    with file:
        file.seek(0)
        return [line.strip() for line in file if line.strip()]
