"""The sequence index on disk: whole or absent, the same bytes everywhere, and no damage that goes unseen."""

import dataclasses
import fcntl
import hashlib
import importlib
import json
import multiprocessing
import os
import pickle
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
from helpers.chunks import chunk_rows
from helpers.datasets import DATA, ROOT, documents_of, write
from helpers.disk_order import watched_disk
from helpers.index_bytes import index_digests

from megatron_bfp import IndexedDatasetError, OptionError, SequenceIndexError, pack
from megatron_bfp.files import process_label
from megatron_bfp.indexed_dataset.reader import IndexedDataset
from megatron_bfp.indexed_dataset.writer import IndexedDatasetWriter
from megatron_bfp.sequence_index import builder as index_building
from megatron_bfp.sequence_index import verify as index_verification
from megatron_bfp.sequence_index.builder import build, open_or_build
from megatron_bfp.sequence_index.fingerprints import ends_sha256, sampled_fingerprint
from megatron_bfp.sequence_index.format import canonical_json, checksum
from megatron_bfp.sequence_index.key import IndexKey, cached_index_directory, document_range, index_directory
from megatron_bfp.sequence_index.reader import SequenceIndex
from megatron_bfp.sequence_index.verify import verify, verify_all

LENGTHS = [5, 0, 12, 3, 16, 2, 2, 9, 7, 1, 20, 8]


@pytest.fixture
def dataset(write_dataset):
    return write_dataset(documents_of(LENGTHS))


@pytest.fixture
def index(dataset):
    return build(dataset, IndexKey(8, 1, 11), index_directory(dataset.prefix))


def content_of(folder):
    return {name: (folder / name).read_bytes() for name in sorted(os.listdir(folder))}


def test_an_index_holds_what_packing_gives(dataset, index):
    packing = pack(LENGTHS[1:11], 8)
    assert len(index) == len(packing)
    for i in range(len(index)):
        assert chunk_rows(index, i).tolist() == (packing[i] + [1, 0, 0]).tolist()
    assert index.counts == {
        "documents": 10,
        "empty_documents": 1,
        "padding": packing.padding,
        "sequences": len(packing),
        "tokens": sum(LENGTHS[1:11]),
    }


@pytest.mark.parametrize(
    ("documents", "shift"),
    [
        ([[5], [12], [3], [16], [2], [9]], 0),
        ([[5, 4], [12], [3], [16], [2], [9]], 1),
        ([[], [12], [3], [16], [2], [9]], -1),
        ([[5], [12], [0], [16], [2], [9]], None),
        ([[5], [12, 1], [], [16], [2], [9]], None),
        ([[5], [12, 1], [3], [16], [2], [9]], None),
    ],
)
def test_documents_of_one_sequence_each_are_not_looked_up(tmp_path, documents, shift):
    """Documents 1 to 5 of ``documents``, which are lengths of sequences."""
    prefix = str(tmp_path / "data")
    with IndexedDatasetWriter(prefix, np.int32) as writer:
        writer.add(
            np.arange(sum(map(sum, documents)), dtype=np.int32),
            np.array([length for document in documents for length in document]),
            np.array([len(document) for document in documents]),
        )
        writer.finalize()
    dataset = IndexedDataset(prefix)
    index = build(dataset, IndexKey(8, 1, 5), index_directory(prefix))
    lengths = [sum(document) for document in documents]
    packing = pack(lengths[1:5], 8)
    assert index._shift == shift
    for i in range(len(index)):
        assert chunk_rows(index, i).tolist() == (packing[i] + [1, 0, 0]).tolist()
        for chunk, (document, offset, length) in zip(index.chunk_spans(i), packing[i].tolist(), strict=True):
            start = sum(lengths[: document + 1]) + offset
            assert chunk == (document + 1, start, start + length, sum(lengths[: document + 2]))


