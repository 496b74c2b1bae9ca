"""Checkpoints can be written to --save, or the run stops before it begins."""

import errno
import os
import subprocess
from collections import namedtuple

import pytest
from helpers.disk_order import watched_disk
from trainer.checkpoints import save_folder
from trainer.checkpoints.save_folder import check_save, smallest_checkpoint

from megatron_bfp import OptionError


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("mounting needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_fault_C03_a_folder_that_can_be_written_is_made_and_left_empty(tmp_path):
    folder = tmp_path / "a" / "b"
    for _ in range(2):
        check_save(str(folder), 1000)
        assert os.listdir(folder) == []


def test_fault_C03_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OptionError, match=f"^--save {folder}: not a folder; .* {tmp_path / 'file'}$"):
            check_save(str(folder))
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(OptionError, match=f"--save {tmp_path / 'link'}: "):
        check_save(str(tmp_path / "link"))


def test_fault_C03_a_folder_that_cannot_be_written_is_named():
    with pytest.raises(OptionError, match="^--save /proc/checkpoints: cannot be written: .*; give a folder"):
        check_save("/proc/checkpoints")


@pytest.mark.parametrize("call", ["fsync", "replace", "open"])
def test_fault_C03_whatever_a_checkpoint_does_is_tried(tmp_path, monkeypatch, call):
    def fail(*arguments, **keywords):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OptionError, match="cannot be written: Disk quota exceeded"):
        check_save(str(tmp_path))
    monkeypatch.undo()
    assert os.listdir(tmp_path) == []


def test_fault_C03_a_full_disk_is_named(small_disk):
    with pytest.raises(OptionError, match="cannot be written: No space left on device"):
        check_save(str(small_disk / "checkpoints"))
    assert os.listdir(small_disk / "checkpoints") == []


def test_fault_C03_a_read_only_disk_is_named(small_disk):
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(OptionError, match="cannot be written: Read-only file system"):
        check_save(str(small_disk / "checkpoints"))


def test_fault_C03_a_checkpoint_must_have_room(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(save_folder.shutil, "disk_usage", lambda folder: usage(10**12, 0, 84 * 10**9 - 1))
    needed = smallest_checkpoint(7 * 10**9)
    with pytest.raises(OptionError, match=r"has 84.0 GB free, a checkpoint takes at least 84.0 GB"):
        check_save(str(tmp_path), needed)
    check_save(str(tmp_path), needed - 1)
    monkeypatch.setattr(save_folder.shutil, "disk_usage", lambda folder: usage(0, 0, 0))  # tells nothing
    check_save(str(tmp_path), needed)


def test_fault_C03_a_folder_in_place_of_the_file_latest_is_named(tmp_path):
    (tmp_path / "latest").mkdir()
    with pytest.raises(OptionError, match="'latest' is a folder"):
        check_save(str(tmp_path))


def test_what_is_written_is_forced_to_disk_before_it_is_renamed_and_new_folders_too(tmp_path):
    folder = tmp_path / "a" / "b"
    with watched_disk() as disk:
        check_save(str(folder))
    assert disk.unforced == [] and disk.names_not_forced() == []
    forced = [path for kind, path in disk.events if kind == "force"]
    assert str(tmp_path) in forced and str(tmp_path / "a") in forced
