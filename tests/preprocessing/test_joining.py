"""Tasks joined to datasets: the same bytes wherever a job is stopped, and disk space for one copy of the tokens."""

import os
import resource
import shutil
import signal
import tempfile
import time

import numpy as np
import pytest
from helpers.disk_order import watched_disk
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bfp.errors import IndexedDatasetError, InputError
from megatron_bfp.indexed_dataset.format import bin_path, idx_path
from megatron_bfp.indexed_dataset.writer import IndexedDatasetWriter
from megatron_bfp.preprocessing import joiner as joining
from megatron_bfp.preprocessing.joiner import TaskJoiner
from megatron_bfp.preprocessing.task import TaskRecord, task_prefix

DTYPE = np.uint16
DOCUMENTS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), max_size=4)


class Stopped(Exception):
    pass


def write_dataset(prefix, documents):
    with IndexedDatasetWriter(prefix, DTYPE) as writer:
        for document in documents:
            writer.add(np.array(document, DTYPE), np.array([len(document)]))
        writer.finalize()


def write_tasks(folder, tasks):
    """Tasks of [keys][documents][tokens]; returns their records."""
    records = []
    for number, keys in enumerate(tasks):
        os.makedirs(os.path.dirname(task_prefix(folder, number, 0)))
        record = TaskRecord.empty(len(keys), 1, "", None)
        for key, documents in enumerate(keys):
            write_dataset(task_prefix(folder, number, key), documents)
            record.num_documents[key] = len(documents)
            record.num_tokens[key] = sum(map(len, documents))
        records.append(record)
    return records


def prefixes_in(folder, num_keys):
    return [os.path.join(folder, f"joined-{key}") for key in range(num_keys)]


def join(folder, records, num_keys, stop_at=None, order=None, until_joined=False, new=()):
    """Join tasks that become finished in some order; stop before the ``stop_at``-th, as a stopped job does,
    whether those before are joined by then or, with ``until_joined``, when they are.
    """
    with TaskJoiner(folder, prefixes_in(folder, num_keys), DTYPE) as joiner:
        for number in range(len(records)):
            joiner.announce(number)
        for count, number in enumerate(order or range(len(records))):
            if count == stop_at:
                deadline = time.monotonic() + 20
                while until_joined and files_of_tasks(folder, count, num_keys) and time.monotonic() < deadline:
                    time.sleep(0.001)
                raise Stopped
            joiner.add(number, records[number], number in new)
        joiner.finish()


def dataset_bytes(prefix):
    return [open(path(prefix), "rb").read() for path in (bin_path, idx_path)]


def files_of_tasks(folder, num_tasks, num_keys):
    parts = [task_prefix(folder, number, key) for number in range(num_tasks) for key in range(num_keys)]
    return [path for part in parts for path in (bin_path(part), idx_path(part)) if os.path.exists(path)]


@settings(deadline=None)  # it waits for the disk
@given(st.data(), st.integers(1, 2))
def test_whatever_stops_it_the_bytes_are_those_of_all_documents_at_once(data, num_keys):
    tasks = data.draw(st.lists(st.lists(DOCUMENTS, min_size=num_keys, max_size=num_keys), max_size=5))
    with tempfile.TemporaryDirectory() as folder:
        records = write_tasks(folder, tasks)
        for stop_at in data.draw(st.lists(st.integers(0, max(0, len(tasks) - 1)), max_size=3 if tasks else 0)):
            with pytest.raises(Stopped):
                join(folder, records, num_keys, stop_at)
            for prefix in prefixes_in(folder, num_keys):  # what a kill in the middle of the next copy leaves
                for path in (bin_path(prefix), prefix + ".lengths"):
                    with open(path, "ab") as file:
                        file.write(bytes(data.draw(st.integers(0, 9))))
        join(folder, records, num_keys, order=data.draw(st.permutations(range(len(tasks)))))
        assert not files_of_tasks(folder, len(tasks), num_keys)
        for key, prefix in enumerate(prefixes_in(folder, num_keys)):
            write_dataset(os.path.join(folder, "whole"), [document for task in tasks for document in task[key]])
            assert dataset_bytes(prefix) == dataset_bytes(os.path.join(folder, "whole"))


