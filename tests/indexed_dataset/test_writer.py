"""The writer of .bin/.idx: the bytes are megatron-core's, and a dataset is whole or absent."""

import filecmp
import os
import signal
import struct
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from helpers.datasets import ROOT, documents_of, write
from helpers.disk_order import watched_disk
from helpers.nested import NESTED, write_nested
from hypothesis import given, settings

from megatron_bfp import IndexedDatasetError, InputError
from megatron_bfp.indexed_dataset.format import TOKEN_DTYPES, optimal_dtype
from megatron_bfp.indexed_dataset.reader import IndexedDataset
from megatron_bfp.indexed_dataset.writer import IdxWriter, IndexedDatasetWriter

DTYPES = [np.uint16, np.int32]


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=60, deadline=None)
@given(documents=NESTED)
def test_bytes_are_those_of_megatron_core(documents, dtype, tmp_path_factory):
    torch = pytest.importorskip("torch")
    builder_module = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    folder = tmp_path_factory.mktemp("bytes")
    builder = builder_module.IndexedDatasetBuilder(str(folder / "theirs.bin"), dtype=dtype)
    for document in documents:
        for sequence in document:
            builder.add_item(torch.tensor(sequence, dtype=torch.int64))
        builder.end_document()
    builder.finalize(str(folder / "theirs.idx"))
    write_nested(folder / "ours", documents, dtype)
    assert filecmp.cmp(folder / "ours.bin", folder / "theirs.bin", shallow=False)
    assert filecmp.cmp(folder / "ours.idx", folder / "theirs.idx", shallow=False)


def test_blocks_of_documents_and_single_documents_write_the_same(tmp_path):
    documents = documents_of([3, 0, 5, 1, 7])
    write(tmp_path / "single", documents)
    with IndexedDatasetWriter(str(tmp_path / "block"), np.uint16) as writer:
        writer.add(np.concatenate([np.array(d, dtype=np.int32) for d in documents]), [len(d) for d in documents])
        writer.finalize()
    for suffix in (".bin", ".idx"):
        assert filecmp.cmp(f"{tmp_path}/single{suffix}", f"{tmp_path}/block{suffix}", shallow=False)


@pytest.mark.case(6)
@pytest.mark.parametrize(
    "vocab_size, dtype", [(65_499, np.uint16), (65_500, np.int32), (65_535, np.int32), (65_537, np.int32)]
)
def test_the_dtype_is_the_one_megatron_chooses(vocab_size, dtype):
    assert optimal_dtype(vocab_size) is dtype


def test_codes_of_dtypes_are_those_of_megatron_core():
    theirs = pytest.importorskip("megatron.core.datasets.indexed_dataset").DType
    assert {np.dtype(dtype): code for code, dtype in TOKEN_DTYPES.items()} == {
        np.dtype(theirs.dtype_from_code(code)): code for code in (1, 2, 3, 4, 5, 8)
    }


@pytest.mark.case(6)
@pytest.mark.parametrize("token", [-1, 65_536, 70_000])
def test_a_token_that_does_not_fit_is_refused_and_nothing_is_left(tmp_path, token):
    with pytest.raises(InputError, match="does not fit uint16"):
        with IndexedDatasetWriter(str(tmp_path / "data"), np.uint16) as writer:
            writer.add(np.array([1, token]), np.array([2]))
    assert os.listdir(tmp_path) == []


def test_lengths_that_do_not_add_up_are_refused(tmp_path):
    with pytest.raises(InputError, match="add up"):
        with IndexedDatasetWriter(str(tmp_path / "data"), np.uint16) as writer:
            writer.add(np.array([1, 2]), np.array([3]))


def test_without_finalize_nothing_appears(tmp_path):
    with IndexedDatasetWriter(str(tmp_path / "data"), np.uint16) as writer:
        writer.add(np.array([1, 2]), np.array([2]))
    assert os.listdir(tmp_path) == []


def test_two_writers_of_one_dataset_are_told(tmp_path):
    with IndexedDatasetWriter(str(tmp_path / "data"), np.uint16):
        with pytest.raises(IndexedDatasetError, match="another process"):
            IndexedDatasetWriter(str(tmp_path / "data"), np.uint16)


