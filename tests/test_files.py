"""Files that appear whole or not at all, and whether the process of a label has ended."""

import fcntl
import os
import signal
import subprocess
import sys

import pytest
from helpers.datasets import ROOT
from helpers.disk_order import watched_disk

from megatron_bfp import files
from megatron_bfp.errors import OptionError
from megatron_bfp.files import has_ended, process_label, whole_folder, write_whole


def test_a_file_is_on_disk_before_it_gets_its_name(tmp_path):
    with watched_disk() as disk:
        write_whole(str(tmp_path / "file"), b"content")
    assert disk.unforced == [] and [kind for kind, _ in disk.events][:2] == ["force", "name"]
    assert (tmp_path / "file").read_bytes() == b"content" and os.listdir(tmp_path) == ["file"]


def test_fault_B17_the_temporary_name_of_a_file_cannot_be_guessed(tmp_path, monkeypatch):
    names = []
    real = os.replace
    monkeypatch.setattr(os, "replace", lambda source, target: names.append(source) or real(source, target))
    for _ in range(20):
        write_whole(str(tmp_path / "file"), b"content")
    assert len(set(names)) == 20
    assert all(len(name.removeprefix(str(tmp_path / "file."))) >= 16 for name in names)


def test_fault_B17_a_link_in_the_way_is_not_followed(tmp_path, monkeypatch):
    (tmp_path / "mine").write_text("mine")
    monkeypatch.setattr(files.secrets, "token_hex", lambda _: "guessed")
    (tmp_path / "file.guessed.part").symlink_to(tmp_path / "mine")
    with pytest.raises(FileExistsError):
        write_whole(str(tmp_path / "file"), b"content")
    assert (tmp_path / "mine").read_text() == "mine"


def write_folder(path, content, overwrite=False):
    with whole_folder(str(path), overwrite) as folder:
        with open(f"{folder}/file", "w", encoding="ascii") as file:
            file.write(content)
        assert not path.exists() or overwrite


def test_a_folder_is_on_disk_before_it_gets_its_name(tmp_path):
    with watched_disk() as disk:
        write_folder(tmp_path / "model", "first")
    assert disk.unforced == []
    with pytest.raises(OptionError, match="model: exists already; give --overwrite to replace it"):
        write_folder(tmp_path / "model", "second")
    assert (tmp_path / "model/file").read_text() == "first"
    write_folder(tmp_path / "model", "second", overwrite=True)
    assert (tmp_path / "model/file").read_text() == "second" and os.listdir(tmp_path) == ["model"]


def test_a_folder_that_fails_leaves_the_one_before(tmp_path):
    write_folder(tmp_path / "model", "first")
    for error, raised in ((OSError(28, "No space left on device"), OptionError), (KeyError("x"), KeyError)):
        with pytest.raises(raised):
            with whole_folder(str(tmp_path / "model"), overwrite=True):
                raise error
    assert (tmp_path / "model/file").read_text() == "first" and os.listdir(tmp_path) == ["model"]


def test_what_a_killed_writer_of_a_folder_left_is_cleared(tmp_path):
    """If it was killed between its two renames, the folder before gets its name again."""
    namespace, pid, start = process_label().split("-")
    ended = f"{namespace}-{pid}-{int(start) - 1}"
    for name in (f".model.{ended}.1", f".model.{ended}.1.replaced", f".model.{process_label()}.1", ".model.other"):
        (tmp_path / name).mkdir()
    (tmp_path / f".model.{ended}.1.replaced/file").write_text("first")
    with pytest.raises(OptionError, match="exists already"):
        write_folder(tmp_path / "model", "second")
    assert (tmp_path / "model/file").read_text() == "first"
    assert sorted(os.listdir(tmp_path)) == sorted(["model", f".model.{process_label()}.1", ".model.other"])


def label_of(wait):
    """The label of a process that waits, or that has ended; and the process."""
    code = "import megatron_bfp.files, sys; print(megatron_bfp.files.process_label(), flush=True)"
    code += "; sys.stdin.read()" if wait else ""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    return process.stdout.readline().strip(), process


def test_fault_B17_a_process_has_ended_when_the_kernel_says_so():
    label, process = label_of(wait=True)
    assert "." not in label and not has_ended(label)
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # killed, its parent has not asked yet
    assert has_ended(label)
    process.communicate()
    assert has_ended(label)


def test_fault_B17_a_later_process_with_the_same_number_is_another():
    namespace, pid, start = process_label().split("-")
    assert not has_ended(f"{namespace}-{pid}-{start}")
    assert has_ended(f"{namespace}-{pid}-{int(start) - 1}")


@pytest.mark.parametrize("label", ["", "-1-1", "host-1-1", "other.host", "0123456789abcdef-99999999-1", "x"])
def test_fault_B17_of_other_machines_and_containers_nothing_is_known(label):
    assert not has_ended(label)


def test_fault_B17_without_proc_nothing_is_known(monkeypatch):
    label, process = label_of(wait=False)
    process.communicate()
    assert has_ended(label)
    monkeypatch.setattr(files, "_pid_namespace", lambda: "")
    assert not has_ended(label) and not has_ended(process_label())


def test_a_file_that_was_renamed_before_it_was_locked_is_not_written_to(tmp_path, monkeypatch):
    """Its owner finished between our opening and our locking it: what we opened is now the finished file."""
    path, finished = tmp_path / "file.part", tmp_path / "file"
    path.write_bytes(b"whole")
    real, calls = fcntl.flock, []

    def flock(descriptor, kind):
        if not calls:
            path.rename(finished)
        calls.append(kind)
        real(descriptor, kind)

    monkeypatch.setattr(files.fcntl, "flock", flock)
    descriptor = files.open_exclusively(str(path))
    os.write(descriptor, b"new")
    os.close(descriptor)
    assert (finished.read_bytes(), path.read_bytes(), len(calls)) == (b"whole", b"new", 2)
