"""How the nodes of a preflight meet: each sends its findings to the node of rank 0, which compares them and answers.

A node sends one line of JSON with a greeting, its name, its rank, "facts" and "problems". The answer is one line of
JSON with the problems of all nodes.
"""

import argparse
import contextlib
import json
import socket
import time
from collections import Counter
from typing import Any

from megatron_bfp.errors import BFPError

GREETING = "megatron_bfp preflight"


class PreflightError(BFPError):
    """The cluster is not ready; the message has a line for each problem."""


def report(findings: dict[str, Any], options: argparse.Namespace) -> list[str]:
    """Send this node's findings to the node of rank 0, and wait for its verdict.

    Returns:
        The problems of all nodes.

    Raises:
        PreflightError: it does not answer.
    """
    address = f"{options.master_addr}:{options.master_port}"
    end, answer, reason = time.monotonic() + options.timeout, "", "it closed the connection"
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
        return json.loads(answer)["problems"]
    except (ValueError, KeyError, TypeError):
        detail = f"another program answers there: {answer[:40]!r}" if answer else reason
        raise PreflightError(f"node {options.node_name}: no answer from rank 0 at {address}: {detail}") from None


def gather(findings: dict[str, Any], options: argparse.Namespace) -> list[str]:
    """Listen on the master port, compare the findings of all nodes, and send them the result.

    Returns:
        A line for each problem.
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
        return compare([findings])
    with listener:
        connections, nodes = collect(listener, findings, options)
        nodes.sort(key=lambda node: node["rank"])
        problems = compare(nodes)
        if len(nodes) < options.nodes:
            names = ", ".join(node["node"] for node in nodes)
            problems.append(
                f"{options.nodes - len(nodes)} of {options.nodes} nodes did not report to {options.master_addr}:"
                f"{options.master_port} within {options.timeout:.0f} s; these did: {names}"
            )
        for connection in connections:
            with contextlib.suppress(OSError):  # a node that has gone
                connection.sendall(json.dumps({"problems": problems}).encode() + b"\n")
        for connection in connections:
            # The other side closes first: the port of the one that does stays busy for a minute
            with contextlib.suppress(OSError):
                connection.settimeout(5)
                connection.recv(1)
            connection.close()
    return problems


def collect(
    listener: socket.socket, findings: dict[str, Any], options: argparse.Namespace
) -> tuple[list[socket.socket], list[dict[str, Any]]]:
    """Wait for the findings of the other nodes.

    Returns:
        Open connections to them; the findings of all nodes.
    """
    connections, nodes = [], [findings]
    end = time.monotonic() + options.timeout
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