def test_a_killed_writer_leaves_no_dataset_and_does_not_disturb_the_next(tmp_path):
    script = f"""
        import os, signal, sys
        sys.path.insert(0, {str(ROOT)!r})
        import numpy as np
        from megatron_bfp.indexed_dataset.writer import IndexedDatasetWriter
        writer = IndexedDatasetWriter({str(tmp_path / "data")!r}, np.uint16)
        writer.add(np.arange(100_000) % 60_000, np.array([100_000]))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(script)])
    assert killed.returncode == -signal.SIGKILL
    with pytest.raises(IndexedDatasetError, match="no such file"):
        IndexedDataset(str(tmp_path / "data"))
    dataset = write(tmp_path / "data", [[1, 2, 3]])
    assert dataset.document(0).tolist() == [1, 2, 3]
    assert sorted(os.listdir(tmp_path)) == ["data.bin", "data.idx"]


@pytest.mark.parametrize("lengths, per_document", [([3], [2]), ([-1, 4], None), ([3.0], None), ([3], [3, -2])])
def test_counts_that_cannot_be_are_refused(tmp_path, lengths, per_document):
    with IndexedDatasetWriter(str(tmp_path / "data"), np.uint16) as writer:
        with pytest.raises(InputError):
            writer.add(np.array([1, 2, 3]), lengths, per_document)


@pytest.mark.parametrize("num_sequences, num_documents", [(2, 3), (3, 2), (2, 1), (1, 2)])
def test_an_idx_of_other_numbers_than_announced_is_refused(tmp_path, num_sequences, num_documents):
    for announced in ((2, 2), (num_sequences, num_documents)):
        with IdxWriter(str(tmp_path / "data.idx"), np.dtype(np.uint16), *announced) as idx:
            idx.add_sequences(np.array([3, 4], dtype=np.int32))
            idx.add_documents(np.array([1, 1], dtype=np.int32))
            if announced == (2, 2):
                idx.finish()
                continue
            with pytest.raises(IndexedDatasetError, match="data.idx: not as many sequences and documents as announced"):
                idx.finish()


@pytest.mark.parametrize("length", [1 << 31, 1 << 32, -1])
def test_a_length_that_the_idx_cannot_hold_is_called_that(tmp_path, length):
    with IndexedDatasetWriter(str(tmp_path / "data"), np.uint16) as writer:
        with pytest.raises(InputError, match="lengths must be integers from 0 to 2\\*\\*31 - 1"):
            writer.add(np.array([1, 2, 3]), [length])


FILE_SIZE_LIMIT = """
import resource, sys
sys.path.insert(0, {root!r})
import numpy as np
import megatron_bfp
from megatron_bfp.indexed_dataset.reader import IndexedDataset
from megatron_bfp.indexed_dataset.writer import IndexedDatasetWriter
from megatron_bfp.sequence_index.builder import build
from megatron_bfp.sequence_index.key import IndexKey
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    {statement}
except megatron_bfp.BFPError as error:
    sys.exit(str(error))
"""


def run_with_little_disk(statement):
    """Run with files limited to 100 kB, which fails as a full disk does; returns the error message."""
    script = FILE_SIZE_LIMIT.format(root=str(ROOT), statement=statement)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    return done.stderr.strip()


def test_a_full_disk_is_our_error_and_leaves_nothing(tmp_path):
    statement = f"""
    with IndexedDatasetWriter({str(tmp_path / "full")!r}, np.uint16) as writer:
        for _ in range(40):
            writer.add(np.zeros(50_000, dtype=np.uint16), np.array([50_000]))
        writer.finalize()"""
    message = run_with_little_disk(statement.strip())
    assert "cannot be written: File too large" in message and len(message.splitlines()) == 1
    assert os.listdir(tmp_path) == []
    prefix = str(tmp_path / "data")
    write(prefix, [[1]] * 50_000)
    statement = f"build(IndexedDataset({prefix!r}), IndexKey(8, 0, 50_000), {prefix + '.bfp'!r})"
    message = run_with_little_disk(statement)
    assert "s8-d0-50000: cannot be written" in message and len(message.splitlines()) == 1
    assert os.listdir(prefix + ".bfp") == []


def test_the_idx_of_ten_million_documents_is_written_in_a_few_megabytes(tmp_path):
    script = f"""
        import sys
        sys.path.insert(0, {str(ROOT)!r})
        import numpy as np
        from megatron_bfp.indexed_dataset.writer import IndexedDatasetWriter

        def peak_bytes():
            with open("/proc/self/status") as file:
                return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))

        writer = IndexedDatasetWriter({str(tmp_path / "data")!r}, np.uint16)
        for _ in range(100):
            writer.add(np.zeros(100_000, np.uint16), np.ones(100_000, np.int32))
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak starts again from here
        before = peak_bytes()
        writer.finalize()
        print(peak_bytes() - before)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60)
    if "clear_refs" in done.stderr:
        pytest.skip("this system does not let a process reset its peak memory")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 20 << 20
    dataset = IndexedDataset(str(tmp_path / "data"))
    assert dataset.num_documents == 10_000_000
    dataset.check_pointers()


