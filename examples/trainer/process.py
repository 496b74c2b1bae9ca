"""How a rank ends: with all its processes, and with all other ranks if it ends before its time.

A rank that fails must wait for nothing: neither for its workers, which ignore the signals that end runs, nor for ranks
that wait for it in turn. It prints its error, kills its children and leaves. Children die with their rank, even if that
is killed: they hold its connections open. Other ranks learn of it from a connection of their own, the lifeline: where
NCCL waits for minutes, a connection that closes tells at once. Rank 0 passes it on to all. A rank that is done says so
before it closes the connection.

Without torch, so that wrong options are told before it is imported.
"""

import contextlib
import ctypes
import importlib.util
import multiprocessing
import os
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from megatron_bfp.console import run
from megatron_bfp.errors import OptionError

CRASHED = 1
"""Exit status after an error that is none of the project's own."""
GRACE_SECONDS = 3.0
"""How long a rank that lost another one may go on: most have an error of their own to tell by then."""
SILENT_SECONDS = 60
"""After so long without an answer, a host that no longer sends anything is lost, too."""
PR_SET_PDEATHSIG = 1
RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What a launcher tells each rank."""
OTHER_LAUNCHERS = {"SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpiexec"}
"""Variables with the number of processes, of launchers that do not tell them where to meet."""


def run_rank(main: Callable[[], int | None], name: str) -> int:
    """Run a rank's work to its end, or end this process with all its children.

    Args:
        main: as for ``command_line.run``.
        name: of the command, for messages.

    Returns:
        The exit status of work that was done. After an error the process ends here: with 2 for one of the project's
        errors, 130 for an interrupt, 1 for all others.
    """
    is_done = False

    def work() -> int | None:
        nonlocal is_done
        found = main()
        is_done = True
        return found

    try:
        status = run(work, _title(name), quiet=_is_quiet())
    except SystemExit as error:
        status = _status_of(error)
    except BaseException:
        status = CRASHED
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            traceback.print_exc()
    if not is_done:
        _leave(status)
    Lifeline.tell_all("done")
    _kill_children()  # one that hangs would be waited for
    return status


def check_command_line(parse: Callable[[], object], name: str) -> None:
    """Answer ``--help`` and wrong options; the process ends then.

    Args:
        parse: raises one of the project's errors for wrong options.
    """
    status = run(lambda: None if parse() else 0, _title(name), quiet=_is_quiet())
    if status:
        sys.exit(status)


def _title(name: str) -> str:
    """What messages of this rank begin with."""
    rank = os.environ.get("RANK", "0")
    return name if rank == "0" else f"{name} (rank {rank})"


def _is_quiet() -> bool:
    """Whether another rank of this node tells what is wrong with options."""
    return os.environ.get("LOCAL_RANK", "0") != "0"


def _status_of(error: SystemExit) -> int:
    """What Python makes of it: a number is a status, any other text is printed."""
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return CRASHED


def _leave(status: int) -> NoReturn:
    """End this process at once, with its children, and tell the other ranks. No signal comes between."""
    try:
        Lifeline.tell_all(f"failed {status}")
        _kill_children()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    finally:
        os._exit(status)


def _kill_children() -> None:
    """SIGKILL to the processes of multiprocessing: they ignore SIGTERM, and one may hang."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # DataLoader's handler takes their end for an accident
    for child in multiprocessing.active_children():
        with contextlib.suppress(OSError):
            child.kill()


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent ends, however that ends.

    Args:
        parent: process id of the parent; if it has ended already, this process ends here.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(CRASHED)


