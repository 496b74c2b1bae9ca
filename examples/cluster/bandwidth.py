"""What the times of a preflight's all-reduce say: bandwidth, who did not come, who is slow.

Each rank of a node exchanges data with the rank of the same number on the two nodes beside it, the nodes being a ring.
A pair is slow if it has less than half of the bandwidth of most pairs. If all pairs of a rank are slow and its
neighbours have faster ones, the rank is slow itself; otherwise the pair is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

GB = 1e9
SLOW = 0.5
"""A pair is slow below this part of what three quarters of the pairs have at most."""
NETWORK_HINT = (
    "on nodes with several networks set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME; NCCL_DEBUG=INFO says which are used"
)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What one rank did."""

    rank: int
    stage: str
    """The last that it reached of ``STAGES``."""
    error: str = ""
    """The end of what it printed, if it failed."""
    seconds: float = 0.0
    """Of an all-reduce."""
    exchanges: tuple[tuple[int, float], ...] = ()
    """Other ranks, and bytes per second in each direction."""


STAGES = ("started", "ready", "came", "joined", "done")
"""The process runs; it has its GPU; it has reached rank 0; all ranks are connected; everything is measured."""


def exchange_rounds(nodes: int) -> list[list[tuple[int, int]]]:
    """Pairs of neighbours in a ring of nodes, in rounds in which each node has at most one partner.

    Example: 4 nodes are [[(0, 1), (2, 3)], [(1, 2), (3, 0)]], 3 are [[(0, 1)], [(1, 2)], [(2, 0)]].
    """
    ring = [(node, (node + 1) % nodes) for node in range(nodes if nodes > 2 else nodes - 1)]
    last = [ring.pop()] if nodes % 2 and nodes > 2 else []
    return [pairs for pairs in (ring[::2], ring[1::2], last) if pairs]


def bus_bandwidth(size: int, seconds: float, ranks: int) -> float:
    """Bytes per second on the busiest link, as nccl-tests defines it for an all-reduce: each rank sends and receives
    2 (ranks - 1) / ranks of the data, whatever the algorithm.

    Args:
        size: bytes that are reduced.
    """
    return size / seconds * 2 * (ranks - 1) / ranks


def judge(nodes: Sequence[dict[str, Any]], size: int, backend: str, seconds: float) -> tuple[list[str], list[str]]:
    """The problems of a measurement, and the lines that tell its result.

    Args:
        nodes: the findings of all nodes, by their rank: "node", its name, and "measured", a dict for each of its ranks.
        size: bytes that were reduced.
        seconds: the time limit.
    """
    ranks = [Measurement(**measured) for node in nodes for measured in node["measured"]]
    names = {measured["rank"]: node["node"] for node in nodes for measured in node["measured"]}
    if problems := _problems(ranks, names, seconds):
        return problems, []
    slowest = max(measured.seconds for measured in ranks)
    speed = bus_bandwidth(size, slowest, len(ranks)) / GB
    line = (
        f"all-reduce of {size / 1e6:.1f} MB between {len(ranks)} ranks on {len(nodes)} nodes ({backend}): "
        f"{1000 * slowest:.1f} ms, bus bandwidth {speed:.2f} GB/s"
    )
    return [], [line, *slow_parts(ranks, names)]


def _problems(ranks: Sequence[Measurement], names: dict[int, str], seconds: float) -> list[str]:
    """Errors and ranks that did not come; without these, what those that came could not do."""
    errors: dict[str, list[int]] = {}
    for measured in ranks:
        if measured.error:
            errors.setdefault(measured.error, []).append(measured.rank)
    problems = [f"all-reduce: {_named(failed, names)} failed: {error}" for error, failed in errors.items()]
    late = [measured for measured in ranks if measured.stage != "done" and not measured.error]
    if absent := [measured.rank for measured in late if measured.stage == "started"]:
        problems.append(f"all-reduce: {_named(absent, names)} did not come within {seconds:.0f} s")
    if problems:  # the others waited for them
        return problems
    did_not = {"ready": "could not reach rank 0", "came": "could not connect to each other", "joined": "were too slow"}
    for stage, reason in did_not.items():
        if those := [measured.rank for measured in late if measured.stage == stage]:
            return [f"all-reduce: {_named(those, names)} {reason} within {seconds:.0f} s; {NETWORK_HINT}"]
    return []


def slow_parts(ranks: Sequence[Measurement], names: dict[int, str]) -> list[str]:
    """A line for each rank, and for each pair, that is much slower than the others."""
    pairs: dict[tuple[int, int], float] = {}
    for measured in ranks:
        for other, speed in measured.exchanges:
            pair = min(measured.rank, other), max(measured.rank, other)
            pairs[pair] = min(speed, pairs.get(pair, speed))
    if len(pairs) < 2:
        return []
    usual = sorted(pairs.values())[math.ceil(0.75 * len(pairs)) - 1]
    slow_pairs = {pair: speed for pair, speed in pairs.items() if speed < SLOW * usual}
    slow_ranks = [rank for rank in names if _is_slow(rank, pairs, slow_pairs)]
    lines = []
    if slow_ranks:
        speeds = [speed for pair, speed in slow_pairs.items() if set(pair) & set(slow_ranks)]
        lines.append(f"slow: {_named(slow_ranks, names)}, {_range(speeds)} with its neighbours")
    lines += [
        f"slow: {_named([first], names)} with {_named([second], names)}, {_range([speed])}"
        for (first, second), speed in slow_pairs.items()
        if first not in slow_ranks and second not in slow_ranks
    ]
    return [f"{line}; other pairs have {usual / GB:.2f} GB/s" for line in lines]


def _is_slow(rank: int, pairs: dict[tuple[int, int], float], slow_pairs: dict[tuple[int, int], float]) -> bool:
    """Whether a rank is slow with both neighbours, which are not slow with their others."""
    mine = [pair for pair in pairs if rank in pair]
    others = {other for pair in mine for other in pair} - {rank}
    fast = {member for pair in pairs if pair not in slow_pairs for member in pair}
    return len(mine) > 1 and all(pair in slow_pairs for pair in mine) and bool(others & fast)


def _range(speeds: Sequence[float]) -> str:
    low, high = (f"{speed / GB:.2f}" for speed in (min(speeds), max(speeds)))
    return f"{low} GB/s" if low == high else f"{low} to {high} GB/s"


def _named(ranks: Sequence[int], names: dict[int, str]) -> str:
    """Ranks as words: whole nodes by their names, single ranks with theirs."""
    words = []
    for node in dict.fromkeys(names[rank] for rank in ranks):
        mine = [rank for rank in ranks if names[rank] == node]
        is_whole = len(mine) == sum(name == node for name in names.values())
        numbers = ", ".join(map(str, mine))
        words.append(f"node {node}" if is_whole else f"node {node} rank{'s' * (len(mine) > 1)} {numbers}")
    return ", ".join(words)