def test_fault_D07_a_dataset_is_on_disk_before_it_gets_its_names(tmp_path):
    with watched_disk() as disk:
        write(tmp_path / "data", documents_of([3, 4]))
    assert disk.unforced == [] and disk.names_not_forced() == []
    assert [os.path.basename(path) for kind, path in disk.events if kind == "name"] == ["data.bin", "data.idx"]
    assert disk.is_forced(tmp_path / "data.bin") and disk.is_forced(tmp_path / "data.idx")  # nothing was added later


def test_fault_D10_the_old_idx_goes_before_the_new_bin_comes(tmp_path):
    """In this order on disk, too: a crash leaves no pair that can be opened and does not belong together."""
    write(tmp_path / "data", documents_of([3, 4]))
    with watched_disk() as disk:
        write(tmp_path / "data", documents_of([4, 3]))
    assert disk.unforced == [] and disk.names_not_forced() == []
    moves = [(kind, os.path.basename(path)) for kind, path in disk.events[disk.index("remove", "data.idx") :]]
    assert moves == [
        ("remove", "data.idx"),
        ("force", os.path.basename(tmp_path)),
        ("name", "data.bin"),
        ("name", "data.idx"),
        ("force", os.path.basename(tmp_path)),
    ]


def test_fault_D10_a_stop_while_a_dataset_is_replaced_leaves_none_that_can_be_opened(tmp_path, monkeypatch):
    write(tmp_path / "data", documents_of([3, 4]))
    real = os.replace

    def stop_at_the_idx(source, target):
        if target.endswith(".idx"):
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(os, "replace", stop_at_the_idx)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "data", documents_of([4, 3]))
    with pytest.raises(IndexedDatasetError, match="data.idx: no such file"):
        IndexedDataset(str(tmp_path / "data"))


@pytest.mark.parametrize("lengths", [[1, 1], [2, 2], [3]])
def test_lengths_must_be_those_of_the_tokens(tmp_path, lengths):
    with IndexedDatasetWriter(str(tmp_path / "data"), np.uint16) as writer:
        if sum(lengths) == 3:
            writer.add(np.arange(3), np.array(lengths))
        else:
            with pytest.raises(InputError, match="lengths add up to"):
                writer.add(np.arange(3), np.array(lengths))


def test_the_idx_has_the_bytes_of_the_table_in_format(tmp_path):
    write_nested(str(tmp_path / "data"), [[[7, 8], [9]], [], [[1, 2, 3]]], np.uint16)
    content, s, d = (tmp_path / "data.idx").read_bytes(), 3, 3
    assert content[:9] == b"MMIDIDX\0\0" and content[17] == 8
    assert struct.unpack_from("<Q", content, 9) == (1,)
    assert struct.unpack_from("<QQ", content, 18) == (s, d + 1)
    assert np.frombuffer(content, "<i4", s, 34).tolist() == [2, 1, 3]
    assert np.frombuffer(content, "<i8", s, 34 + 4 * s).tolist() == [0, 4, 6]
    assert np.frombuffer(content, "<i8", d + 1, 34 + 12 * s).tolist() == [0, 2, 2, 3]
    assert len(content) == 34 + 12 * s + 8 * (d + 1)
