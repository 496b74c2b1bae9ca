"""Sequence indexes on file systems that are read-only, are not those of the data, or do not rename as usual."""

import contextlib
import errno
import os
import subprocess

import pytest
from helpers.datasets import documents_of, write

from megatron_bfp import SequenceIndexError, pack
from megatron_bfp.indexed_dataset.reader import IndexedDataset
from megatron_bfp.sequence_index import builder
from megatron_bfp.sequence_index.builder import build, open_or_build
from megatron_bfp.sequence_index.key import IndexKey, index_directory
from megatron_bfp.sequence_index.verify import verify_all

LENGTHS = [5, 0, 12, 3, 16, 2, 2, 9, 7, 1, 20, 8]
KEY = IndexKey(8, 0, 12)


@pytest.fixture
def mounted(tmp_path):
    """Makes file systems of their own, and remounts them."""
    folders = []

    def mount(name, *options):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", *options, "tmpfs", str(folder)]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
            pytest.skip("mounting a file system is allowed to root alone, and not everywhere")
        if folder not in folders:
            folders.append(folder)
        return folder

    yield mount
    for folder in folders:
        subprocess.run(["umount", str(folder)], check=True)


def test_data_on_a_read_only_file_system_and_a_cache_on_another(mounted):
    data, cache = mounted("data"), mounted("cache")
    prefix = write(data / "data", documents_of(LENGTHS)).prefix
    mounted("data", "-o", "remount,ro")
    dataset = IndexedDataset(prefix)
    index = open_or_build(dataset, KEY, str(cache))
    assert index.was_built and index.path.startswith(str(cache)) and not os.path.exists(index_directory(prefix))
    again = open_or_build(dataset, KEY, str(cache))
    assert not again.was_built and [index.path for index in verify_all(prefix, str(cache))] == [again.path]
    with pytest.raises(SequenceIndexError, match="data.bfp .Read-only file system.*Give a writable --data-cache-path"):
        open_or_build(dataset, KEY)
    with pytest.raises(SequenceIndexError, match="data.bfp/s8-d0-12: cannot be written: Read-only file system"):
        build(dataset, KEY, index_directory(prefix))
    mounted("cache", "-o", "remount,ro")
    other = IndexKey(8, 0, 11)
    with pytest.raises(SequenceIndexError, match=r"no place to build it: .*data.bfp \(.*\), .*cache.*bfp \("):
        open_or_build(dataset, other, str(cache))


def test_an_index_beside_data_that_became_read_only_is_used(mounted):
    data = mounted("data")
    dataset = write(data / "data", documents_of(LENGTHS))
    build(dataset, KEY, index_directory(dataset.prefix))
    mounted("data", "-o", "remount,ro")
    assert not open_or_build(dataset, KEY).was_built
    assert len(verify_all(dataset.prefix)) == 1


@pytest.mark.case(10)
@pytest.mark.parametrize(
    "number", [errno.EEXIST, errno.ENOTEMPTY, errno.EPERM, errno.EACCES, errno.EBUSY, errno.EINVAL]
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_where_renaming_over_a_directory_fails_in_any_way_one_index_is_left(
    write_dataset, monkeypatch, number, overwrite
):
    """Two builders that do not see each other's locks: the other one is done just before this one renames."""
    dataset = write_dataset(documents_of(LENGTHS))
    directory = index_directory(dataset.prefix)
    if overwrite:
        build(dataset, KEY, directory)
    rename, write_arrays = os.rename, builder._write

    def fail_over_a_directory(source, target):
        if os.path.isdir(target):
            raise OSError(number, os.strerror(number), source, None, target)
        rename(source, target)

    def other_is_faster(*arguments):
        monkeypatch.setattr(builder, "_write", write_arrays)
        write_arrays(*arguments)
        build(dataset, KEY, directory, overwrite)

    monkeypatch.setattr(os, "rename", fail_over_a_directory)
    monkeypatch.setattr(builder, "_write", other_is_faster)
    monkeypatch.setattr(builder, "_remove_leftovers", lambda *_: None)  # of the builder that is at work
    monkeypatch.setattr(builder, "locked_directory", lambda _: contextlib.nullcontext(False))
    assert len(build(dataset, KEY, directory, overwrite)) == len(pack(LENGTHS, 8))
    assert os.listdir(directory) == [KEY.name]
    assert len(verify_all(dataset.prefix)) == 1
