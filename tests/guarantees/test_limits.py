"""Corpora at the limits: more documents and tokens than 32 bits count, single ones, none; vocabularies about 65,536."""

import os
import struct

import numpy as np
import pytest
from helpers.chunks import chunk_rows
from helpers.datasets import documents_of, write

from megatron_bfp import InputError, OptionError, pack
from megatron_bfp.indexed_dataset.format import HEADER_BYTES, MAGIC, optimal_dtype
from megatron_bfp.indexed_dataset.reader import IndexedDataset
from megatron_bfp.indexed_dataset.writer import IndexedDatasetWriter
from megatron_bfp.packing.best_fit import plan_runs
from megatron_bfp.packing.table import run_rows
from megatron_bfp.samples.order import sequence_of_sample
from megatron_bfp.samples.sample import build_sample
from megatron_bfp.sequence_index import builder
from megatron_bfp.sequence_index.builder import build
from megatron_bfp.sequence_index.key import IndexKey, index_directory
from megatron_bfp.sequence_index.reader import SequenceIndex
from megatron_bfp.sequence_index.verify import verify

LAST_LENGTHS = [5, 12, 3, 16, 2, 9, 7, 20]


def skip_without_sparse_files(path):
    if os.stat(path).st_blocks > 1 << 16:
        pytest.skip("this file system has no sparse files")


def write_sparse(prefix, num_documents):
    """A dataset whose documents are all empty but the last ones, the empty ones being a hole in the .idx."""
    lengths = np.array(LAST_LENGTHS, dtype=np.int32)
    first, pointers_at = num_documents - len(lengths), HEADER_BYTES + num_documents * 4
    documents_at = pointers_at + num_documents * 8
    with open(f"{prefix}.idx", "wb") as file:
        file.write(MAGIC + struct.pack("<QBQQ", 1, 8, num_documents, num_documents + 1))
        for offset, values in (
            (HEADER_BYTES + first * 4, lengths),
            (pointers_at + first * 8, (np.cumsum(lengths, dtype=np.int64) - lengths) * 2),
            (documents_at + first * 8, np.arange(first, num_documents + 1)),
        ):
            file.seek(offset)
            file.write(values.tobytes())
    np.arange(1, 1 + lengths.sum(), dtype=np.uint16).tofile(f"{prefix}.bin")
    skip_without_sparse_files(f"{prefix}.idx")


def anonymous_bytes():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))


@pytest.mark.case(9, 13)
@pytest.mark.parametrize("num_documents", [(1 << 31) + 100, (1 << 32) + 100])
def test_more_documents_than_32_bits_count(tmp_path, monkeypatch, num_documents):
    """Of the last documents an index is built and read. That the .idx of up to 86 GB is hashed once is left out."""
    monkeypatch.setattr(builder, "idx_sha256", lambda *_: "0" * 64)
    prefix, first = str(tmp_path / "data"), num_documents - len(LAST_LENGTHS)
    write_sparse(prefix, num_documents)
    before = anonymous_bytes()
    dataset = IndexedDataset(prefix)
    assert anonymous_bytes() - before < 16 << 20
    assert dataset.num_documents == num_documents and dataset.num_tokens == sum(LAST_LENGTHS)
    index = build(dataset, IndexKey(8, first, num_documents), index_directory(prefix))
    expected = pack(LAST_LENGTHS, 8)
    assert index.table.document_ids.dtype == (np.uint64 if num_documents > 1 << 32 else np.uint32)
    for opened in (index, SequenceIndex(index.path, IndexedDataset(prefix))):
        assert len(opened) == len(expected)
        for sequence in range(len(opened)):
            assert chunk_rows(opened, sequence).tolist() == (expected[sequence] + [first, 0, 0]).tolist()
    tokens = [
        dataset.tokens(start, end - start).tolist()
        for i in range(len(index))
        for _, start, end, _ in index.chunk_spans(i)
    ]
    assert sorted(sum(tokens, [])) == list(range(1, 1 + sum(LAST_LENGTHS)))
    with pytest.raises(IndexError):
        dataset.document(num_documents)


@pytest.mark.case(3, 13)
def test_a_document_of_more_than_2_to_the_32_tokens(tmp_path):
    """It has five sequences of 2**30; what follows it lies beyond 2**32 tokens and 2**33 bytes."""
    with IndexedDatasetWriter(str(tmp_path / "data"), np.uint16) as writer:
        writer._lengths = [np.array([1 << 30] * 5 + [7, 100], dtype=np.int32)]
        writer._sequences_per_document = [np.array([6, 1], dtype=np.int32)]
        writer._bin.seek((5 << 30) * 2)
        writer._bin.write(np.arange(1, 108, dtype=np.uint16).data)
        writer.finalize()
    skip_without_sparse_files(tmp_path / "data.bin")
    dataset = IndexedDataset(str(tmp_path / "data"))
    length = (5 << 30) + 7
    assert dataset.document_lengths[:].tolist() == [length, 100]
    index = build(dataset, IndexKey(1 << 20, 0, 2), index_directory(dataset.prefix))
    verify(index.path, dataset)
    assert index.counts["tokens"] == length + 100 > 1 << 32
    assert len(index) == (5 << 10) + 1
    assert chunk_rows(index, len(index) - 2).tolist() == [[0, (5 << 30) - (1 << 20), 1 << 20]]
    assert chunk_rows(index, len(index) - 1).tolist() == [[1, 0, 100], [0, 5 << 30, 7]]
    sample = build_sample(dataset, index.chunk_spans(len(index) - 2), 1 << 20)
    assert sample.labels[-1] == 1 and sample.loss_mask[-1] == 1  # the first token of the rest
    sample = build_sample(dataset, index.chunk_spans(len(index) - 1), 1 << 20)
    assert sample.tokens[:108].tolist() == [*range(8, 108), *range(1, 8), 0]


