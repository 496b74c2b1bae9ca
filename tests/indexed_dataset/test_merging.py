"""Merging: the bytes of one dataset written at once, in constant memory, whatever the parts, disk and signals do."""

import filecmp
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from helpers.datasets import ROOT, documents_of, write
from helpers.disk_order import watched_disk
from helpers.nested import NESTED, write_nested
from helpers.small_disks import small_disk
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bfp import IndexedDatasetError, InputError
from megatron_bfp.errors import OptionError
from megatron_bfp.indexed_dataset import merging
from megatron_bfp.indexed_dataset.format import HEADER_BYTES
from megatron_bfp.indexed_dataset.merging import merge
from megatron_bfp.indexed_dataset.reader import IndexedDataset
from megatron_bfp.indexed_dataset.writer import DatasetFiles, IndexedDatasetWriter

SPARSE_DOCUMENTS = 3_000_000
SPARSE_LENGTH = 800


def are_the_same(prefix, other):
    return all(filecmp.cmp(f"{prefix}{suffix}", f"{other}{suffix}", shallow=False) for suffix in (".bin", ".idx"))


@pytest.fixture
def three_parts(tmp_path):
    """Prefixes of three datasets, and of all their documents written at once."""
    documents = documents_of([5, 0, 3, 9, 1, 1, 200, 31])
    ranges = {"a": documents[:3], "b": documents[3:4], "c": documents[4:], "whole": documents}
    for name, part in ranges.items():
        write(tmp_path / name, part)
    return *[str(tmp_path / name) for name in "abc"], str(tmp_path / "whole")


def run_python(script):
    """Run a script that finds this package; its output is captured."""
    script = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n" + textwrap.dedent(script)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
@pytest.mark.parametrize("has_kernel_copies", [True, False])
@settings(max_examples=40, deadline=None)
@given(parts=st.lists(NESTED, min_size=1, max_size=5))
def test_any_parts_give_the_bytes_of_all_documents_at_once(parts, has_kernel_copies, dtype, tmp_path_factory):
    folder = tmp_path_factory.mktemp("merge")
    for number, documents in enumerate(parts):
        write_nested(folder / f"part{number}", documents, dtype)
    write_nested(folder / "whole", [document for documents in parts for document in documents], dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merging, "COPIED_AT_ONCE", 12)
        if not has_kernel_copies:
            patch.setattr(merging, "READ_AT_ONCE", 5)
            patch.setattr(os, "copy_file_range", fail_with_invalid_argument)
            patch.setattr(os, "lseek", fail_with_invalid_argument)
        merge(str(folder / "merged"), [str(folder / f"part{number}") for number in range(len(parts))])
    assert are_the_same(folder / "merged", folder / "whole")


def fail_with_invalid_argument(*_):
    raise OSError(22, "Invalid argument")


def test_bytes_are_those_of_megatron_core(tmp_path):
    builder_module = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    parts = [[[[1, 2], [3]], []], [], [[[4]], [[], [5, 6, 7]]]]
    builder = builder_module.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    prefixes = [str(tmp_path / f"part{number}") for number in range(len(parts))]
    for prefix, documents in zip(prefixes, parts, strict=True):
        write_nested(prefix, documents, np.uint16)
        builder.add_index(prefix)
    builder.finalize(str(tmp_path / "theirs.idx"))
    merge(str(tmp_path / "ours"), prefixes)
    assert are_the_same(tmp_path / "ours", tmp_path / "theirs")


def test_a_part_may_be_given_twice_and_have_no_documents(tmp_path):
    write(tmp_path / "some", [[1, 2], [3]])
    write(tmp_path / "none", [])
    some, none = str(tmp_path / "some"), str(tmp_path / "none")
    merged = merge(str(tmp_path / "merged"), [none, some, none, some])
    assert [merged.document(i).tolist() for i in range(merged.num_documents)] == [[1, 2], [3], [1, 2], [3]]
    assert merge(str(tmp_path / "still_none"), [none, none]).num_documents == 0
    assert are_the_same(tmp_path / "still_none", none)