class Lifeline:
    """Connections between rank 0 and all others, which tell when a rank ends. ``Lifeline.start`` makes one.

    What is sent are lines: "rank R SECRET" of a rank that connects, "done" and "failed STATUS" of one that ends,
    "lost R STATUS" of rank 0 to those that are left. A connection that closes without "done" is a rank that was lost.
    """

    _current: "Lifeline | None" = None

    def __init__(self, rank: int, connections: dict[int, socket.socket], listener: socket.socket | None, secret: str):
        self.rank, self._connections, self._listener, self._secret = rank, connections, listener, secret
        self._selector, self._unread = selectors.DefaultSelector(), {}
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
            share: runs a function on rank 0 and gives its result to all ranks.
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
                print(
                    f"rank {rank}: no connection to {os.environ['MASTER_ADDR']}:{port} ({error}): if another rank ends "
                    "before its time, this one may notice it late; open the ports between the nodes",
                    file=sys.stderr,
                    flush=True,
                )
                return
            _keep_alive(connections[0])
            connections[0].sendall(f"rank {rank} {secret}\n".encode())
        cls._current = cls(rank, connections, listener, secret)
        threading.Thread(target=cls._current._watch, name="lifeline", daemon=True).start()

    @classmethod
    def tell_all(cls, line: str) -> None:
        """Send a last line to the ranks that this one is connected to, if any."""
        if cls._current:
            for connection in list(cls._current._connections.values()):
                _send(connection, line)
            if line == "done":
                cls._current._listener = None  # what happens to others is no concern of this rank any more
                cls._current = None

    def close(self) -> None:
        """Close the connections in a child; its parent has them still."""
        for connection in [*self._connections.values(), *filter(None, [self._listener])]:
            with contextlib.suppress(OSError):
                os.close(connection.detach())
        Lifeline._current = None

    def _watch(self) -> None:
        """Listen until this rank is done, and end it when another is lost."""
        while Lifeline._current is self:
            wait = None if self._lost_at is None else max(0.0, self._lost_at + GRACE_SECONDS - time.monotonic())
            for key, _ in self._selector.select(wait):
                self._receive(key.fileobj, key.data)
            if self._lost_at is not None and time.monotonic() >= self._lost_at + GRACE_SECONDS:
                self._end()

    def _receive(self, connection: socket.socket, peer: int | None) -> None:
        """Act on what a connection has."""
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
            return
        text = self._unread.pop(connection, "") + content.decode(errors="replace")
        *lines, rest = text.split("\n")
        self._unread[connection] = rest[:100]
        for line in lines:
            peer = self._understand(line.split(), connection, peer)

    def _understand(self, words: list[str], connection: socket.socket, peer: int | None) -> int | None:
        """Act on a line; returns the rank that has sent it, None of a stranger."""
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
        return peer

    def _lost(self, peer: int, status: int) -> None:
        """Note the first rank that ended before its time, and pass it on."""
        if self._lost_at is None:
            self._lost_at, self._lost_rank, self._status = time.monotonic(), peer, status
            if self.rank == 0:
                for connection in list(self._connections.values()):
                    _send(connection, f"lost {peer} {status}")

    def _end(self) -> NoReturn:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(
                f"rank {self.rank}: rank {self._lost_rank} has ended before its time, so this one ends too; the log of "
                f"rank {self._lost_rank} says why",
                file=sys.stderr,
                flush=True,
            )
        _kill_children()
        os._exit(self._status or CRASHED)


def _listen() -> socket.socket:
    """A listening socket on any free port, for IPv4 and IPv6 where the system has both."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
    return socket.create_server(("", 0), backlog=4096)


def _keep_alive(connection: socket.socket) -> None:
    """Let the system notice a host that is gone without a word."""
    connection.settimeout(5)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, (SILENT_SECONDS - 10) // 10)


def _send(connection: socket.socket, line: str) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(f"{line}\n".encode())


def complete_environment(local_rank: int = 0) -> None:
    """Complete the launcher's variables, of which there are none without a launcher: then this process is alone.

    Args:
        local_rank: as the launcher tells it by an option, if not in the environment.

    Raises:
        OptionError: some are missing, or several processes were started without being told of each other.
    """
    missing = [name for name in RENDEZVOUS if not os.environ.get(name)]
    if not missing:
        os.environ.setdefault("LOCAL_RANK", str(local_rank))
        return
    if os.environ.get("RANK") or os.environ.get("WORLD_SIZE"):
        raise OptionError(f"the launcher has not set {', '.join(missing)}; start with deepspeed or torchrun")
    for name, launcher in OTHER_LAUNCHERS.items():
        if os.environ.get(name, "1") != "1":
            if importlib.util.find_spec("mpi4py"):
                return  # DeepSpeed asks MPI
            raise OptionError(
                f"{launcher} started {os.environ[name]} processes that do not know each other: RANK and WORLD_SIZE are "
                "not set, and mpi4py is not installed; let it start torchrun once on each node, as "
                "examples/cluster/launch/slurm.sh does"
            )
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(_free_port())


def _free_port() -> int:
    """A port that nothing listens to."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
