"""Ids that a model has no embedding for are named with corpus and document."""

import numpy as np
import pytest
from helpers.datasets import documents_of

from megatron_bfp import IndexedDatasetError
from megatron_bfp.samples.sample import build_sample
from megatron_bfp.samples.vocabulary import BLOCK_TOKENS, check_sampled_ids, check_spans, has_others
from megatron_bfp.sequence_index.builder import build
from megatron_bfp.sequence_index.key import IndexKey, index_directory

LENGTHS = [3, 0, 5, 21, 2, 8]


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int16, np.int32, np.int64])
def test_ids_below_0_are_outside_as_well(dtype):
    assert not has_others(np.array([0, 5, 9], dtype), 10)
    assert has_others(np.array([0, 5, 10], dtype), 10)
    if np.iinfo(dtype).min:
        assert has_others(np.array([0, -1, 9], dtype), 10) and has_others(np.array([-1], dtype), 1 << 40)
    assert not has_others(np.array([], dtype), 10)


def reads_of(dataset, seq_length, vocab_size):
    """Samples that are fine, and the messages of the others."""
    index = build(dataset, IndexKey(seq_length, 0, dataset.num_documents), index_directory(dataset.prefix))
    fine, messages = 0, []
    for sequence in range(len(index)):
        try:
            build_sample(dataset, index.chunk_spans(sequence), seq_length, vocab_size=vocab_size)
            fine += 1
        except IndexedDatasetError as error:
            messages.append(str(error))
    return fine, messages


@pytest.mark.parametrize("document, at", [(0, 0), (0, 2), (2, 4), (3, 0), (3, 20), (4, 1), (5, 7)])
def test_fault_A13_a_sample_names_corpus_document_and_id(write_dataset, document, at):
    documents = documents_of(LENGTHS)
    documents[document][at] = 777
    dataset = write_dataset(documents)
    fine, messages = reads_of(dataset, 8, 100)
    assert fine and messages
    for message in messages:
        assert message.startswith(f"{dataset.prefix}.bin: document {document} holds the token id 777, ")
        assert "the model's vocabulary ends at 99" in message
    assert reads_of(dataset, 8, 778)[1] == [] and len(reads_of(dataset, 8, 777)[1]) == len(messages)
    assert reads_of(dataset, 8, None)[1] == []


def test_fault_A13_an_id_that_is_only_a_label_of_a_sample_is_noticed(write_dataset):
    """The first token of a long document's next chunk is the last label of this one."""
    documents = documents_of([16])
    documents[0][8] = 777
    fine, messages = reads_of(write_dataset(documents), 8, 100)
    assert fine == 0 and len(messages) == 2


def test_fault_A13_padding_is_no_id(write_dataset):
    dataset = write_dataset([[1, 2, 3]])
    for _ in range(20):  # of memory that was not cleared
        np.full(9, 60_000, dtype=np.uint16)
        assert reads_of(dataset, 8, 4) == (1, [])


def test_fault_A13_documents_of_several_sequences_are_named(write_dataset):
    dataset = write_dataset([[[1, 2], [3]], [[4], [5, 900], [6]], [[7]]])
    with pytest.raises(IndexedDatasetError, match="document 1 holds the token id 900"):
        check_spans(dataset, [(0, dataset.num_tokens)], 10)
    check_spans(dataset, [(0, 5), (6, 8), (3, 3)], 10)


def test_fault_A13_ids_below_0_are_named(write_dataset):
    dataset = write_dataset([[1, 2], [3, -5]], dtype=np.int32)
    with pytest.raises(IndexedDatasetError, match="document 1 holds the token id -5"):
        check_sampled_ids(dataset, 1 << 40)


@pytest.mark.parametrize("wrong", [0, 5, 4095, 4096, 99_999])
def test_fault_A13_a_small_bin_is_checked_whole(write_dataset, wrong):
    tokens = np.ones(100_000, dtype=np.int64)
    tokens[wrong] = 400
    dataset = write_dataset(np.split(tokens, 1000))
    with pytest.raises(IndexedDatasetError, match=f"document {wrong // 100} holds the token id 400"):
        check_sampled_ids(dataset, 400)
    check_sampled_ids(dataset, 401)


def test_fault_A13_a_large_bin_is_sampled_from_end_to_end(write_dataset):
    size = 1000 * BLOCK_TOKENS
    dataset = write_dataset([np.ones(size, dtype=np.uint16)])
    read = []
    tokens = dataset.tokens
    dataset.tokens = lambda start, count: read.append((start, count)) or tokens(start, count)
    check_sampled_ids(dataset, 10)
    assert len(read) == 256 and read[0] == (0, BLOCK_TOKENS) and sum(read[-1]) == size
    gaps = np.diff([start for start, _ in read])
    assert gaps.max() - gaps.min() <= 1 and {count for _, count in read} == {BLOCK_TOKENS}
    read.clear()
    check_sampled_ids(dataset, 65_536)  # no uint16 is outside
    assert read == []
    check_sampled_ids(dataset, 65_535)
    assert read


def test_fault_A13_an_empty_dataset_is_fine(write_dataset):
    check_sampled_ids(write_dataset([]), 10)
