"""Building a sequence index: whole or absent, whoever is killed and however many build at once."""

import fcntl
import multiprocessing
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from helpers.datasets import DATA, ROOT, documents_of, write
from helpers.disk_order import watched_disk
from helpers.indexes import LENGTHS, content_of

from megatron_bfp import OptionError, SequenceIndexError, pack
from megatron_bfp.files import process_label
from megatron_bfp.indexed_dataset.reader import IndexedDataset
from megatron_bfp.indexed_dataset.writer import IndexedDatasetWriter
from megatron_bfp.sequence_index import builder as index_building
from megatron_bfp.sequence_index.builder import build, open_or_build
from megatron_bfp.sequence_index.key import IndexKey, cached_index_directory, index_directory
from megatron_bfp.sequence_index.reader import SequenceIndex
from megatron_bfp.sequence_index.verify import verify_all


def test_an_index_is_opened_and_not_built_again(dataset):
    first = open_or_build(dataset, IndexKey(8, 0, 12))
    before = os.stat(os.path.join(first.path, "index.json"))
    second = open_or_build(dataset, IndexKey(8, 0, 12))
    after = os.stat(os.path.join(second.path, "index.json"))
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_where_the_data_is_read_only_the_cache_is_used(dataset, tmp_path, read_only):
    read_only(index_directory(dataset.prefix))
    cache = str(tmp_path / "cache")
    index = open_or_build(dataset, IndexKey(8, 0, 12), cache)
    assert index.path.startswith(cache)
    assert open_or_build(dataset, IndexKey(8, 0, 12), cache).path == index.path
    assert verify_all(dataset.prefix, cache)[0].path == index.path


def test_with_no_place_to_write_the_error_says_so(dataset, read_only):
    read_only(index_directory(dataset.prefix))
    with pytest.raises(SequenceIndexError, match="no place to build.*--data-cache-path"):
        open_or_build(dataset, IndexKey(8, 0, 12))


def test_a_range_beyond_the_documents_is_refused(dataset):
    with pytest.raises(OptionError, match="12 documents"):
        build(dataset, IndexKey(8, 0, 13), index_directory(dataset.prefix))


def test_an_index_can_be_read_by_others(index):
    assert os.stat(index.path).st_mode & 0o055 == 0o055 & ~current_umask()


def current_umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def build_in_child(prefix, key, start, delay):
    start.wait()
    time.sleep(delay)
    dataset = IndexedDataset(prefix)
    index = build(dataset, key, index_directory(prefix))
    os._exit(0 if len(index) else 1)


def wait_for_a_build(directory, key, seconds):
    """Until a builder has begun to write, or one is done."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if directory.is_dir() and any(name.startswith(".") or name == key.name for name in os.listdir(directory)):
            return
        time.sleep(0.001)


@pytest.mark.case(10)
@pytest.mark.parametrize("num_rounds", [50, pytest.param(200, marks=pytest.mark.slow)])
def test_racing_and_killed_builders_leave_one_whole_index(tmp_path, num_rounds):
    """So many rounds or more of 8 processes, some of them killed at random moments."""
    rng = random.Random(num_rounds)
    lengths = np.load(DATA / "text_lengths.npy")[:60_000]
    with IndexedDatasetWriter(str(tmp_path / "data"), np.uint16) as writer:
        writer.add(np.zeros(int(lengths.sum()), dtype=np.uint16), lengths)
        writer.finalize()
    dataset = IndexedDataset(str(tmp_path / "data"))
    key = IndexKey(2048, 0, 60_000)
    directory = tmp_path / "data.bfp"
    build(dataset, key, str(directory))
    started = time.monotonic()
    build(dataset, key, str(directory), overwrite=True)
    latest_kill = 2 * (time.monotonic() - started)  # of the second build, when nothing is done for the first time
    reference = content_of(directory / key.name)
    context = multiprocessing.get_context("fork")
    rounds = killed_rounds = leftover_rounds = 0
    while rounds < num_rounds or (min(killed_rounds, 3 * leftover_rounds) <= 10 and rounds < 300):
        rounds += 1
        shutil.rmtree(directory)
        start = context.Event()  # starting a process takes longer than a build, where this one is large
        builders = [
            context.Process(target=build_in_child, args=(dataset.prefix, key, start, rng.random() * 0.01))
            for _ in range(8)
        ]
        for builder in builders:
            builder.start()
        start.set()
        victims = rng.sample(builders, rng.choice([0, 1, 4, 8, 8]))
        if len(victims) == 8:  # in the middle of a build, however busy the machine is
            wait_for_a_build(directory, key, seconds=5)
            time.sleep(rng.random() * latest_kill / 4)
        else:
            time.sleep(rng.random() * latest_kill)
        for victim in victims:
            victim.kill()
        for builder in builders:
            builder.join()
        statuses = {builder.exitcode for builder in builders if builder not in victims}
        assert statuses <= {0}
        hit = any(victim.exitcode == -signal.SIGKILL for victim in victims)
        if (
            0 < len(victims) < 8
        ):  # on a busy machine a build's time is a guess: kill later after a hit, earlier after a miss
            latest_kill *= 1.25 if hit else 0.8
        killed_rounds += hit
        leftover_rounds += directory.is_dir() and any(name.startswith(".") for name in os.listdir(directory))
        build(dataset, key, str(directory))
        assert os.listdir(directory) == [key.name]
        assert content_of(directory / key.name) == reference
    print(f"rounds {rounds}, with a kill {killed_rounds}, with something left behind {leftover_rounds}")
    assert killed_rounds > 10 and leftover_rounds > 3  # else the test does not test what it says


def test_a_builder_that_cannot_see_the_lock_takes_the_faster_one_s_result(dataset, monkeypatch):
    """Where a file system has no locks, two builders work at once, and the second finds the first one's index."""
    key, directory = IndexKey(8, 0, 12), index_directory(dataset.prefix)
    write_arrays = index_building._write

    def overtaken(*arguments):
        monkeypatch.setattr(index_building, "_write", write_arrays)
        write_arrays(*arguments)
        shutil.copytree(arguments[2], os.path.join(directory, key.name))

    monkeypatch.setattr(index_building, "_write", overtaken)
    assert len(build(dataset, key, directory)) == len(pack(LENGTHS, 8))
    assert os.listdir(directory) == [key.name]


