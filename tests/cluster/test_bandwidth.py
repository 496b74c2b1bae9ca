"""The preflight's all-reduce: its bandwidth, and the names of ranks that are missing, slow or wrong."""

import argparse
import os
import re

import pytest

pytest.importorskip("tokenizers")

from cluster.bandwidth import GB, Measurement, bus_bandwidth, exchange_rounds, judge, slow_parts
from cluster.preflight import measured_together
from helpers.launching import ENVIRONMENT
from helpers.preflight_nodes import NODES, make_nodes, preflight


def node(name, *ranks):
    """What a node reports of its ranks, each (rank, stage, more fields)."""
    return {"node": name, "measured": [{"rank": rank, "stage": stage, **more} for rank, stage, more in ranks]}


def ring(speeds, ranks_of_a_node=1):
    """Measurements of nodes in a ring, and the names of the ranks' nodes.

    Args:
        speeds: GB/s of each node with the next one; if a node has several ranks, a list of theirs.
    """
    ranks, names = [], {}
    for number, speed in enumerate(speeds):
        for local in range(ranks_of_a_node):
            rank, peer = (node * ranks_of_a_node + local for node in (number, (number + 1) % len(speeds)))
            of_this = speed[local] if isinstance(speed, list) else speed
            ranks.append(Measurement(rank=rank, stage="done", seconds=0.01, exchanges=((peer, of_this * GB),)))
            names[rank] = NODES[number]
    return ranks, names


@pytest.mark.parametrize("nodes", range(1, 12))
def test_each_neighbour_is_met_once_and_one_at_a_time(nodes):
    rounds = exchange_rounds(nodes)
    pairs = [frozenset(pair) for pairs in rounds for pair in pairs]
    ring_of_nodes = {frozenset((number, (number + 1) % nodes)) for number in range(nodes)} if nodes > 1 else set()
    assert len(pairs) == len(set(pairs)) and set(pairs) == ring_of_nodes
    assert len(rounds) <= 3
    for pairs in rounds:
        members = [member for pair in pairs for member in pair]
        assert len(members) == len(set(members))


def test_bus_bandwidth_is_that_of_nccl_tests():
    """2 (n - 1) / n times the size, whatever the number of ranks."""
    assert bus_bandwidth(8 * 10**9, 1.0, 2) == 8e9
    assert bus_bandwidth(8 * 10**9, 2.0, 8) == 7e9


def test_the_slowest_rank_tells_the_time():
    nodes = [node("node-a", (0, "done", {"seconds": 0.1})), node("node-b", (1, "done", {"seconds": 0.4}))]
    problems, (line,) = judge(nodes, 10**9, "gloo", 60)
    expected = "all-reduce of 1000.0 MB between 2 ranks on 2 nodes (gloo): 400.0 ms, bus bandwidth 2.50 GB/s"
    assert (problems, line) == ([], expected)


@pytest.mark.parametrize(
    "speeds, expected",
    [
        ([5, 5, 5, 5], None),
        ([5, 4, 3, 5], None),
        ([5, 1, 1.5, 5], "slow: node node-c, 1.00 to 1.50 GB/s with its neighbours; other pairs have 5.00 GB/s"),
        ([5, 1, 5, 5], "slow: node node-b with node node-c, 1.00 GB/s; other pairs have 5.00 GB/s"),
        ([5, 1, 1], "slow: node node-c, 1.00 GB/s with its neighbours; other pairs have 5.00 GB/s"),
        ([0.1, 0.1], None),  # two nodes: nothing to compare with
    ],
)
def test_a_slow_node_and_a_slow_pair_are_told_apart(speeds, expected):
    assert slow_parts(*ring(speeds)) == ([expected] if expected else [])


def test_a_slow_rank_of_a_node_is_named():
    lines = slow_parts(*ring([[5, 5], [5, 1], [5, 1], [5, 5]], ranks_of_a_node=2))
    assert lines == ["slow: node node-c rank 5, 1.00 GB/s with its neighbours; other pairs have 5.00 GB/s"]


@pytest.mark.parametrize(
    "last, expected",
    [
        ((2, "started", {}), "node node-c did not come within 60 s"),
        ((2, "started", {"error": "no CUDA"}), "node node-c failed: no CUDA"),
        ((2, "ready", {}), "node node-c could not reach rank 0 within 60 s; on nodes with"),
        ((2, "joined", {"error": "a wrong sum: 5.0 in place of 6.0"}), "node node-c failed: a wrong sum: 5.0 in place"),
    ],
)
def test_who_stopped_the_others_is_named_and_they_are_not(last, expected):
    waiting = [node(name, (rank, "came", {})) for rank, name in enumerate(NODES[:2])]
    (problem,), lines = judge([*waiting, node("node-c", last)], 10**6, "gloo", 60)
    assert problem.startswith(f"all-reduce: {expected}") and lines == []


