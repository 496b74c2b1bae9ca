"""One split as a run trains on it: the index it means, its length and its order."""

import pytest
from helpers.datasets import documents_of

from megatron_bfp.errors import OptionError, SequenceIndexError
from megatron_bfp.samples.order import sequence_of_sample
from megatron_bfp.sequence_index.builder import build
from megatron_bfp.sequence_index.key import SPLIT_NAMES, IndexKey, index_directory, split_fractions
from megatron_bfp.sequence_index.split import PackedSplit

LENGTHS = [5, 0, 12, 3, 16, 2, 2, 9, 7, 1]


@pytest.fixture
def dataset(write_dataset):
    return write_dataset(documents_of(LENGTHS))


@pytest.mark.parametrize("cap", [None, 2])
@pytest.mark.parametrize("split", ["8,1,1", "0.5,0.5", "3,0,1"])
def test_split_and_fractions_mean_the_index_of_the_key(dataset, split, cap):
    for name, fractions in zip(SPLIT_NAMES, split_fractions(split), strict=True):
        key = IndexKey.for_split(len(LENGTHS), 8, split, name, cap)
        packed = PackedSplit.open(dataset, 8, split, name, cap)
        if key is None:
            assert packed is None and fractions is None
            continue
        assert packed.index.key == key and packed.name == name and packed.dataset is dataset
        assert packed.index.path == f"{index_directory(dataset.prefix)}/{key.name}"
        assert PackedSplit.open(dataset, 8, fractions, name, cap).index.path == packed.index.path


def test_all_documents_are_a_split_by_themselves_whatever_its_name(dataset):
    for name in SPLIT_NAMES:
        assert PackedSplit.open(dataset, 8, None, name).index.key == IndexKey(8, 0, len(LENGTHS))


def test_a_missing_index_is_built_or_refused_with_the_command_that_builds_it(dataset, tmp_path):
    with pytest.raises(SequenceIndexError, match="there is no sequence index s8-d0-8-m3.* --split 8,2,0"):
        PackedSplit.open(dataset, 8, "8,2,0", "train", 3, builds=False)
    assert PackedSplit.open(dataset, 8, "8,2,0", "train", 3).index.was_built
    assert not PackedSplit.open(dataset, 8, "8,2,0", "train", 3, builds=False).index.was_built
    cached = build(dataset, IndexKey(8, 0, 5), str(tmp_path / "elsewhere"))  # the control: nobody looks there
    assert PackedSplit.open(dataset, 8, "1,1,0").index.path != cached.path


def test_samples_are_those_of_the_seeded_order(dataset):
    split = PackedSplit.open(dataset, 8, None)
    number = len(split)
    for sample in (0, 1, number - 1, number, 3 * number + 2):
        expected = sequence_of_sample(sample, number, 7, split.index.identity)
        assert split.sequence_of(sample, 7) == expected
        assert split.chunk_spans(sample, 7) == split.index.chunk_spans(expected)
    assert sorted(split.sequence_of(sample, 7) for sample in range(number)) == list(range(number))
    epochs = [split.samples_in_whole_epochs(samples) / number for samples in (1, number, number + 1, 3 * number)]
    assert epochs == [1, 1, 2, 3]


def test_a_split_without_tokens_has_no_samples_and_is_refused_in_a_blend(dataset):
    split = PackedSplit.open(dataset, 8, (0.1, 0.2), "valid")  # the empty document
    assert len(split) == 0 and split.samples_in_whole_epochs(5) == 0
    with pytest.raises(OptionError, match="the valid split, documents 1 to 2 of 10, has no tokens; take it out of"):
        split.refuse_in_blend()