TASKS = [[[[1, 2], [3]], [[4]]], [[[5, 6, 7]], [[8], [9]]], [[[1]], [[2]]]]


@pytest.mark.parametrize("num_removed", range(5))
def test_a_kill_while_a_joined_task_is_removed(tmp_path, num_removed):
    folder = str(tmp_path / "killed")
    records = write_tasks(folder, TASKS)
    kept = str(tmp_path / "kept")
    shutil.copytree(folder, kept)
    with pytest.raises(Stopped):
        join(folder, records, 2, stop_at=2, until_joined=True)
    for path in files_of_tasks(kept, 2, 2)[4 + num_removed :]:  # of the task that was joined last
        shutil.copy(path, path.replace(kept, folder))
    join(folder, records, 2)
    shutil.copytree(kept, tmp_path / "whole")
    join(str(tmp_path / "whole"), records, 2)
    for killed, whole in zip(prefixes_in(folder, 2), prefixes_in(str(tmp_path / "whole"), 2), strict=True):
        assert dataset_bytes(killed) == dataset_bytes(whole)


def test_a_task_that_is_lost_when_it_is_joined_is_done_again(tmp_path):
    records = write_tasks(str(tmp_path / "whole"), TASKS)
    join(str(tmp_path / "whole"), records, 2, new=range(3))
    folder = str(tmp_path / "again")
    write_tasks(folder, TASKS)
    with pytest.raises(Stopped):
        join(folder, records, 2, stop_at=2, until_joined=True)
    shutil.copytree(folder, tmp_path / "lost")
    write_tasks(str(tmp_path / "new"), TASKS)
    for path in files_of_tasks(str(tmp_path / "new"), 1, 2):
        shutil.copy(path, os.path.join(folder, "000000"))
    join(folder, records, 2, new=[0])
    for again, whole in zip(prefixes_in(folder, 2), prefixes_in(str(tmp_path / "whole"), 2), strict=True):
        assert dataset_bytes(again) == dataset_bytes(whole)
    with pytest.raises(IndexedDatasetError, match="000000/0.idx"):  # it is not taken for one that was joined
        join(str(tmp_path / "lost"), records, 2, new=[0])


def test_a_joined_file_that_was_cut_is_refused(tmp_path):
    records = write_tasks(str(tmp_path), TASKS)
    with pytest.raises(Stopped):
        join(str(tmp_path), records, 2, stop_at=2, until_joined=True)
    with open(tmp_path / "joined-1.bin", "r+b") as file:
        file.truncate(2)
    with pytest.raises(InputError, match=r"joined-1.bin: is shorter than the tasks .* remove .* to begin anew"):
        join(str(tmp_path), records, 2)


def test_a_disk_that_becomes_full_while_lengths_are_written_loses_nothing(tmp_path):
    """A file that may not grow takes what fits of a write without an error, as a disk does that becomes full."""
    tasks = [[[[number]] * 100] for number in range(10)]
    records = write_tasks(str(tmp_path / "whole"), tasks)
    shutil.copytree(tmp_path / "whole", tmp_path / "full")
    join(str(tmp_path / "whole"), records, 1, new=range(10))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))  # 4,000 bytes of lengths, 2,000 of tokens
    try:
        with pytest.raises(IndexedDatasetError, match="joined-0.bin: cannot be written: File too large"):
            join(str(tmp_path / "full"), records, 1, new=range(10))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    join(str(tmp_path / "full"), records, 1)
    for full, whole in zip(
        prefixes_in(str(tmp_path / "full"), 1), prefixes_in(str(tmp_path / "whole"), 1), strict=True
    ):
        assert dataset_bytes(full) == dataset_bytes(whole)