def test_nodes_that_all_came_and_cannot_connect_are_told_about_networks():
    (problem,), _ = judge([node(name, (rank, "came", {})) for rank, name in enumerate(NODES)], 10**6, "nccl", 60)
    names = ", ".join(f"node {name}" for name in NODES)
    assert problem.startswith(f"all-reduce: {names} could not connect to each other within 60 s; on nodes with several")
    assert "NCCL_SOCKET_IFNAME" in problem


def test_one_rank_of_a_node_is_named_with_its_number():
    nodes = [node("node-a", (0, "came", {}), (1, "came", {})), node("node-b", (2, "came", {}), (3, "started", {}))]
    assert judge(nodes, 10**6, "nccl", 60)[0] == ["all-reduce: node node-b rank 3 did not come within 60 s"]


PATCHED = """
import sys
if "cluster.all_reduce_rank" in sys.orig_argv and sys.orig_argv[-6] == "{rank}":
    print("NCCL INFO a message", flush=True)
    {what}
"""
HANGING = "import time; time.sleep(1000)"
CRASHING = "import os; print('no driver', file=sys.stderr, flush=True); os._exit(1)"
SLOW = """import functools, threading, time
    def patch():
        while not hasattr(sys.modules.get("torch.distributed"), "batch_isend_irecv"):
            time.sleep(0.001)
        distributed = sys.modules["torch.distributed"]
        exchange = distributed.batch_isend_irecv
        distributed.batch_isend_irecv = lambda operations: time.sleep(0.3) or exchange(operations)
    threading.Thread(target=patch, daemon=True).start()
"""


def with_change(folder, rank, what):
    """Variables for a node on which one rank of the all-reduce does something before it starts."""
    (folder / "sitecustomize.py").write_text(PATCHED.format(rank=rank, what=what))
    return {"PYTHONPATH": f"{folder}{os.pathsep}{ENVIRONMENT['PYTHONPATH']}"}


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3, 4])
def test_ranks_reduce_and_the_bandwidth_is_printed(tmp_path, count):
    statuses, outputs = preflight(make_nodes(tmp_path, count), megabytes=4)
    assert statuses == [0] * count and outputs[1:] == [""] * (count - 1), outputs
    agreed, line = outputs[0].splitlines()[:2]
    assert f"{count} nodes agree" in agreed
    numbers = re.fullmatch(
        rf"preflight: all-reduce of 4.2 MB between {count} ranks on {count} nodes \(gloo\): ([\d.]+) ms, "
        r"bus bandwidth ([\d.]+) GB/s",
        line,
    )
    milliseconds, speed = map(float, numbers.groups())
    assert speed == pytest.approx(4.194304e-3 / milliseconds * 1e3 * 2 * (count - 1) / count, rel=0.1, abs=0.006)


@pytest.mark.slow
@pytest.mark.parametrize(
    "what, reason", [(HANGING, "did not come within 12 s"), (CRASHING, "failed: no driver")], ids=["hangs", "crashes"]
)
def test_a_rank_that_does_not_come_is_named(tmp_path, what, reason):
    statuses, outputs = preflight(make_nodes(tmp_path), megabytes=4, timeout=12, c=with_change(tmp_path, 2, what))
    assert statuses == [2, 2, 2], outputs
    agreed, line = outputs[0].splitlines()
    assert "3 nodes agree" in agreed and line == f"preflight: error: all-reduce: node node-c {reason}"
    assert outputs[1] == "preflight: error: the node of rank 0 says why\n"


@pytest.mark.slow
def test_a_slow_node_is_named_by_real_exchanges(tmp_path):
    statuses, outputs = preflight(make_nodes(tmp_path, 4), megabytes=4, c=with_change(tmp_path, 2, SLOW))
    assert statuses == [0] * 4, outputs
    assert outputs[1:] == ["", "NCCL INFO a message\n", ""]
    slow = [line for line in outputs[0].splitlines() if "slow: " in line]
    assert len(slow) == 1 and slow[0].startswith("preflight: slow: node node-c, 0.01 GB/s with its neighbours; other")


def test_a_port_that_is_taken_in_the_meantime_is_a_problem():
    """The nodes meet again on it after the all-reduce."""
    options = argparse.Namespace(gpus_per_node=0, all_reduce_mb=1, timeout=5.0)
    measured = node(NODES[0], (0, "done", {"seconds": 0.1})) | {"facts": {}, "problems": []}
    assert measured_together([measured], options)["problems"] == []
    taken = measured | {"problems": ["port 1 cannot be used"]}
    assert measured_together([taken], options)["problems"] == ["node node-a: port 1 cannot be used"]
