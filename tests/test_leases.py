"""One process at a time in a folder, also where locks are each machine's own."""

import fcntl
import os
import socket
import time

import pytest

from megatron_bfp import files
from megatron_bfp.errors import OptionError
from megatron_bfp.files import Lease, TakenError, kernel_id
from megatron_bfp.preprocessing import job_folder
from megatron_bfp.preprocessing.job_folder import JobFolder


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(files, "WATCHED_SECONDS", 0.5)
    return str(tmp_path / "lock")


@pytest.fixture
def other_machine(monkeypatch):
    """What follows runs on another machine with the same host name, whose locks are its own."""

    def move():
        monkeypatch.setattr(files, "kernel_id", lambda: "another-kernel")
        monkeypatch.setattr(fcntl, "flock", lambda *_: None)

    return move


def test_fault_B17_a_living_owner_on_another_machine_keeps_the_folder(path, other_machine):
    owner = Lease(path, 0)
    other_machine()
    try:
        with pytest.raises(TakenError, match=f"^{socket.gethostname()}, process {os.getpid()}$"):
            Lease(path, 0)
        assert open(path).read().split()[0] == kernel_id()  # and the next one still sees whose it is
    finally:
        owner.release()
    Lease(path, 0).release()


def test_fault_B17_an_owner_that_no_longer_renews_is_dead(path, other_machine):
    owner = Lease(path, 0)
    owner._ended.set()
    owner._thread.join()
    other_machine()
    start = time.monotonic()
    Lease(path, 0).release()
    assert time.monotonic() - start >= 0.5
    owner._forget()


def test_an_owner_that_this_kernel_says_is_dead_is_not_waited_for(path, monkeypatch):
    with open(path, "w") as file:
        file.write(f"{kernel_id()} {socket.gethostname()} 1\n")
    monkeypatch.setattr(Lease, "_is_renewed", lambda _: pytest.fail("waited"))
    taken = Lease(path, 0)
    with pytest.raises(TakenError):
        Lease(path, 0)
    taken.release()
    Lease(path, 0).release()


@pytest.mark.parametrize("is_renewed", [True, False])
def test_without_locks_an_owner_on_the_same_kernel_is_watched_too(path, monkeypatch, is_renewed):
    def no_locks(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    owner = Lease(path, 0)
    if is_renewed:
        with pytest.raises(TakenError):
            Lease(path, 0)
    else:
        owner._ended.set()
        owner._thread.join()
        Lease(path, 0).release()
    owner.release()


def test_a_fork_of_the_owner_does_not_keep_it(path):
    owner = Lease(path, 0)
    child = os.fork()
    if not child:
        time.sleep(2)
        os._exit(0)
    owner.release()
    Lease(path, 0).release()
    os.kill(child, 9)
    os.waitpid(child, 0)


def test_a_job_s_folder_names_who_has_it(path, tmp_path, monkeypatch):
    monkeypatch.setattr(job_folder, "LOCK_SECONDS", 0)
    folder = str(tmp_path / "out.shards")
    with JobFolder(folder, {}, False):
        with pytest.raises(
            OptionError, match=rf"another process is writing these datasets \(.*, process {os.getpid()}\)"
        ):
            JobFolder(folder, {}, False).__enter__()
    assert not os.path.exists(folder)
