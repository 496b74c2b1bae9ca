"""How ranks end together: children die with their rank, and all ranks end soon after one is lost.

Children die with their rank even if it is killed, as they hold its connections open. Other ranks learn of a lost rank
within seconds from the lifeline, a connection between rank 0 and every other rank; NCCL would wait for minutes. A rank
that is done says so before it closes the connection.
"""

import contextlib
import ctypes
import multiprocessing
import os
import secrets
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from megatron_bfp.console import tell

CRASHED = 1
"""Exit status after an unexpected error."""
PR_SET_PDEATHSIG = 1
GRACE_SECONDS = 3.0
"""How long a rank goes on after another one is lost: by then most have reported an error of their own."""
SILENT_SECONDS = 60
"""A host that has not answered for this long counts as lost."""


def kill_children() -> None:
    """Send SIGKILL to the processes of multiprocessing: they ignore SIGTERM, and one may hang."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # DataLoader's handler would raise an error
    for child in multiprocessing.active_children():
        with contextlib.suppress(OSError):
            child.kill()


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent ends, for whatever reason.

    Args:
        parent: process id of the parent. If it has already ended, this process ends here.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(CRASHED)


def end_deepspeed_s_launcher() -> None:
    """End DeepSpeed's launcher with status 1, if it started this process.

    Its own status would be that of the first rank that it sees ended, and -9 for one that was killed, which a shell
    shows as 247. It looks once a second. Ended by a signal, it exits with 1, after the same treatment of all ranks.
    """
    launcher = os.getppid()
    with contextlib.suppress(OSError):
        with open(f"/proc/{launcher}/cmdline", "rb") as file:
            is_deepspeed = b"deepspeed.launcher.launch" in file.read()
        if is_deepspeed:
            os.kill(launcher, signal.SIGTERM)


class Lifeline:
    """Connections between rank 0 and all others, to notice when a rank ends. ``Lifeline.start`` makes one.

    The protocol is lines of text. A rank sends "rank R SECRET" when it connects, and "done" or "failed STATUS" when it
    ends. Rank 0 sends "lost R STATUS" to the ranks that are left. A connection that closes without "done" is a lost
    rank.
    """

    _current: "Lifeline | None" = None

    def __init__(self, rank: int, connections: dict[int, socket.socket], listener: socket.socket | None, secret: str):
        self.rank, self._connections, self._listener, self._secret = rank, connections, listener, secret
        self._selector = selectors.DefaultSelector()
        self._unread: dict[socket.socket, str] = {}
        self._lost_at: float | None = None
        for peer, connection in connections.items():
            self._selector.register(connection, selectors.EVENT_READ, peer)
        if listener:
            self._selector.register(listener, selectors.EVENT_READ, None)
        os.register_at_fork(after_in_child=self.close)  # a worker would hold the connection of a killed rank open

    @classmethod
    def start(cls, rank: int, world_size: int, share: Callable[[Callable[[], tuple]], tuple]) -> None:
        """Connect this rank. Call it on all ranks.

        Args:
            share: runs a function on rank 0 and returns its result on all ranks.
        """
        if world_size == 1:
            return
        listener = _listen() if rank == 0 else None
        port, secret = share(lambda: (listener.getsockname()[1], secrets.token_hex(16)))
        connections = {}
        if rank:
            try:
                connections[0] = socket.create_connection((os.environ["MASTER_ADDR"], port), timeout=30)
            except OSError as error:
                tell(
                    f"rank {rank}: no connection to {os.environ['MASTER_ADDR']}:{port} ({error}): if another rank "
                    "fails, this one may notice it late; open the ports between the nodes"
                )
                return
            _keep_alive(connections[0])
            connections[0].sendall(f"rank {rank} {secret}\n".encode())
        cls._current = cls(rank, connections, listener, secret)
        threading.Thread(target=cls._current._watch, name="lifeline", daemon=True).start()

    @classmethod
    def tell_all(cls, line: str) -> None:
        """Send a last line to the ranks that this one is connected to."""
        if cls._current:
            for connection in list(cls._current._connections.values()):
                _send(connection, line)
            if line == "done":
                cls._current._listener = None  # other ranks no longer matter to this one
                cls._current = None

    def close(self) -> None:
        """Close the connections in a child; its parent keeps them."""
        for connection in [*self._connections.values(), *filter(None, [self._listener])]:
            with contextlib.suppress(OSError):
                os.close(connection.detach())
        Lifeline._current = None

    def _watch(self) -> None:
        """Listen until this rank is done; end it if another one is lost."""
        while Lifeline._current is self:
            wait = None if self._lost_at is None else max(0.0, self._lost_at + GRACE_SECONDS - time.monotonic())
            for key, _ in self._selector.select(wait):
                self._receive(key.fileobj, key.data)
            if self._lost_at is not None and time.monotonic() >= self._lost_at + GRACE_SECONDS:
                self._end()

    def _receive(self, connection: socket.socket, peer: int | None) -> None:
        """Read from a connection, and act on complete lines."""
        if connection is self._listener:
            with contextlib.suppress(OSError):
                accepted, _ = connection.accept()
                _keep_alive(accepted)
                self._selector.register(accepted, selectors.EVENT_READ, None)
            return
        try:
            content = connection.recv(4096)
        except OSError:
            content = b""
        if not content:
            self._selector.unregister(connection)
            if self._connections.pop(peer, None):
                self._lost(peer, CRASHED)
                end_deepspeed_s_launcher()
            return
        text = self._unread.pop(connection, "") + content.decode(errors="replace")
        *lines, rest = text.split("\n")
        self._unread[connection] = rest[:100]
        for line in lines:
            peer = self._understand(line.split(), connection, peer)

    def _understand(self, words: list[str], connection: socket.socket, peer: int | None) -> int | None:
        """Act on a line; returns the rank that sent it, None for a stranger."""
        match words:
            case ["rank", rank, secret] if peer is None and secrets.compare_digest(secret, self._secret):
                peer = int(rank)
                self._connections[peer] = connection
                self._selector.modify(connection, selectors.EVENT_READ, peer)
                if self._lost_at is not None:
                    _send(connection, f"lost {self._lost_rank} {self._status}")
            case ["done"] if peer is not None:
                self._connections.pop(peer, None)
            case ["failed", status] if peer is not None:
                self._connections.pop(peer, None)
                self._lost(peer, int(status))
            case ["lost", rank, status] if peer == 0:
                self._lost(int(rank), int(status))
                if int(status) == CRASHED:
                    end_deepspeed_s_launcher()
        return peer

    def _lost(self, peer: int, status: int) -> None:
        """Remember the first lost rank, and pass it on."""
        if self._lost_at is None:
            self._lost_at, self._lost_rank, self._status = time.monotonic(), peer, status
            if self.rank == 0:
                for connection in list(self._connections.values()):
                    _send(connection, f"lost {peer} {status}")

    def _end(self) -> NoReturn:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            tell(
                f"rank {self.rank}: rank {self._lost_rank} ended unexpectedly, so this one ends too; see the log of "
                f"rank {self._lost_rank}"
            )
        kill_children()
        os._exit(self._status or CRASHED)


def _listen() -> socket.socket:
    """A listening socket on any free port, for IPv4 and IPv6 where the system has both."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
    return socket.create_server(("", 0), backlog=4096)


def _keep_alive(connection: socket.socket) -> None:
    """Let the system notice a host that vanished."""
    connection.settimeout(5)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, (SILENT_SECONDS - 10) // 10)


def _send(connection: socket.socket, line: str) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(f"{line}\n".encode())
