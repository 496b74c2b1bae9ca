"""The reader of .bin/.idx: it reads what was written, and damage is noticed at open or at the read."""

import os
import pickle

import numpy as np
import pytest
from helpers.datasets import documents_of, write
from helpers.nested import NESTED, write_nested
from hypothesis import given, settings

from megatron_bfp import IndexedDatasetError
from megatron_bfp.indexed_dataset import reader
from megatron_bfp.indexed_dataset.format import HEADER_BYTES
from megatron_bfp.indexed_dataset.reader import IndexedDataset
from megatron_bfp.indexed_dataset.writer import IndexedDatasetWriter

DTYPE_CODE_AT = 17


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


@pytest.mark.parametrize("mmap", [True, False])
def test_a_bin_with_bytes_that_the_idx_does_not_describe_is_refused(write_dataset, tmp_path, mmap):
    prefix = write_dataset([[1, 2, 3]]).prefix
    with open(tmp_path / "data.bin", "ab") as file:
        file.write(b"\0\0")
    with pytest.raises(IndexedDatasetError, match="has 8 bytes, .* describes 6"):
        IndexedDataset(prefix, mmap)
