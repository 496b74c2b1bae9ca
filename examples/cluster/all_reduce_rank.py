"""One rank of the preflight's all-reduce: ``all_reduce`` starts it with the fields of ``Task`` as words."""

import contextlib
import dataclasses
import datetime
import json
import os
import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import distributed

from cluster.bandwidth import Measurement, exchange_rounds

WARM_UP, TIMED = 1, 5
"""All-reduces before the measured ones, which connect the ranks; and the measured ones."""
NEVER = datetime.timedelta(days=1)
"""Until a backend gives up. Ranks that hang are killed at the time limit, without an error of each."""


@dataclasses.dataclass(frozen=True)
class Task:
    """What a rank is to do."""

    address: str
    port: int
    """Where rank 0 will listen."""
    rank: int
    nodes: int
    ranks_of_a_node: int
    backend: str
    """nccl or gloo."""
    size: int
    """Bytes to reduce, and to exchange with neighbours."""
    seconds: float
    """The time limit."""


class Rank:
    """A rank, from its start to the measurement."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._end = time.monotonic() + task.seconds
        self._world_size = task.nodes * task.ranks_of_a_node
        self._node, self._local_rank = divmod(task.rank, task.ranks_of_a_node)
        self._device = torch.device("cpu")

    def stages(self) -> Iterator[Measurement]:
        """Each stage once it is reached; fewer if other ranks do not come in time. Their nodes say who they are."""
        if self._task.backend == "nccl":
            self._device = torch.device("cuda", self._local_rank)
            torch.cuda.set_device(self._device)
        data = torch.empty(self._task.size // 4, device=self._device)
        yield self._measurement("ready")
        try:
            store = self._reach_rank_0()
            yield self._measurement("came")
            self._wait_for_all(store, "came")
        except distributed.DistError:
            return
        groups, rank, world_size = distributed.PrefixStore("group", store), self._task.rank, self._world_size
        distributed.init_process_group(
            self._task.backend, store=groups, rank=rank, world_size=world_size, timeout=NEVER
        )
        self._meet()
        yield self._measurement("joined")
        self._check_sum(data)
        seconds = self._seconds(lambda: distributed.all_reduce(data))
        yield self._measurement("done", seconds=seconds, exchanges=tuple(self._exchanges(data)))
        with contextlib.suppress(distributed.DistError):  # others may still read this rank's memory, or be gone
            self._wait_for_all(store, "done")

    def _measurement(self, stage: str, **fields: object) -> Measurement:
        return Measurement(rank=self._task.rank, stage=stage, **fields)

    def _time_left(self) -> datetime.timedelta:
        return datetime.timedelta(seconds=max(0.1, self._end - time.monotonic()))

    def _reach_rank_0(self) -> distributed.Store:
        is_first = self._task.rank == 0
        address, port, timeout = self._task.address, self._task.port, self._time_left()
        return distributed.TCPStore(address, port, is_master=is_first, wait_for_workers=False, timeout=timeout)

    def _wait_for_all(self, store: distributed.Store, stage: str) -> None:
        """Wait until all ranks have reached a stage."""
        store.set(f"{stage}/{self._task.rank}", "")
        store.wait([f"{stage}/{rank}" for rank in range(self._world_size)], self._time_left())

    def _meet(self) -> None:
        """Return when all ranks are here, and this one's device is idle."""
        distributed.all_reduce(torch.zeros(1, device=self._device))
        self._wait_for_device()

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _check_sum(self, data: torch.Tensor) -> None:
        """Reduce the numbers of the ranks, from 1 on."""
        data.fill_(self._task.rank + 1)
        distributed.all_reduce(data)
        expected = self._world_size * (self._world_size + 1) / 2
        if wrong := data[data != expected][:1].tolist():
            raise ValueError(f"a wrong sum: {wrong[0]} in place of {expected}")

    def _exchanges(self, data: torch.Tensor) -> Iterator[tuple[int, float]]:
        """The rank of the same number on each neighbouring node, and the bytes per second to it and from it."""
        received = torch.empty_like(data)
        for pairs in exchange_rounds(self._task.nodes):
            partners = dict(pairs) | {second: first for first, second in pairs}
            if self._node not in partners:  # it waits as often as the others do
                self._meet()
                self._meet()
                continue
            peer = partners[self._node] * self._task.ranks_of_a_node + self._local_rank
            operations = [distributed.P2POp(distributed.isend, data, peer)]
            operations.append(distributed.P2POp(distributed.irecv, received, peer))
            yield peer, self._task.size / self._seconds(lambda: _do(operations))

    def _seconds(self, work: Callable[[], object]) -> float:
        """The time that a piece of work takes on average, after it was done once. All ranks meet before and after."""
        for _ in range(WARM_UP):
            work()
        self._meet()
        start = time.perf_counter()
        for _ in range(TIMED):
            work()
        self._wait_for_device()
        elapsed = time.perf_counter() - start
        self._meet()
        return elapsed / TIMED


def _do(operations: list[distributed.P2POp]) -> None:
    for work in distributed.batch_isend_irecv(operations):
        work.wait()


def main(task: Task) -> None:
    """Print a line of JSON for each stage, and end the process."""
    reached = Measurement(rank=task.rank, stage="started")
    try:
        for reached in Rank(task).stages():
            _tell(reached)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        _tell(dataclasses.replace(reached, error=reason))
    os._exit(0)  # a backend that waits for others would keep the process


def _tell(measurement: Measurement) -> None:
    sys.stdout.write(json.dumps(dataclasses.asdict(measurement)) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    kinds = [field.type for field in dataclasses.fields(Task)]
    main(Task(*(kind(word) for kind, word in zip(kinds, sys.argv[1:], strict=True))))
