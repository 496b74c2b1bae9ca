"""Reader and writer of .bin/.idx: the bytes are megatron-core's, and damage is found at open or at the read."""

import filecmp
import os
import pickle
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from helpers.datasets import ROOT, documents_of, write
from helpers.disk_order import watched_disk
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bfp import IndexedDatasetError, InputError
from megatron_bfp.indexed_dataset import reader
from megatron_bfp.indexed_dataset.format import HEADER_BYTES, optimal_dtype
from megatron_bfp.indexed_dataset.reader import IndexedDataset
from megatron_bfp.indexed_dataset.writer import IdxWriter, IndexedDatasetWriter

DTYPES = [np.uint16, np.int32]
DTYPE_CODE_AT = 17
# documents of sequences of tokens
NESTED = st.lists(st.lists(st.lists(st.integers(0, 65535), max_size=6), max_size=4), max_size=8)


def write_nested(prefix, documents, dtype):
    with IndexedDatasetWriter(str(prefix), dtype) as writer:
        for document in documents:
            tokens = [token for sequence in document for token in sequence]
            lengths = np.array([len(sequence) for sequence in document], dtype=np.int64)
            writer.add(np.array(tokens, dtype=np.int64), lengths, [len(document)])
        writer.finalize()


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


@pytest.mark.parametrize("mmap", [True, False])
@settings(max_examples=60, deadline=None)
@given(documents=NESTED)
def test_what_was_written_is_read(documents, mmap, tmp_path_factory):
    prefix = tmp_path_factory.mktemp("read") / "data"
    write_nested(prefix, documents, np.uint16)
    dataset = IndexedDataset(str(prefix), mmap)
    flat = [[token for sequence in document for token in sequence] for document in documents]
    assert [dataset.document(i).tolist() for i in range(dataset.num_documents)] == flat
    lengths = dataset.document_lengths
    for _ in range(2):  # the second pass does not check again what was checked
        assert lengths[:].tolist() == [len(document) for document in flat]
        assert lengths[2:5].tolist() == [len(document) for document in flat[2:5]]
    part = dataset.document_lengths.range(min(1, len(flat)), len(flat))
    for first in (*range(len(flat)), *range(len(flat))):
        assert part[first : first + 2].tolist() == [len(document) for document in flat[1:][first : first + 2]]


def test_an_idx_alone_has_lengths_and_no_tokens(tmp_path):
    write(tmp_path / "data", documents_of([3, 0, 5]))
    (tmp_path / "data.bin").rename(tmp_path / "elsewhere.bin")
    with pytest.raises(IndexedDatasetError, match="data.bin: no such file"):
        IndexedDataset(str(tmp_path / "data"))
    dataset = pickle.loads(pickle.dumps(IndexedDataset(str(tmp_path / "data"), needs_bin=False)))
    assert dataset.document_lengths[:].tolist() == [3, 0, 5] and dataset.num_tokens == 8
    with pytest.raises(IndexedDatasetError, match="opened for lengths alone"):
        dataset.document(0)
    (tmp_path / "data.bin").write_bytes(b"1234")
    with pytest.raises(IndexedDatasetError, match="has 4 bytes"):
        IndexedDataset(str(tmp_path / "data"), needs_bin=False)


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