def write_sparse(prefix, first_token):
    """Documents of zeros, most of them holes, whose last has other tokens; more than 2**31 tokens."""
    num_tokens = SPARSE_DOCUMENTS * SPARSE_LENGTH
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        writer._lengths = [np.full(SPARSE_DOCUMENTS, SPARSE_LENGTH, dtype=np.int32)]
        writer._sequences_per_document = [np.ones(SPARSE_DOCUMENTS, dtype=np.int32)]
        writer._bin.seek((num_tokens - SPARSE_LENGTH) * 2)
        writer._bin.write(np.arange(first_token, first_token + SPARSE_LENGTH, dtype=np.uint16).data)
        writer.finalize()


@pytest.mark.case(3, 13)
def test_more_than_two_to_the_32_tokens_in_little_memory_and_little_disk(tmp_path):
    parts, merged = [str(tmp_path / name) for name in "ab"], str(tmp_path / "merged")
    for first_token, part in enumerate(parts, 1):
        write_sparse(part, first_token)
    if os.stat(parts[0] + ".bin").st_blocks > 1000:
        pytest.skip("this file system has no sparse files, and 16 GB are too many for a test")
    done = run_python(f"""
        from megatron_bfp.indexed_dataset.merging import merge

        def status_bytes(field):
            with open("/proc/self/status") as file:
                return next(int(line.split()[1]) << 10 for line in file if line.startswith(field))

        before = status_bytes("VmRSS")
        merge({merged!r}, {parts!r})
        print(status_bytes("VmHWM") - before)
    """)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 100 << 20  # of the mapped .idx files and of anonymous memory together
    dataset = IndexedDataset(merged)
    assert dataset.num_tokens == 2 * SPARSE_DOCUMENTS * SPARSE_LENGTH > 1 << 32
    dataset.check_pointers()
    assert dataset.document(SPARSE_DOCUMENTS - 1).tolist() == list(range(1, 1 + SPARSE_LENGTH))
    assert dataset.document(2 * SPARSE_DOCUMENTS - 1).tolist() == list(range(2, 2 + SPARSE_LENGTH))
    assert not dataset.document(SPARSE_DOCUMENTS).any() and not dataset.document(2 * SPARSE_DOCUMENTS - 2).any()
    assert os.stat(merged + ".bin").st_blocks < 1000


@pytest.mark.parametrize("size", [1, 4096, 1 << 17])
def test_a_bin_that_ends_in_a_hole_keeps_its_size(tmp_path, size):
    """The last part's hole is behind all that is copied."""
    write(tmp_path / "a", [[1, 2, 3]])
    write(tmp_path / "b", [[0] * size])
    for length in (0, 2 * size):
        os.truncate(tmp_path / "b.bin", length)
    merged = merge(str(tmp_path / "merged"), [str(tmp_path / "a"), str(tmp_path / "b")])
    assert (tmp_path / "merged.bin").read_bytes() == np.array([1, 2, 3] + [0] * size, np.uint16).tobytes()
    assert merged.num_tokens == size + 3


def test_more_parts_than_a_process_may_have_files_open(tmp_path):
    part = str(tmp_path / "part")
    write(part, [[1] * 10_000, [2, 3]])
    done = run_python(f"""
        import resource
        from megatron_bfp.indexed_dataset.merging import merge
        resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))
        print(merge({str(tmp_path / "merged")!r}, [{part!r}] * 500).num_documents)
    """)
    assert done.stdout.strip() == "1000", done.stderr


