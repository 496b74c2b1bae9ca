"""One rank of the preflight's all-reduce: ``all_reduce`` starts it, with the arguments of ``main`` as words.

Each rank adds its number plus one, so a wrong sum is seen.
"""

import contextlib
import dataclasses
import datetime
import json
import os
import sys
import time
from collections.abc import Callable, Iterator

from cluster.bandwidth import Measurement, exchange_rounds

WARM_UP, TIMED = 1, 5
"""All-reduces before the measured ones, which connect the ranks; and the measured ones."""
NEVER = datetime.timedelta(days=1)
"""Until a backend gives up. Ranks that hang are killed at the time limit, without an error of each."""


def main(
    address: str, port: int, rank: int, nodes: int, ranks_of_a_node: int, backend: str, size: int, seconds: float
) -> None:
    """Meet the other ranks, reduce, exchange data with the neighbours, and print how far that went.

    Args:
        address, port: where rank 0 listens.
        size: bytes to reduce.
        seconds: the time limit.
    """
    reached = Measurement(rank=rank, stage="started")
    try:
        for reached in _stages(address, port, rank, nodes, ranks_of_a_node, backend, size, seconds):
            _tell(reached)
    except Exception as error:
        _tell(dataclasses.replace(reached, error=str(error).strip().partition("\n")[0] or type(error).__name__))
    sys.stdout.flush()
    os._exit(0)  # a backend that waits for others would keep the process


def _tell(measurement: Measurement) -> None:
    sys.stdout.write(json.dumps(dataclasses.asdict(measurement)) + "\n")
    sys.stdout.flush()


def _stages(
    address: str, port: int, rank: int, nodes: int, ranks_of_a_node: int, backend: str, size: int, seconds: float
) -> Iterator[Measurement]:
    """The stages of ``Measurement``, each as soon as it is reached; fewer if other ranks do not come in time."""
    import torch
    from torch import distributed

    end = time.monotonic() + seconds
    world_size, node, local_rank = nodes * ranks_of_a_node, *divmod(rank, ranks_of_a_node)
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    data, other = (torch.full((size // 4,), rank + 1.0, device=device) for _ in range(2))
    yield Measurement(rank=rank, stage="ready")

    def time_left() -> datetime.timedelta:
        return datetime.timedelta(seconds=max(0.1, end - time.monotonic()))

    store = distributed.TCPStore(address, port, is_master=rank == 0, wait_for_workers=False, timeout=time_left())
    store.set(f"came/{rank}", "")
    yield Measurement(rank=rank, stage="came")
    try:
        store.wait([f"came/{number}" for number in range(world_size)], time_left())
    except distributed.DistError:  # their nodes say who they are
        return

    groups = distributed.PrefixStore("group", store)
    distributed.init_process_group(backend, store=groups, rank=rank, world_size=world_size, timeout=NEVER)

    def wait_for_all() -> None:
        distributed.all_reduce(torch.zeros(1, device=device))
        if backend == "nccl":
            torch.cuda.synchronize()

    wait_for_all()
    yield Measurement(rank=rank, stage="joined")

    distributed.all_reduce(data)
    expected = world_size * (world_size + 1) / 2
    if not bool((data == expected).all()):
        raise ValueError(f"a wrong sum: {data[data != expected][0].item()} in place of {expected}")
    data.fill_(0)
    reduction = _seconds(lambda: distributed.all_reduce(data), wait_for_all)

    exchanges = []
    for pairs in exchange_rounds(nodes):
        neighbour = {first: second for pair in pairs for first, second in (pair, pair[::-1])}.get(node)
        if neighbour is None:
            for _ in range(2):
                wait_for_all()
            continue
        peer = neighbour * ranks_of_a_node + local_rank

        def exchange(peer: int = peer) -> None:
            operations = [distributed.P2POp(distributed.isend, data, peer)]
            operations.append(distributed.P2POp(distributed.irecv, other, peer))
            for work in distributed.batch_isend_irecv(operations):
                work.wait()

        exchanges.append((peer, size / _seconds(exchange, wait_for_all)))
    yield Measurement(rank=rank, stage="done", seconds=reduction, exchanges=tuple(exchanges))
    store.set(f"done/{rank}", "")  # others may still read this rank's memory
    with contextlib.suppress(distributed.DistError):  # rank 0, which holds the store, may be gone
        store.wait([f"done/{number}" for number in range(world_size)], time_left())


def _seconds(work: Callable[[], None], wait_for_all: Callable[[], None]) -> float:
    """The time that a piece of work takes, on average, after it was done once.

    Args:
        wait_for_all: returns when all ranks have called it, and their devices are idle. It is called twice.
    """
    import torch

    def wait_for_device() -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    for _ in range(WARM_UP):
        work()
    wait_for_all()
    start = time.perf_counter()
    for _ in range(TIMED):
        work()
    wait_for_device()
    elapsed = time.perf_counter() - start
    wait_for_all()
    return elapsed / TIMED


if __name__ == "__main__":
    kinds = (str, int, int, int, int, str, int, float)
    main(*(kind(word) for kind, word in zip(kinds, sys.argv[1:], strict=True)))
