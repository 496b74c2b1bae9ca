"""Data and configurations that several tests of the trainer use."""

import pytest
from helpers.datasets import documents_of, write
from trainer.config import TrainerConfig

LENGTHS = [5, 40, 1, 17, 31, 32, 9, 70, 3, 12, 25, 8]


@pytest.fixture(scope="session")
def prefix(tmp_path_factory):
    """Documents, of which every second has many inputs without a loss, so that sequences differ in targets."""
    documents = documents_of([*LENGTHS, *[1, 2] * 10, 64, 30, 30, 14, 50])
    documents[1::2] = [[token if token % 3 else 0 for token in document] for document in documents[1::2]]
    return write(tmp_path_factory.mktemp("data") / "data", documents).prefix


@pytest.fixture
def blend_config(write_dataset):
    """A run on two datasets, of documents of ``LENGTHS`` and in reverse order; the last half is the valid split."""
    first = write_dataset(documents_of(LENGTHS), "first").prefix
    second = write_dataset(documents_of(LENGTHS[::-1]), "second").prefix
    return TrainerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        data_path=("0.5", first, "0.5", second),
        split="1,1,0",
        seed=3,
        seq_length=32,
        tokenizer_model="none",
        make_vocab_size_divisible_by=8,
        tensor_model_parallel_size=2,
        micro_batch_size=1,
        global_batch_size=4,
        train_iters=4,
    )


@pytest.fixture
def lengths():
    """Lengths of the documents of ``blend_config``'s first dataset."""
    return LENGTHS