@pytest.mark.parametrize("step", ["merging", "joining lengths"])
def test_a_killed_merge_leaves_what_was_there_and_the_next_gives_the_same_bytes(three_parts, tmp_path, step):
    *parts, whole = three_parts
    merged = str(tmp_path / "merged")
    write(merged, [[7, 7, 7]])
    before = sorted(os.listdir(tmp_path))
    done = run_python(f"""
        import os, signal
        from megatron_bfp.indexed_dataset import merging
        merging.COPIED_AT_ONCE = 16

        def killed_midway(steps, number, description):
            for done, step in enumerate(steps):
                if description == {step!r} and done == number // 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield step

        merging.merge({merged!r}, {parts!r}, killed_midway)
    """)
    assert done.returncode == -signal.SIGKILL
    assert os.path.getsize(merged + ".bin.part")
    assert os.path.exists(merged + ".idx.part") == (step == "joining lengths")
    assert IndexedDataset(merged).document(0).tolist() == [7, 7, 7]
    merge(merged, parts)
    assert are_the_same(merged, whole)
    assert sorted(os.listdir(tmp_path)) == before


def test_two_merges_into_one_dataset_are_told(three_parts, tmp_path):
    with DatasetFiles(str(tmp_path / "merged")):
        with pytest.raises(IndexedDatasetError, match="merged: another process"):
            merge(str(tmp_path / "merged"), three_parts[:1])


def refused(prefix, parts, error, match):
    """Merge and expect an error of one line that leaves no file behind."""
    folder = os.path.dirname(prefix)
    before = {name: os.path.getsize(os.path.join(folder, name)) for name in os.listdir(folder)}
    with pytest.raises(error, match=match) as raised:
        merge(prefix, parts)
    assert len(str(raised.value).splitlines()) == 1
    assert {name: os.path.getsize(os.path.join(folder, name)) for name in os.listdir(folder)} == before


def test_parts_that_cannot_be_merged_are_refused_by_name(three_parts, tmp_path):
    first, second = three_parts[:2]
    merged = str(tmp_path / "merged")
    refused(merged, [], OptionError, "at least one dataset")
    refused(merged, [first, str(tmp_path / "nowhere")], IndexedDatasetError, "nowhere.idx: no such file")
    write(tmp_path / "wide", [[1]], np.int32)
    refused(merged, [first, second, str(tmp_path / "wide")], InputError, r"wide.idx: .* int32, .*a.idx are uint16")
    write(tmp_path / "signed", [[1]], np.int16)  # of the same size: above 32,767 its tokens would be others
    refused(merged, [first, str(tmp_path / "signed")], InputError, r"signed.idx: .* int16, .*a.idx are uint16")
    with open(second + ".idx", "ab") as file:
        file.write(b"\0" * IndexedDataset(second).num_sequences)
    refused(merged, [first, second], InputError, "b.idx: is multimodal")


@pytest.mark.parametrize("link", [None, os.symlink, os.link])
@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_part_is_not_overwritten_under_any_name(three_parts, tmp_path, link, suffix):
    prefix = three_parts[1]
    if link is not None:
        prefix = str(tmp_path / "other_name")
        link(three_parts[1] + suffix, prefix + suffix)
    refused(prefix, three_parts[:3], OptionError, "is one of the parts to merge .*b")


@pytest.mark.parametrize("offset", [50_000 * 4, 100_000 * 4 + 50_000 * 8, 100_000 * 12 + 50_000 * 8])
def test_damage_in_the_middle_of_a_part_is_found(three_parts, tmp_path, offset):
    """A length, a pointer and a document of 100,000, none of which is checked when the dataset is opened."""
    damaged = str(tmp_path / "damaged")
    with IndexedDatasetWriter(damaged, np.uint16) as writer:
        writer.add(np.ones(200_000, dtype=np.uint16), np.full(100_000, 2))
        writer.finalize()
    with open(damaged + ".idx", "r+b") as file:
        file.seek(HEADER_BYTES + offset)
        file.write(b"\x07")
    IndexedDataset(damaged)
    refused(str(tmp_path / "merged"), [*three_parts[:3], damaged], IndexedDatasetError, "damaged.idx: impossible")