def test_chunk_spans_are_where_the_chunks_are(dataset, index):
    packing = pack(LENGTHS[1:11], 8)
    for i in range(len(index)):
        for chunk, (document, offset, length) in zip(index.chunk_spans(i), packing[i].tolist(), strict=True):
            expected = dataset.document(document + 1)[offset : offset + length].tolist()
            assert chunk.document == document + 1
            assert dataset.tokens(chunk.start, chunk.num_tokens).tolist() == expected
            assert chunk.document_end - chunk.start + offset == LENGTHS[document + 1]
            assert chunk.continues == (offset + length < LENGTHS[document + 1])


EXPECTED_DIGESTS = {
    "s2048-d0-3000": "321bf84dd4ce8bc218e7c843a71af6a1a6c3ef3d97be0a06d5f92fa209c0e9e6",
    "s2048-d100-2900-m4": "20e0cd740ba476f8a8bb42ef165d3d76a7429ca71e8adac8267915ef9de96387",
}
"""They are the same in every release: they may only change together with the format's version."""


def test_the_bytes_are_the_same_in_every_release(tmp_path):
    assert index_digests(tmp_path) == EXPECTED_DIGESTS


def digests_by(python, folder, **environment):
    """Digests of the same indexes, built by another process."""
    command = [python, str(ROOT / "tests" / "helpers" / "index_bytes.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_bytes_are_the_same_without_the_processor_s_wide_vectors(tmp_path):
    core = "numpy._core" if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else "numpy.core"
    features = importlib.import_module(f"{core}._multiarray_umath").__cpu_dispatch__
    digests = digests_by(sys.executable, tmp_path, NPY_DISABLE_CPU_FEATURES=" ".join(features))
    assert digests == EXPECTED_DIGESTS


def test_the_bytes_are_the_same_on_other_pythons(tmp_path):
    """Of OTHER_PYTHONS, paths with colons between of Pythons that have numpy."""
    pythons = [python for python in os.environ.get("OTHER_PYTHONS", "").split(os.pathsep) if python]
    if not pythons:
        pytest.skip("OTHER_PYTHONS names none")
    for number, python in enumerate(pythons):
        (tmp_path / str(number)).mkdir()
        assert digests_by(python, tmp_path / str(number)) == EXPECTED_DIGESTS


@pytest.mark.case(1)
@pytest.mark.parametrize("lengths", [[], [0, 0], [1], [8], [9], [7, 1], [16, 24]])
@pytest.mark.parametrize("seq_length", [1, 8, 1000])
def test_corpora_at_the_edges_build_and_verify(write_dataset, lengths, seq_length):
    dataset = write_dataset(documents_of(lengths) if lengths else [])
    build(dataset, IndexKey(seq_length, 0, len(lengths)), index_directory(dataset.prefix))
    (index,) = verify_all(dataset.prefix)
    assert len(index) == len(pack(lengths, seq_length))


def test_the_name_says_what_an_index_is_for(dataset):
    for key in (IndexKey(8, 0, 12), IndexKey(8, 3, 7, 2)):
        assert IndexKey.from_name(key.name) == key
        assert os.path.basename(build(dataset, key, index_directory(dataset.prefix)).path) == key.name
    assert IndexKey(2048, 0, 969, 8).name == "s2048-d0-969-m8"
    for name in ("s0-d0-1", "s08-d0-1", "s8-d00-1", "s8-d0-1-m0", "s8-d0-1-", "S8-d0-1", ".s8-d0-1", "s8-d0"):
        assert IndexKey.from_name(name) is None


def test_ranges_are_rounded_as_megatron_core_rounds():
    assert document_range((0.0, 0.969), 1000) == (0, 969)
    assert document_range((0.5, 1.0), 5) == (2, 5)  # Python rounds 2.5 to 2


@pytest.mark.parametrize(
    "fractions, number, expected",
    [((0.0, 0.75), 9, (0, 7)), ((0.25, 0.75), 7, (2, 5)), ((0.0, 0.9), 12, (0, 11)), ((0.35, 0.65), 10, (4, 6))],
)
def test_fault_D17_bounds_of_a_split_are_rounded_and_not_cut(fractions, number, expected):
    assert document_range(fractions, number) == expected
    assert document_range(fractions, number) != tuple(int(fraction * number) for fraction in fractions)


# Damage


def write_metadata(folder, metadata):
    """An index.json that says this, with the right checksum of its own."""
    (folder / "index.json").write_bytes(canonical_json(metadata | {"checksum": checksum(metadata)}))


def damage(path, content, offset=None, size=None):
    if size is not None:
        content = content[:size]
    else:
        content = bytearray(content)
        content[offset] ^= 1 << offset % 8
    path.write_bytes(content)


def test_verify_refuses_every_flipped_byte_and_every_truncation(dataset, index, tmp_path):
    folder = tmp_path / "data.bfp" / index.key.name
    whole = content_of(folder)
    assert sorted(whole) == ["document_ids.npy", "index.json", "long_documents.npy", "runs.npy"]
    rounds = 0
    for name, content in whole.items():
        for case in [{"offset": offset} for offset in range(len(content))] + [{"size": n} for n in range(len(content))]:
            damage(folder / name, content, **case)
            with pytest.raises(SequenceIndexError, match="s8-d1-11"):
                verify(str(folder), dataset)
            rounds += 1
        (folder / name).write_bytes(content)
    assert rounds == 2 * sum(map(len, whole.values()))
    verify(str(folder), dataset)


def test_every_flipped_byte_of_a_small_index_is_found_at_open(dataset, index, tmp_path):
    folder = tmp_path / "data.bfp" / index.key.name
    for name, content in content_of(folder).items():
        for offset in range(len(content)):
            damage(folder / name, content, offset)
            with pytest.raises(SequenceIndexError, match="s8-d1-11"):
                SequenceIndex(str(folder), dataset)
        (folder / name).write_bytes(content)


def test_an_altered_idx_is_found(dataset, index, tmp_path):
    path = tmp_path / "data.idx"
    content = path.read_bytes()
    for offset in range(len(content)):
        damage(path, content, offset)
        with pytest.raises((SequenceIndexError, IndexedDatasetError)):
            SequenceIndex(index.path, IndexedDataset(dataset.prefix))
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["document_ids.npy", "index.json", "long_documents.npy", "runs.npy"])
def test_a_missing_file_is_named(dataset, index, tmp_path, name):
    (tmp_path / "data.bfp" / index.key.name / name).unlink()
    with pytest.raises(SequenceIndexError, match=f"{name} cannot be read.*--overwrite"):
        SequenceIndex(index.path, dataset)


def test_a_foreign_file_is_found_by_verify(dataset, index, tmp_path):
    (tmp_path / "data.bfp" / index.key.name / "notes.txt").write_text("")
    with pytest.raises(SequenceIndexError, match="do not belong"):
        verify(index.path, dataset)


@pytest.mark.case(11)
def test_a_stale_index_is_refused_with_the_command_that_rebuilds_it(dataset, index, tmp_path):
    other = write(tmp_path / "data", documents_of(LENGTHS[:-1] + [7]))
    with pytest.raises(SequenceIndexError, match="built from another .*megatron-bfp index .*data .*--overwrite"):
        open_or_build(other, index.key)
    rebuilt = build(other, index.key, index_directory(other.prefix), overwrite=True)
    assert verify(rebuilt.path, other).counts["documents"] == 10
    assert os.listdir(tmp_path / "data.bfp") == [index.key.name]


def test_an_index_under_another_name_is_refused(dataset, index, tmp_path):
    for name in ("s8-d1-10", "s4-d1-11", "s8-d0-10", "s8-d1-11-m3"):
        shutil.copytree(index.path, tmp_path / "data.bfp" / name)
        with pytest.raises(SequenceIndexError, match="renamed"):
            SequenceIndex(str(tmp_path / "data.bfp" / name), dataset)


def test_an_index_of_another_dataset_is_refused(dataset, index, tmp_path):
    other = write(tmp_path / "other", documents_of([5] * 12))
    shutil.copytree(index_directory(dataset.prefix), index_directory(other.prefix))
    with pytest.raises(SequenceIndexError, match="built from another"):
        open_or_build(other, index.key)


def test_a_consistent_forgery_is_found_by_verify(dataset, index, tmp_path):
    """Arrays changed together with their checksums: the sequences themselves are counted and must fit."""
    folder = tmp_path / "data.bfp" / index.key.name
    ids = np.load(folder / "document_ids.npy")
    for forged in (np.roll(ids, 1), np.full_like(ids, ids[0])):
        np.save(folder / "document_ids.npy", forged)
        content = (folder / "document_ids.npy").read_bytes()
        metadata = json.loads((folder / "index.json").read_bytes())
        metadata["files"]["document_ids.npy"] = {
            "bytes": len(content),
            "ends_sha256": ends_sha256(folder / "document_ids.npy"),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
        write_metadata(folder, metadata)
        with pytest.raises(SequenceIndexError, match="document_ids.npy"):
            verify(index.path, dataset)


def forge(folder, key, **arrays):
    """Make an index say something else, with every checksum right."""
    metadata = json.loads((folder / "index.json").read_bytes())
    for name, array in arrays.items():
        path = folder / f"{name}.npy"
        np.save(path, array)
        metadata["files"][path.name] = {
            "bytes": path.stat().st_size,
            "ends_sha256": ends_sha256(path),
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
    metadata["max_documents_per_sequence"] = key.max_documents_per_sequence
    write_metadata(folder, metadata)
    return folder.rename(folder.with_name(key.name))


@pytest.mark.parametrize("block", [1, 2, 1 << 17])
def test_fault_D08_a_document_twice_in_one_step_is_found_by_verify(write_dataset, tmp_path, monkeypatch, block):
    """Of equal length and in the same step, where both are read before either is marked as seen."""
    dataset = write_dataset(documents_of([4] * 8))
    key = IndexKey(8, 0, 8)
    index = build(dataset, key, index_directory(dataset.prefix))
    ids = np.array(index.table.document_ids)
    monkeypatch.setattr(index_verification, "BLOCK", block)
    verify(index.path, dataset)
    for position, copied in ((1, 0), (7, 6), (7, 0)):
        forged = ids.copy()
        forged[position] = ids[copied]
        forge(tmp_path / "data.bfp" / key.name, key, document_ids=forged)
        with pytest.raises(SequenceIndexError, match="does not name every document once"):
            verify(index.path, dataset)


def test_fault_D08_more_documents_than_the_cap_are_found_by_verify(write_dataset, tmp_path):
    dataset = write_dataset(documents_of([2] * 8))
    key = IndexKey(8, 0, 8)
    build(dataset, key, index_directory(dataset.prefix))
    for cap, is_right in ((4, True), (3, False)):
        capped = IndexKey(8, 0, 8, cap)
        folder = forge(tmp_path / "data.bfp" / key.name, capped)
        if is_right:
            verify(str(folder), dataset)
        else:
            with pytest.raises(SequenceIndexError, match="more documents than max_documents_per_sequence"):
                verify(str(folder), dataset)
        folder.rename(tmp_path / "data.bfp" / key.name)


def test_a_sequence_that_does_not_fit_is_found_by_verify(write_dataset, tmp_path):
    dataset = write_dataset(documents_of([5, 3, 4, 4]))
    key = IndexKey(8, 0, 4)
    index = build(dataset, key, index_directory(dataset.prefix))
    forge(tmp_path / "data.bfp" / key.name, key, document_ids=np.array([0, 2, 1, 3], dtype=np.uint32))
    with pytest.raises(SequenceIndexError, match="a sequence that does not fit"):
        verify(index.path, dataset)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"null", b"{}", b"\xff", b'{"format": 1}', b"[" * 100_000, b'{"version": 1e999}']
)
def test_any_index_json_gives_our_error(dataset, index, tmp_path, content):
    (tmp_path / "data.bfp" / index.key.name / "index.json").write_bytes(content)
    with pytest.raises(SequenceIndexError, match="index.json"):
        SequenceIndex(index.path, dataset)


@pytest.mark.parametrize("version", [1, 3])
def test_another_format_says_so(dataset, index, tmp_path, version):
    folder = tmp_path / "data.bfp" / index.key.name
    write_metadata(folder, json.loads((folder / "index.json").read_bytes()) | {"version": version})
    with pytest.raises(SequenceIndexError, match=f"version {version}.*--overwrite"):
        SequenceIndex(index.path, dataset)


# Places


def test_an_index_is_opened_and_not_built_again(dataset):
    first = open_or_build(dataset, IndexKey(8, 0, 12))
    before = os.stat(os.path.join(first.path, "index.json"))
    second = open_or_build(dataset, IndexKey(8, 0, 12))
    after = os.stat(os.path.join(second.path, "index.json"))
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


@pytest.fixture
def read_only(monkeypatch):
    """Make a folder read-only, also for root."""
    real = os.access

    def forbid(folder):
        monkeypatch.setattr(os, "access", lambda path, mode: not str(path).startswith(folder) and real(path, mode))

    return forbid


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


def test_pickling_keeps_paths_and_not_arrays(dataset, index):
    content = pickle.dumps(index)
    assert len(content) < 1000
    assert chunk_rows(pickle.loads(content), 2).tolist() == chunk_rows(index, 2).tolist()


def test_an_index_can_be_read_by_others(index):
    assert os.stat(index.path).st_mode & 0o055 == 0o055 & ~current_umask()


def current_umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


# Races


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


def test_an_open_index_is_printed_in_one_line(index):
    assert repr(index).startswith("SequenceIndex('") and "data.bfp/s8-d1-11'" in repr(index) and len(repr(index)) < 250


def test_fault_D06_one_token_too_many_is_refused_at_the_read(write_dataset):
    dataset = write_dataset(documents_of([5, 3, 4, 4]))
    index = build(dataset, IndexKey(8, 0, 4), index_directory(dataset.prefix))
    assert [chunk_rows(index, i)[:, 0].tolist() for i in range(2)] == [[0, 1], [2, 3]]
    ids = np.array([0, 2, 1, 3], dtype=np.uint32)  # 9 and 7 tokens
    index.table = dataclasses.replace(index.table, document_ids=ids)
    with pytest.raises(SequenceIndexError, match="sequence 0 has more tokens than fit"):
        index.chunk_spans(0)
    index.chunk_spans(1)


@pytest.mark.parametrize("outside", [0, 11])
def test_fault_D06_a_document_outside_the_split_is_refused_at_the_read(index, outside):
    ids = np.array(index.table.document_ids)
    sequence = int(index.table.long_documents[-1, 1])  # the first one of remainder chunks
    index.chunk_spans(sequence)
    ids[0] = outside  # the dataset has it, the range of the index, 1 to 11, has not
    index.table = dataclasses.replace(index.table, document_ids=ids)
    with pytest.raises(SequenceIndexError, match=f"sequence {sequence} names document {outside}"):
        index.chunk_spans(sequence)


def test_fault_D06_an_empty_chunk_is_refused_at_the_read(index):
    ids = np.array(index.table.document_ids)
    ids[0] = 1  # which is empty
    sequence = int(index.table.long_documents[-1, 1])
    index.table = dataclasses.replace(index.table, document_ids=ids)
    with pytest.raises(SequenceIndexError, match=f"sequence {sequence} has an empty chunk"):
        index.chunk_spans(sequence)


@pytest.mark.parametrize("change", [-1, 1])
def test_fault_D06_full_chunks_that_a_document_does_not_have_are_refused_at_the_read(write_dataset, change):
    dataset = write_dataset(documents_of([20, 3]))
    index = build(dataset, IndexKey(8, 0, 2), index_directory(dataset.prefix))
    index.chunk_spans(0)
    long = np.array(index.table.long_documents) + np.array([0, change])
    index.table = dataclasses.replace(index.table, long_documents=long)
    with pytest.raises(SequenceIndexError, match="sequence 0 does not match the length of document 0"):
        index.chunk_spans(0)


def test_fault_D08_other_long_documents_are_found_by_verify(write_dataset, tmp_path):
    dataset = write_dataset(documents_of([8, 3, 8, 9]))
    key = IndexKey(8, 0, 4)
    index = build(dataset, key, index_directory(dataset.prefix))
    verify(index.path, dataset)
    long = np.array(index.table.long_documents)
    long[0, 0] = 3  # twice, and document 0 not at all
    forge(tmp_path / "data.bfp" / key.name, key, long_documents=long)
    with pytest.raises(SequenceIndexError, match="long_documents.npy does not match"):
        verify(index.path, dataset)


def test_the_sampled_fingerprint_covers_the_whole_file():
    content = np.zeros(1 << 22, dtype=np.uint8)
    fingerprints = {sampled_fingerprint(content)["sampled_sha256"]}
    positions = [0, len(content) - 1, *((len(content) - 4096) * block // 255 + 100 for block in range(0, 256, 5))]
    for position in positions:
        content[position] = 1
        fingerprints.add(sampled_fingerprint(content)["sampled_sha256"])
        content[position] = 0
    assert len(fingerprints) == 1 + len(set(positions))


def test_datasets_of_one_name_do_not_share_a_folder_of_the_cache(tmp_path):
    folders = set()
    for name, lengths in (("a", [1, 2]), ("b", [2, 1])):
        (tmp_path / name).mkdir()
        dataset = write(tmp_path / name / "data", documents_of(lengths))
        folders.add(cached_index_directory(dataset, str(tmp_path)))
    assert len(folders) == 2


def test_fault_D03_positions_and_chunks_end_with_the_last_sequence(index):
    index.chunk_spans(len(index) - 1)
    for sequence in (-1, len(index), len(index) + 1):
        with pytest.raises(IndexError, match=f"sequence {sequence} is not in"):
            index.chunk_spans(sequence)


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


def test_an_index_carries_the_fingerprint_of_what_it_was_built_from(dataset, tmp_path):
    other = write(tmp_path / "data", documents_of(LENGTHS[::-1]))  # while the first one is still open
    index = build(dataset, IndexKey(8, 0, 12), index_directory(dataset.prefix))
    assert len(index) == len(pack(LENGTHS, 8))
    with pytest.raises(SequenceIndexError, match="built from another"):
        SequenceIndex(index.path, other)


def test_more_documents_than_there_are_cannot_be_claimed(dataset, tmp_path):
    build(dataset, IndexKey(8, 0, 12), index_directory(dataset.prefix))
    path = tmp_path / "data.bfp" / "s8-d0-13"
    os.rename(tmp_path / "data.bfp" / "s8-d0-12", path)
    metadata = json.loads((path / "index.json").read_bytes())
    metadata["documents"] = [0, 13]
    metadata["counts"]["documents"] = 13
    write_metadata(path, metadata)
    with pytest.raises(SequenceIndexError, match="has 12"):
        verify(str(path), dataset)


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


def test_numpy_integers_make_the_same_key(dataset):
    key = IndexKey(np.int64(8), np.int32(0), np.uint32(12), np.int8(3))
    assert key == IndexKey(8, 0, 12, 3) and type(key.seq_length) is int
    assert len(build(dataset, key, index_directory(dataset.prefix)))


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


def test_the_core_imports_neither_torch_nor_megatron():
    modules = (
        "samples.sample",
        "sequence_index.builder",
        "sequence_index.verify",
        "inspection.report",
        "commands.main",
    )
    others = {"torch", "megatron", "deepspeed", "tqdm", "tokenizers"}
    code = "; ".join(f"import megatron_bfp.{module}" for module in modules)
    code += f"; import sys; sys.exit(any(name.split('.')[0] in {others} for name in sys.modules))"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0