@pytest.mark.parametrize("change", ["documents", "bytes"])
def test_a_task_that_is_not_what_its_record_says_is_refused(tmp_path, change):
    records = write_tasks(str(tmp_path), TASKS)
    part = task_prefix(str(tmp_path), 1, 0)
    if change == "documents":
        write_dataset(part, [[5, 6], [7]])
    else:
        os.truncate(bin_path(part), 4)
    with pytest.raises(IndexedDatasetError, match=r"000001/0\.(idx|bin): "):
        join(str(tmp_path), records, 2)


def test_tasks_are_forced_to_disk_before_their_own_files_are_removed(tmp_path):
    records = write_tasks(str(tmp_path), TASKS)
    with watched_disk() as disk:
        join(str(tmp_path), records, 2, new=range(3))
    events = [(kind, os.path.relpath(path, tmp_path)) for kind, path in disk.events]
    removed = [index for index, (kind, name) in enumerate(events) if kind == "remove" and name.startswith("0000")]
    assert len(removed) == 3 * 4
    for number in range(3):
        first = min(index for index in removed if events[index][1].startswith(f"{number:06d}"))
        before = max([index for index in removed if index < first], default=-1)
        forced = {name for kind, name in events[before + 1 : first] if kind == "force"}
        assert {f"joined-{key}.{kind}" for key in range(2) for kind in ("bin", "lengths")} <= forced
    folder = events.index(("force", "."))  # which names the files that grow
    assert folder < removed[0]
    assert all(disk.is_forced(tmp_path / f"joined-{key}.{kind}") for key in range(2) for kind in ("bin", "idx"))


@pytest.mark.parametrize("ending", [".bin", ".lengths"])
def test_each_file_of_joined_tasks_must_be_as_long_as_their_records_say(tmp_path, ending):
    records = write_tasks(str(tmp_path), TASKS)
    with pytest.raises(Stopped):
        join(str(tmp_path), records, 2, stop_at=2, until_joined=True)
    path = tmp_path / f"joined-0{ending}"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match=r"joined-0.bin: is shorter than the tasks .* remove .* to begin anew"):
        join(str(tmp_path), records, 2)


def test_a_task_is_joined_as_long_as_any_of_its_files_is_missing(tmp_path):
    write_tasks(str(tmp_path), TASKS)
    assert not joining.is_joined(str(tmp_path), 1, 2)
    for path in files_of_tasks(str(tmp_path), 2, 2)[4:]:
        os.rename(path, path + ".moved")
        assert joining.is_joined(str(tmp_path), 1, 2) and not joining.is_joined(str(tmp_path), 0, 2)
        os.rename(path + ".moved", path)


@pytest.mark.parametrize("tokens_at_once", [1, 3, 1 << 22])
def test_a_task_is_taken_out_of_what_it_was_joined_to(tmp_path, monkeypatch, tokens_at_once):
    monkeypatch.setattr(joining, "TOKENS_AT_ONCE", tokens_at_once)
    tasks = [[[[1, 2], [3]]], [[[5, 6, 7], [8], [9, 9]]], [[[1]]]]
    records = write_tasks(str(tmp_path), tasks)
    whole = dataset_bytes(task_prefix(str(tmp_path), 1, 0))
    join(str(tmp_path), records, 1, new=range(3))
    assert joining.is_joined(str(tmp_path), 1, 1)
    with watched_disk() as disk:
        prefix = str(tmp_path / "joined-0")
        joining.take_out(prefix, task_prefix(str(tmp_path), 1, 0), DTYPE, range(2, 5), range(3, 9))
    assert dataset_bytes(task_prefix(str(tmp_path), 1, 0)) == whole
    assert disk.unforced == [] and disk.names_not_forced() == []
    assert not joining.is_joined(str(tmp_path), 1, 1)
    os.truncate(tmp_path / "joined-0.bin", 17)
    with pytest.raises(InputError, match="joined-0.bin: is shorter than"):
        joining.take_out(prefix, task_prefix(str(tmp_path), 1, 0), DTYPE, range(2, 5), range(3, 9))
