"""Tasks done by Ray, on the machines of a cluster that share a file system. Ray tries again what a lost worker did."""

import logging
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from ...console import tell
from ...errors import InputError, OptionError
from .processes import ATTEMPTS, MakeWork, Report, is_panic, portable

LOCAL = "local"
"""The address of a cluster that is started on this machine for the duration of the call."""


def run_in_ray(
    make_work: MakeWork, tasks: Iterable[Any], address: str, workers: int, report: Report
) -> Iterator[tuple[Any, Any]]:
    """Do tasks as ``run_in_processes`` does.

    Args:
        address: of the cluster, as ``ray.init`` takes it: "auto" for the one this machine belongs to.
        workers: of a cluster that is started here; others use all their cores.
        report: is told of whole tasks.

    Raises:
        What the work raises.
        OptionError: Ray is not installed, or there is no such cluster.
        InputError: the process of a task was lost ``ATTEMPTS`` times.
    """
    try:
        import ray
    except ImportError:
        raise OptionError("--executor ray needs the ray package: pip install 'megatron-bfp[ray]'") from None
    local: dict[str, Any] = {"num_cpus": workers, "include_dashboard": False} if address == LOCAL else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **local)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = str(error).strip().split("\n")[0]
        raise OptionError(f"--ray-address {address}: {reason}") from None
    try:
        yield from _run(ray, make_work, iter(tasks), report)
    finally:
        ray.shutdown()


def _run(ray: Any, make_work: MakeWork, tasks: Iterator[Any], report: Report) -> Iterator[tuple[Any, Any]]:
    at_once = 2 * max(1, int(ray.cluster_resources().get("CPU", 1)))  # so that no core waits for its next task
    remote = ray.remote(max_retries=0)(_do)
    shared = ray.put(make_work)
    under_way: dict[Any, tuple[Any, int]] = {}
    while True:
        for task in islice(tasks, at_once - len(under_way)):
            under_way[remote.remote(shared, task)] = (task, 1)
        if not under_way:
            return
        (reference,), _ = ray.wait(list(under_way))
        task, attempts = under_way.pop(reference)
        try:
            kind, value, parts = ray.get(reference)
        except ray.exceptions.RayError as error:
            _say_lost(task, attempts, error)
            under_way[remote.remote(shared, task)] = (task, attempts + 1)
            continue
        if kind == "raised":
            raise value
        for part in parts:
            report(part)
        yield task, value


def _say_lost(task: Any, attempts: int, error: Exception) -> None:
    """Say that a worker was lost.

    Raises:
        InputError: its task is not to be tried again.
    """
    lines = str(error).strip().splitlines()
    reason = ": ".join(dict.fromkeys((lines[0], lines[-1].strip())))  # of a traceback the last line says why
    if attempts == ATTEMPTS:
        raise InputError(f"{task}: its worker was lost {ATTEMPTS} times: {reason}")
    tell(f"a worker was lost at {task}: {reason}; trying again")


def _do(make_work: MakeWork, task: Any) -> tuple[str, Any, list[Any]]:
    """What a worker does. Errors are results, because Ray would wrap them in its own."""
    parts: list[Any] = []
    try:
        work = make_work(task)
        work.compute(parts.append)
        return "done", work.finish(), parts
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        return "raised", portable(error, task), []