def test_without_locks_a_builder_at_work_is_not_disturbed(dataset, tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    at_work = tmp_path / "data.bfp" / f".s8-d0-12.{socket.gethostname()}.1.abcd"
    at_work.mkdir(parents=True)
    build(dataset, IndexKey(8, 0, 12), str(tmp_path / "data.bfp"))
    assert at_work.is_dir()


def builder_s_folder(directory, wait):
    """The unfinished folder of another process, which waits or has ended; and the process."""
    code = "import sys; from megatron_bfp.files import process_label; print(process_label(), flush=True)"
    code += "; sys.stdin.read()" if wait else ""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", code], text=True, env=environment, **pipes)
    folder = directory / f".s8-d0-12.{process.stdout.readline().strip()}.abcd0123"
    folder.mkdir(parents=True)
    if not wait:
        process.communicate()
    return folder, process


def test_fault_B17_a_living_builder_s_folder_survives_whatever_locks_and_host_names_say(dataset, tmp_path):
    """Its lock is not seen here, as on Lustre with localflock, and we hold that of the directory."""
    directory = tmp_path / "data.bfp"
    at_work, process = builder_s_folder(directory, wait=True)
    same_name = directory / f".s8-d0-12.{socket.gethostname()}.1.abcd"  # of a container with our host's name
    same_name.mkdir()
    build(dataset, IndexKey(8, 0, 12), str(directory))
    assert at_work.is_dir() and same_name.is_dir()
    process.communicate()
    build(dataset, IndexKey(8, 0, 12), str(directory))
    assert not at_work.exists() and same_name.is_dir()


def test_fault_B17_a_dead_builder_s_folder_is_removed_at_once(dataset, tmp_path):
    folder, _ = builder_s_folder(tmp_path / "data.bfp", wait=False)
    replaced = folder.with_name(folder.name + ".replaced")
    replaced.mkdir()
    build(dataset, IndexKey(8, 0, 12), str(tmp_path / "data.bfp"))
    assert os.listdir(tmp_path / "data.bfp") == ["s8-d0-12"]


def test_fault_B17_a_build_s_folder_carries_its_process(dataset, tmp_path, monkeypatch):
    seen, write_arrays = [], index_building._write
    monkeypatch.setattr(index_building, "_write", lambda *a: seen.append(a[2]) or write_arrays(*a))
    for number in (11, 12):
        build(dataset, IndexKey(8, 0, number), str(tmp_path / "data.bfp"))
    labels = [os.path.basename(path).split(".")[2] for path in seen]
    assert labels == [process_label()] * 2
    assert len({path.rpartition(".")[2] for path in seen}) == 2  # and something random


def test_fault_D07_an_index_is_on_disk_before_it_gets_its_name(dataset, tmp_path):
    for overwrite in (False, True):
        with watched_disk() as disk:
            index = build(dataset, IndexKey(8, 0, 12), str(tmp_path / "data.bfp"), overwrite)
        names = [path for kind, path in disk.events if kind == "name"]
        assert names[-1] == index.path and len(names) == 1 + overwrite
        assert [path for path, name in disk.unforced if name == index.path] == []
        assert disk.names_not_forced() == []
        last_name = max(i for i, (kind, _) in enumerate(disk.events) if kind == "name")
        assert ("force", str(tmp_path / "data.bfp")) in disk.events[last_name:]


def test_fault_C10_the_builder_of_a_missing_index_says_so_once(dataset, tmp_path, capfd):
    open_or_build(dataset, IndexKey(8, 0, 12))
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2
    assert re.fullmatch(r"megatron_bfp: building the sequence index .*data.bfp/s8-d0-12 of 12 documents; .*", lines[0])
    assert re.fullmatch(r"megatron_bfp: built .*data.bfp/s8-d0-12 in \d+\.\d s: 11 sequences", lines[1])
    open_or_build(dataset, IndexKey(8, 0, 12))
    build(dataset, IndexKey(8, 0, 11), index_directory(dataset.prefix))  # the tool has a progress bar
    assert capfd.readouterr().err == ""


def test_fault_C10_of_several_builders_one_speaks(dataset, tmp_path, capfd):
    context = multiprocessing.get_context("fork")
    start = context.Event()
    target = open_when_started
    builders = [context.Process(target=target, args=(dataset.prefix, IndexKey(8, 0, 12), start)) for _ in range(4)]
    for builder in builders:
        builder.start()
    start.set()
    for builder in builders:
        builder.join()
    assert [line.split()[1] for line in capfd.readouterr().err.splitlines()] == ["building", "built"]


def open_when_started(prefix, key, start):
    start.wait()
    open_or_build(IndexedDataset(prefix), key)


def test_datasets_of_one_name_do_not_share_a_folder_of_the_cache(tmp_path):
    folders = set()
    for name, lengths in (("a", [1, 2]), ("b", [2, 1])):
        (tmp_path / name).mkdir()
        dataset = write(tmp_path / name / "data", documents_of(lengths))
        folders.add(cached_index_directory(dataset, str(tmp_path)))
    assert len(folders) == 2


def test_a_rebuild_that_fails_says_so_and_keeps_what_was_there(dataset, index, tmp_path, monkeypatch):
    whole = content_of(tmp_path / "data.bfp" / index.key.name)
    real_save, real_rename = np.save, os.rename

    def full_disk(path, *arguments, **keywords):
        raise OSError(28, "No space left on device")

    def fail_at_the_end(source, target):
        if os.path.basename(target) == index.key.name and not source.endswith(".replaced"):
            raise OSError(5, "Input/output error")
        real_rename(source, target)

    for owner, name, replacement in ((np, "save", full_disk), (os, "rename", fail_at_the_end)):
        monkeypatch.setattr(owner, name, replacement)
        with pytest.raises(SequenceIndexError, match="cannot be written"):
            build(dataset, index.key, index_directory(dataset.prefix), overwrite=True)
        monkeypatch.undo()
        assert content_of(tmp_path / "data.bfp" / index.key.name) == whole
        assert os.listdir(tmp_path / "data.bfp") == [index.key.name]
    assert (np.save, os.rename) == (real_save, real_rename)


def test_the_remedy_fits_the_index(dataset, tmp_path, read_only):
    build(dataset, IndexKey(8, 0, 12, 2), index_directory(dataset.prefix))
    (tmp_path / "data.bfp" / "s8-d0-12-m2" / "runs.npy").unlink()
    with pytest.raises(SequenceIndexError, match="--seq-length 8 --max-documents-per-sequence 2 --overwrite"):
        SequenceIndex(str(tmp_path / "data.bfp" / "s8-d0-12-m2"), dataset)
    with pytest.raises(SequenceIndexError, match="no such sequence index; build it: .*--seq-length 16"):
        SequenceIndex(str(tmp_path / "data.bfp" / "s16-d0-12"), dataset)
    read_only(index_directory(dataset.prefix))
    cached = open_or_build(dataset, IndexKey(8, 0, 12), str(tmp_path / "cache"))
    os.remove(os.path.join(cached.path, "runs.npy"))
    with pytest.raises(SequenceIndexError, match="remove .*cache.*; the next start builds it"):
        open_or_build(dataset, IndexKey(8, 0, 12), str(tmp_path / "cache"))


def test_another_host_s_leftovers_are_removed_only_when_old(dataset, tmp_path):
    directory = tmp_path / "data.bfp"
    young, old = (directory / f".s8-d0-12.other.host.{pid}.abcd" for pid in (1, 2))
    for folder in (young, old):
        folder.mkdir(parents=True)
    hours = time.time() - 3600 * np.array([23, 25])
    os.utime(young, (hours[0],) * 2)
    os.utime(old, (hours[1],) * 2)
    build(dataset, IndexKey(8, 0, 12), str(directory))
    assert sorted(os.listdir(directory)) == [young.name, "s8-d0-12"]