@pytest.mark.parametrize("step", ["opening parts", "merging"])
def test_a_part_that_changes_meanwhile_is_told(three_parts, tmp_path, step):
    """Before its tokens are copied, and before its lengths are read."""

    def rewritten(steps, number, description):
        yield from steps
        if description == step:
            write(three_parts[1], [[1]])

    with pytest.raises(IndexedDatasetError, match="b: was changed while"):
        merge(str(tmp_path / "merged"), three_parts[:3], rewritten)


def test_a_part_that_is_cut_meanwhile_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(merging, "COPIED_AT_ONCE", 8192)
    write(tmp_path / "part", [list(range(10_000))])

    def cut(steps, number, description):
        for step in steps:
            if description == "merging":
                os.truncate(tmp_path / "part.bin", 10_000)
            yield step

    with pytest.raises(IndexedDatasetError, match="part.bin: ends at byte 10000;"):
        merge(str(tmp_path / "merged"), [str(tmp_path / "part")], cut)
    assert sorted(os.listdir(tmp_path)) == ["part.bin", "part.idx"]


@pytest.mark.parametrize("documents, file", [([[1] * 100_000], ".bin.part"), ([[1]] * 10_000, ".idx.part")])
def test_a_write_error_is_one_line_and_leaves_nothing(tmp_path, documents, file):
    part = str(tmp_path / "part")
    write(part, documents)
    done = run_python(f"""
        import resource
        from megatron_bfp import BFPError
        from megatron_bfp.indexed_dataset.merging import merge
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            merge({str(tmp_path / "merged")!r}, [{part!r}])
        except BFPError as error:
            sys.exit(str(error))
    """)
    assert done.returncode == 1
    assert done.stderr == f"{tmp_path}/merged{file}: cannot be written: File too large\n"
    assert sorted(os.listdir(tmp_path)) == ["part.bin", "part.idx"]


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "small_disk", "1m") as folder:
        yield folder


def test_another_disk_which_may_be_full(disk, tmp_path):
    write(tmp_path / "part", [[1, 2, 3]] * 1000 + [[4] * 100_000])
    part, merged = str(tmp_path / "part"), str(disk / "merged")
    merge(merged, [part])
    assert are_the_same(merged, part)
    refused(merged, [part] * 8, IndexedDatasetError, "merged.bin.part: cannot be written: No space left on device")
    assert are_the_same(merged, part)


def test_fault_D07_a_merged_dataset_is_on_disk_before_it_gets_its_names(three_parts, tmp_path):
    for _ in range(2):  # the second replaces the first
        with watched_disk() as disk:
            merge(str(tmp_path / "merged"), three_parts[:3])
        assert disk.unforced == [] and disk.names_not_forced() == []
        assert [os.path.basename(path) for kind, path in disk.events if kind == "name"] == ["merged.bin", "merged.idx"]
        assert disk.is_forced(tmp_path / "merged.bin") and disk.is_forced(tmp_path / "merged.idx")
    assert are_the_same(tmp_path / "merged", three_parts[3])


def test_fault_D11_short_writes_and_copies_are_continued(three_parts, tmp_path, monkeypatch):
    real_write, real_read = os.pwrite, os.pread
    monkeypatch.setattr(os, "copy_file_range", fail_with_invalid_argument)
    monkeypatch.setattr(os, "pwrite", lambda file, content, offset: real_write(file, content[:5], offset))
    merge(str(tmp_path / "written"), three_parts[:3])
    monkeypatch.setattr(os, "pwrite", real_write)
    monkeypatch.setattr(os, "pread", lambda file, size, offset: real_read(file, min(size, 7), offset))
    merge(str(tmp_path / "read"), three_parts[:3])
    monkeypatch.undo()
    real_copy = os.copy_file_range
    short = lambda source, target, size, *offsets: real_copy(source, target, min(size, 3), *offsets)  # noqa: E731
    monkeypatch.setattr(os, "copy_file_range", short)
    merge(str(tmp_path / "copied"), three_parts[:3])
    assert all(are_the_same(tmp_path / name, three_parts[3]) for name in ("written", "read", "copied"))
