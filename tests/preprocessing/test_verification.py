"""What is on disk is checked: tokens inside the vocabulary, an EOD at the end of each document and nowhere else."""

import os

import numpy as np
import pytest

from megatron_bfp import IndexedDatasetError
from megatron_bfp.indexed_dataset import verify as token_verification
from megatron_bfp.preprocessing.write import verify_documents
from megatron_bfp.tokenizers.special_tokens import DocumentTemplate

EOD = 9


@pytest.fixture(params=[1, 2, 3, 1 << 18])
def blocks(request, monkeypatch):
    """With blocks smaller than a document, and as they are."""
    monkeypatch.setattr(token_verification, "BLOCK_TOKENS", request.param)
    monkeypatch.setattr(token_verification, "BLOCK_DOCUMENTS", request.param)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_a_right_dataset_passes(write_dataset, blocks, dtype):
    dataset = write_dataset([[1, 2, EOD], [EOD], [3, EOD], [1] * 10 + [EOD]], dtype=dtype)
    assert verify_documents(dataset.prefix, 10, EOD).num_documents == 4
    assert verify_documents(dataset.prefix, 10).num_documents == 4


@pytest.mark.case(5)
@pytest.mark.parametrize(
    "documents, reason",
    [
        ([[1, EOD], [2, 3], [4, EOD]], r"document 1 does not end in EOD \(9\)"),
        ([[1, EOD], [EOD, 3, EOD]], r"holds 3 EOD tokens \(9\) in 2 documents"),
        ([[1, EOD], [10, EOD]], "holds token 10, outside the 10 of the tokenizer"),
        ([[1, EOD], [-1, EOD]], "holds token -1, outside"),
    ],
)
def test_a_wrong_dataset_is_refused(write_dataset, blocks, documents, reason):
    dataset = write_dataset(documents, dtype=np.int32)
    with pytest.raises(IndexedDatasetError, match=f"data.bin: {reason}"):
        verify_documents(dataset.prefix, 10, EOD)


def test_what_was_changed_on_disk_is_found(write_dataset):
    dataset = write_dataset([[1, 2, EOD]] * 3)
    with open(f"{dataset.prefix}.bin", "r+b") as file:
        file.seek(5 * 2)
        file.write(bytes(2))
    with pytest.raises(IndexedDatasetError, match="document 1 does not end"):
        verify_documents(dataset.prefix, 10, EOD)
    os.truncate(f"{dataset.prefix}.bin", 4)
    with pytest.raises(IndexedDatasetError):
        verify_documents(dataset.prefix, 10, EOD)


def test_every_document_is_long_enough_to_begin_with_bos(write_dataset, blocks):
    """Also one that consists of the first of two tokens, twice the same: its last token is what the second must be."""
    before = DocumentTemplate(before=(1, 1))
    right = write_dataset([[1, 1, 5], [], [1, 1]], "right")
    assert verify_documents(right.prefix, 10, template=before).num_documents == 3
    for number, documents in enumerate(([[1, 1, 5], [1]], [[1, 1], [1], [1, 1]], [[1, 1], [1, 2]])):
        wrong = write_dataset(documents, f"wrong{number}")
        with pytest.raises(IndexedDatasetError, match=r"document 1 does not begin with BOS \(1, 1\)"):
            verify_documents(wrong.prefix, 10, template=before)