@pytest.mark.case(13)
def test_packing_counts_beyond_32_bits():
    assert pack(np.full(3, 1 << 33), 1 << 20).num_sequences == 3 << 13
    remainders = np.zeros(8, dtype=np.int64)
    remainders[[3, 5]] = 1 << 33
    rows = run_rows(plan_runs(remainders, 8), 1 << 34)
    assert rows.tolist() == [[1 << 34, 0, 2, 34]]
    remainders[2] = 3
    assert run_rows(plan_runs(remainders, 8), 0).tolist() == [[0, 0, 2, 34], [1 << 33, 1 << 34, 3, 12]]


@pytest.mark.case(13)
@pytest.mark.parametrize("num_sequences", [(1 << 31) + 11, (1 << 32) + 15, (1 << 40) + 1])
def test_orders_beyond_32_bits(num_sequences):
    samples = [*range(2000), *range(num_sequences - 2000, num_sequences)]
    sequences = {sequence_of_sample(sample, num_sequences, 1, "a") for sample in samples}
    assert len(sequences) == len(samples) and min(sequences) >= 0 and max(sequences) < num_sequences
    assert max(sequences) > num_sequences // 2
    assert sequence_of_sample(5 * num_sequences, num_sequences, 1, "a") != sequence_of_sample(0, num_sequences, 1, "a")


@pytest.mark.case(3)
def test_a_sequence_of_more_tokens_than_the_format_counts_is_refused(tmp_path):
    with IndexedDatasetWriter(str(tmp_path / "data"), np.uint16) as writer:
        with pytest.raises(InputError, match=r"2\*\*31"):
            writer.add(np.zeros(1, dtype=np.uint16), np.array([1 << 31]))
    with pytest.raises(OptionError, match="which cannot be"):
        pack(np.array([1 << 41]), 8)


@pytest.mark.case(1, 14)
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0], [1], [0, 1, 0], [17], [64, 65, 128, 200]])
@pytest.mark.parametrize("seq_length", [1, 7, 64, 4097])
def test_corpora_at_the_edges_keep_the_invariant(write_dataset, lengths, seq_length):
    dataset = write_dataset(documents_of(lengths) if lengths else [])
    index = build(dataset, IndexKey(seq_length, 0, len(lengths)), index_directory(dataset.prefix))
    samples = [build_sample(dataset, index.chunk_spans(i), seq_length) for i in range(len(index))]
    inputs = sorted(token for sample in samples for token in sample.tokens.tolist() if token)
    targets = sorted(token for sample in samples for token in sample.labels[sample.loss_mask > 0].tolist())
    assert inputs == list(range(1, 1 + sum(lengths)))
    assert (
        targets == [token for document in documents_of(lengths) for token in document[1:]] if lengths else not targets
    )
    assert index.counts["empty_documents"] == lengths.count(0)


@pytest.mark.case(6)
def test_vocabularies_about_the_limit_of_16_bits(tmp_path):
    for vocab_size in range(65_499, 65_538):
        tokens = [0, vocab_size - 2, vocab_size - 1]
        dataset = write(tmp_path / "data", [tokens], optimal_dtype(vocab_size))
        assert dataset.document(0).tolist() == tokens
        assert dataset.dtype == (np.uint16 if vocab_size < 65_500 else np.int32)


@pytest.fixture
def blend_of(write_dataset):
    """Configures a blend that names one small corpus so often."""
    pytest.importorskip("megatron.core.datasets.gpt_dataset")
    from helpers.megatron_helpers import config

    prefix = write_dataset(documents_of([5, 3, 8])).prefix

    def make(number, **options):
        return config(([prefix] * number, [1.0] * number), **options)

    return make


@pytest.mark.case(13)
def test_more_corpora_than_megatron_core_blends_are_refused(blend_of):
    from helpers.megatron_helpers import config

    blend_of(32_766)
    with pytest.raises(OptionError, match="blend of 32,767 corpora: megatron-core blends 32,766 at the most"):
        blend_of(32_767)
    with pytest.raises(OptionError, match="32,767"):
        config(None, blend_per_split=[None, (["a"] * 32_767, None), None])


@pytest.mark.case(13)
def test_as_many_corpora_as_megatron_core_blends(blend_of):
    """One open dataset in all places: on most systems a process may not have as many files open."""
    from helpers.megatron_helpers import build as build_datasets
    from megatron.core.datasets.blended_dataset import BlendedDataset

    number = 32_766
    settings = blend_of(1)
    dataset = build_datasets([8, 0, 0], settings)[0].datasets[0]
    blend = BlendedDataset([dataset] * number, [1.0] * number, 2 * number, settings)
    drawn = np.bincount(blend.dataset_index)
    assert len(drawn) == number and set(drawn.tolist()) <= {1, 2, 3}
    for sample in (0, number, len(blend) - 1):
        assert blend[sample]["tokens"].tolist() in ([1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15, 16])
    with pytest.raises(AssertionError):  # what ours says in words
        BlendedDataset([dataset] * (number + 1), [1.0] * (number + 1), 2, settings)