@pytest.mark.case(12)
@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_every_truncation_is_refused_at_open(write_dataset, tmp_path, suffix):
    write_dataset(documents_of([5, 0, 3, 9]))
    path = tmp_path / f"data{suffix}"
    content = path.read_bytes()
    for size in range(len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(IndexedDatasetError, match="data"):
            IndexedDataset(str(tmp_path / "data"))
    path.write_bytes(content + b"\0\0")
    with pytest.raises(IndexedDatasetError, match="bytes"):
        IndexedDataset(str(tmp_path / "data"))


@pytest.mark.parametrize("nested", [False, True])
def test_every_altered_byte_of_the_idx_is_refused_or_gives_another_valid_idx(write_dataset, tmp_path, nested):
    """What cannot be told from a valid file: the other 2-byte dtype, and other sequences joined to a document."""
    documents = documents_of([5, 0, 3, 9])
    dataset = write_dataset([documents[:2], documents[2:]] if nested else documents)
    path = tmp_path / "data.idx"
    content = path.read_bytes()
    document_indices_at = len(content) - 8 * (dataset.num_documents + 1)
    for offset in range(len(content)):
        for flip in (0x01, 0x80):
            altered = bytearray(content)
            altered[offset] ^= flip
            path.write_bytes(altered)
            try:
                damaged = IndexedDataset(str(tmp_path / "data"))
            except IndexedDatasetError:
                continue
            assert offset == DTYPE_CODE_AT or offset >= document_indices_at
            joined = [token for i in range(damaged.num_documents) for token in damaged.document(i).tolist()]
            assert joined == [token for document in documents for token in document]


def test_pointers_deep_inside_are_checked_at_the_read_and_by_a_full_check(tmp_path):
    dataset = write(tmp_path / "data", [[1, 2]] * 100_000)
    path = tmp_path / "data.idx"
    content = bytearray(path.read_bytes())
    content[HEADER_BYTES + 100_000 * 4 + 50_000 * 8] ^= 4  # the pointer of sequence 50,000
    path.write_bytes(content)
    dataset = IndexedDataset(str(tmp_path / "data"))
    assert dataset.document(49_000).tolist() == [1, 2]
    for document in (49_999, 50_000):
        with pytest.raises(IndexedDatasetError, match=f"sequence {document};"):
            dataset.document(document)
    with pytest.raises(IndexedDatasetError, match="sequence 49999"):
        dataset.check_pointers()
    with pytest.raises(IndexedDatasetError):
        dataset.document_lengths[:]


@pytest.mark.parametrize("value", [-5, 10**12, 0, 49_998])
def test_first_sequences_deep_inside_are_checked_too(tmp_path, value):
    dataset = write(tmp_path / "data", [[1, 2]] * 100_000)
    path = tmp_path / "data.idx"
    content = bytearray(path.read_bytes())
    at = HEADER_BYTES + 100_000 * 12 + 50_000 * 8
    content[at : at + 8] = value.to_bytes(8, "little", signed=True)
    path.write_bytes(content)
    dataset = IndexedDataset(str(tmp_path / "data"))
    with pytest.raises(IndexedDatasetError, match="first sequence of document"):
        dataset.document_lengths[49_999:50_001]
    with pytest.raises(IndexedDatasetError):
        dataset.check_pointers()
    with pytest.raises(IndexedDatasetError):
        dataset.document(49_999)


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


def test_a_document_that_is_not_there_is_an_index_error(write_dataset):
    dataset = write_dataset(documents_of([5, 3]))
    for document in (-1, 2):
        with pytest.raises(IndexError):
            dataset.document(document)


def test_pickling_keeps_the_path_and_not_the_data(write_dataset):
    dataset = write_dataset(documents_of([5000, 3000]))
    content = pickle.dumps(dataset)
    assert len(content) < 1000
    assert pickle.loads(content).document(1).tolist() == dataset.document(1).tolist()


@pytest.mark.case(3)
def test_more_than_two_to_the_32_tokens_in_a_sparse_file(tmp_path):
    tokens = (1 << 32) + 10
    lengths = np.array([1 << 30] * 4 + [10], dtype=np.int64)
    with IndexedDatasetWriter(str(tmp_path / "data"), np.uint16) as writer:
        writer._lengths = [lengths.astype(np.int32)]
        writer._sequences_per_document = [np.ones(5, dtype=np.int32)]
        writer._bin.truncate(tokens * 2)
        writer._bin.seek((tokens - 10) * 2)
        writer._bin.write(np.arange(10, dtype=np.uint16).data)
        writer.finalize()
    for mmap in (True, False):
        dataset = IndexedDataset(str(tmp_path / "data"), mmap)
        assert dataset.document(4).tolist() == list(range(10))
        assert dataset.tokens((1 << 32) - 1, 3).tolist() == [0, 0, 1]
    assert dataset.document_lengths[:].tolist() == lengths.tolist()


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


@pytest.mark.parametrize("shift", [1, 2, 3, -2])
def test_fault_D09_the_first_pointer_must_be_0(tmp_path, shift):
    """All pointers shifted alike, and the .bin with so many bytes more: everything else agrees."""
    write(tmp_path / "data", documents_of([3, 4, 5]))
    content = bytearray((tmp_path / "data.idx").read_bytes())
    pointers = np.frombuffer(content, np.int64, 3, HEADER_BYTES + 3 * 4)
    pointers += shift
    (tmp_path / "data.idx").write_bytes(content)
    tokens = (tmp_path / "data.bin").read_bytes()
    (tmp_path / "data.bin").write_bytes(tokens + bytes(shift) if shift > 0 else tokens[:shift])
    with pytest.raises(IndexedDatasetError, match="impossible length or pointer of sequence 0"):
        IndexedDataset(str(tmp_path / "data"))


@pytest.mark.parametrize("nested", [False, True])
def test_fault_D09_pointers_between_two_tokens_are_refused_at_the_read(tmp_path, monkeypatch, nested):
    """Deep inside an .idx, all pointers of a stretch are off by one byte: neighbours agree with each other."""
    monkeypatch.setattr(reader, "CHECKED_AT_OPEN", 2)
    documents = documents_of([3] * 40)
    write(tmp_path / "data", [[document] for document in documents] if nested else documents)
    content = bytearray((tmp_path / "data.idx").read_bytes())
    pointers = np.frombuffer(content, np.int64, 40, HEADER_BYTES + 40 * 4)
    pointers[10:30] += 1
    (tmp_path / "data.idx").write_bytes(content)
    dataset = IndexedDataset(str(tmp_path / "data"))
    assert dataset.document(5).tolist() == documents[5]
    for sequences in (None, np.array([20])):
        with pytest.raises(IndexedDatasetError, match="impossible length or pointer of sequence 20"):
            dataset.spans(np.array([20]), sequences)
    with pytest.raises(IndexedDatasetError, match="impossible length or pointer of sequence 9"):
        dataset.check_pointers()


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.uint8])
def test_fault_D09_tokens_are_read_from_where_they_begin(tmp_path, mmap, dtype):
    lengths = [1, 2, 3, 1, 5, 7]
    documents = documents_of(lengths)
    dataset = write(tmp_path / "data", documents, dtype)
    dataset = IndexedDataset(dataset.prefix, mmap)
    flat = [token for document in documents for token in document]
    for start in range(len(flat)):
        for count in (0, 1, 3):
            if start + count <= len(flat):
                tokens = dataset.tokens(start, count)
                assert tokens.dtype == dtype and tokens.tolist() == flat[start : start + count]


def test_fault_D11_a_short_read_is_continued_and_one_at_the_end_is_an_error(tmp_path, monkeypatch):
    dataset = IndexedDataset(write(tmp_path / "data", documents_of([50, 60])).prefix, mmap=False)
    real = os.pread
    for most in (1, 3, 64):
        monkeypatch.setattr(os, "pread", lambda file, size, offset, most=most: real(file, min(size, most), offset))
        assert dataset.document(1).tolist() == list(range(51, 111))
        assert dataset.tokens(49, 4).tolist() == [50, 51, 52, 53]
        with pytest.raises(IndexedDatasetError, match="tokens 100 to 120 are wanted, 10 of them exist"):
            dataset.tokens(100, 20)


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


@pytest.mark.parametrize("mmap", [True, False])
def test_a_bin_with_bytes_that_the_idx_does_not_describe_is_refused(write_dataset, tmp_path, mmap):
    prefix = write_dataset([[1, 2, 3]]).prefix
    with open(tmp_path / "data.bin", "ab") as file:
        file.write(b"\0\0")
    with pytest.raises(IndexedDatasetError, match="has 8 bytes, .* describes 6"):
        IndexedDataset(prefix, mmap)
