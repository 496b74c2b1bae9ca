"""Runs of Megatron-Bridge's pretrain on the CPU, one after the other: a line of JSON on standard input starts one.

    {"what": "plain", "ranks": 2, "port": 2345, "folder": "/data", "overrides": ["train.train_iters=3"], "options": {}}

The reply is a line of JSON with the exit status and all output. The ranks of each run are forks of this process: to
import Megatron-Bridge takes 10 s of CPU. ``what`` names a function in ``watched.py``.
"""

import json
import os
import sys
import tempfile
import time


def serve() -> None:
    """Answer until standard input ends. The first line says which versions run."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # from now on, only replies go to the old standard output
    import on_cpu  # not at the top: Megatron-Bridge starts processes that execute this file again
    import watched  # noqa: F401

    print(json.dumps(on_cpu.VERSIONS), file=replies, flush=True)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), file=replies, flush=True)


def run(job: dict) -> dict:
    """Start all ranks, and wait for them. If one fails, the others are ended."""
    with tempfile.TemporaryFile("w+") as output:
        ranks = {fork(job, rank, output.fileno()): rank for rank in range(job["ranks"])}
        status = 0
        deadline = time.monotonic() + job.get("seconds", 240)
        while ranks:
            process, ended = os.waitpid(-1, os.WNOHANG)
            if process:
                ranks.pop(process)
                status = status or os.waitstatus_to_exitcode(ended)
            elif status or time.monotonic() > deadline:
                status = status or 124
                for other in ranks:
                    os.kill(other, 9)
            else:
                time.sleep(0.05)
            if status and ranks:
                time.sleep(0.5)
        output.seek(0)
        return {"status": status, "output": output.read()}


def fork(job: dict, rank: int, output: int) -> int:
    """Start a rank; returns its process id."""
    import watched

    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = os.fdopen(1, "w", buffering=1)
        sys.stderr = os.fdopen(2, "w", buffering=1)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job["ranks"])}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job["port"])}
        os.chdir(job["folder"])
        watched.train(job)
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve()
