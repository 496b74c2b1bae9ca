"""How the nodes of a preflight meet: each sends its findings to the node of rank 0, which compares them and answers.

A node sends one line of JSON with a greeting, its name, its rank, and what it has found: "facts" and "problems", later
"measured". The answer is one line of JSON: "problems" of all nodes, and what else rank 0 tells them. The nodes meet
twice, before and after the all-reduce.
"""

import argparse
import contextlib
import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from megatron_bfp.errors import BFPError

GREETING = "megatron_bfp preflight"


class PreflightError(BFPError):
    """The cluster is not ready; the message has a line for each problem."""


def report(findings: dict[str, Any], options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Send this node's findings to the node of rank 0, and wait for its answer.

    Args:
        seconds: to wait for it.

    Returns:
        The answer, which has "problems".

    Raises:
        PreflightError: it does not answer.
    """
    address = f"{options.master_addr}:{options.master_port}"
    end, answer, reason = time.monotonic() + seconds, "", "it closed the connection"
    while time.monotonic() < end and not answer:
        try:
            with socket.create_connection((options.master_addr, options.master_port), timeout=5) as connection:
                connection.sendall(json.dumps({"greeting": GREETING, **findings}).encode() + b"\n")
                connection.settimeout(max(1.0, end - time.monotonic()))
                answer = connection.makefile(encoding="utf-8", errors="replace").readline()
        except OSError as error:
            reason = str(error)
        if not answer:
            time.sleep(0.2)  # rank 0 may start later
    try:
        decoded = json.loads(answer)
        decoded["problems"]
        return decoded
    except (ValueError, KeyError, TypeError):
        detail = f"another program answers there: {answer[:40]!r}" if answer else reason
        raise PreflightError(f"node {options.node_name}: no answer from rank 0 at {address}: {detail}") from None


def gather(
    findings: dict[str, Any],
    options: argparse.Namespace,
    seconds: float,
    judge: Callable[[list[dict[str, Any]]], dict[str, Any]],
    names: Sequence[str],
) -> dict[str, Any]:
    """Listen on the master port, judge the findings of all nodes, and send them the answer.

    Args:
        seconds: to wait for the others.
        judge: makes the answer, which has "problems", of the findings of the nodes that came, by their rank.
        names: of all nodes by their rank; empty if they are not known.

    Returns:
        The answer.
    """
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # training binds the port again in a moment
    try:
        listener.bind(("", options.master_port))
        listener.listen(options.nodes)
    except OSError as error:
        findings["problems"].append(
            f"port {options.master_port} cannot be used: {error.strerror}; choose another MASTER_PORT"
        )
        return judge([findings])
    with listener:
        connections, nodes = collect(listener, findings, options, seconds)
        nodes.sort(key=lambda node: node["rank"])
        answer = judge(nodes)
        if len(nodes) < options.nodes:
            answer["problems"].append(_missing(nodes, options, seconds, names))
        for connection in connections:
            with contextlib.suppress(OSError):  # a node that has gone
                connection.sendall(json.dumps(answer).encode() + b"\n")
        for connection in connections:
            # The other side closes first: the port of the one that does stays busy for a minute
            with contextlib.suppress(OSError):
                connection.settimeout(5)
                connection.recv(1)
            connection.close()
    return answer


def _missing(nodes: list[dict[str, Any]], options: argparse.Namespace, seconds: float, names: Sequence[str]) -> str:
    """A line about the nodes that did not come."""
    came = {node["rank"]: node["node"] for node in nodes}
    absent = [names[rank] if names else f"rank {rank}" for rank in range(options.nodes) if rank not in came]
    return (
        f"{len(absent)} of {options.nodes} nodes did not report to {options.master_addr}:{options.master_port} within "
        f"{seconds:.0f} s: {', '.join(absent)}; these did: {', '.join(came.values())}"
    )


def collect(
    listener: socket.socket, findings: dict[str, Any], options: argparse.Namespace, seconds: float
) -> tuple[list[socket.socket], list[dict[str, Any]]]:
    """Wait for the findings of the other nodes.

    Returns:
        Open connections to them; the findings of all nodes.
    """
    connections, nodes = [], [findings]
    end = time.monotonic() + seconds
    while len(nodes) < options.nodes and time.monotonic() < end:
        listener.settimeout(max(0.01, end - time.monotonic()))
        try:
            connection, _ = listener.accept()
            connection.settimeout(5)
            node = json.loads(connection.makefile(encoding="utf-8").readline())
            if node.pop("greeting") != GREETING:
                raise ValueError
        except (OSError, ValueError, KeyError, AttributeError):
            continue  # another program
        connections.append(connection)
        nodes.append(node)
    return connections, nodes


def compare(nodes: list[dict[str, Any]]) -> list[str]:
    """A line for each problem that a node sees by itself, and for each fact in which it differs from most nodes."""
    problems = [f"node {node['node']}: {problem}" for node in nodes for problem in node["problems"]]
    for name in dict.fromkeys(name for node in nodes for name in node["facts"]):
        values = [(node["node"], node["facts"][name]) for node in nodes if name in node["facts"]]
        usual = Counter(value for _, value in values).most_common(1)[0][0]
        agreeing = [node for node, value in values if value == usual]
        others = ", ".join(agreeing[:3]) + (" and others" if len(agreeing) > 3 else "")
        problems += [
            f"node {node}: {name} is {value}, on {others} it is {usual}" for node, value in values if value != usual
        ]
    return problems
