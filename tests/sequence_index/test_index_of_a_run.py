"""Which sequence index a run means: one answer, whoever asks."""

import numpy as np
import pytest

from megatron_bfp.errors import OptionError, SequenceIndexError
from megatron_bfp.indexed_dataset.reader import IndexedDataset
from megatron_bfp.indexed_dataset.writer import IndexedDatasetWriter
from megatron_bfp.sequence_index.builder import build, open_existing, open_or_build, open_or_refuse
from megatron_bfp.sequence_index.key import (
    SPLIT_NAMES,
    IndexKey,
    cached_index_directory,
    index_directory,
    split_fractions,
    split_range,
)


@pytest.fixture
def dataset(tmp_path):
    lengths = np.arange(1, 101)
    with IndexedDatasetWriter(str(tmp_path / "data"), np.uint16) as writer:
        writer.add(np.arange(lengths.sum()), lengths)
        writer.finalize()
    return IndexedDataset(str(tmp_path / "data"))


def test_fault_A15_an_index_follows_from_split_length_and_cap():
    named = [IndexKey.for_split(1000, 2048, "969,30,1", name, 8).name for name in SPLIT_NAMES]
    assert named == ["s2048-d0-969-m8", "s2048-d969-999-m8", "s2048-d999-1000-m8"]
    assert IndexKey.for_split(1000, 64, "969,30,1") == IndexKey(64, 0, 969)  # train, without a cap
    assert IndexKey.for_split(1000, 64, None, "valid") == IndexKey(64, 0, 1000)  # a dataset for one split alone


def test_fault_A15_a_split_without_a_share_has_no_index():
    assert IndexKey.for_split(1000, 64, "1,0,0", "valid") is None
    assert IndexKey.for_fractions(1000, 64, None) is None
    assert split_range(1000, "0,0,1") is None


def test_fault_A15_splits_are_those_of_megatron_cores_fractions():
    for split in ("969,30,1", "98,1,1", "0.7,0.2,0.1", "3,0,1"):
        for name, fractions in zip(SPLIT_NAMES, split_fractions(split)):
            by_name = IndexKey.for_split(777, 64, split, name, 5)
            assert by_name == IndexKey.for_fractions(777, 64, fractions, 5)


def test_an_unknown_split_is_refused():
    with pytest.raises(OptionError, match="'validation'.*train, valid, test"):
        IndexKey.for_split(10, 64, "1,1,1", "validation")
    with pytest.raises(OptionError, match="--split"):
        IndexKey.for_split(10, 64, "a,b", "train")


def test_fault_A15_the_index_is_looked_for_beside_the_data_and_in_the_cache(dataset, tmp_path):
    cache, key = str(tmp_path / "cache"), IndexKey.for_split(100, 64, "90,10,0", "train", 4)
    assert open_existing(dataset, key, cache) is None
    with pytest.raises(SequenceIndexError, match=r"s64-d0-90-m4.*--max-documents-per-sequence 4 --split 90,10,0"):
        open_or_refuse(dataset, key, cache, "90,10,0")
    cached = build(dataset, key, cached_index_directory(dataset, cache))
    assert open_or_refuse(dataset, key, cache).path == cached.path
    with pytest.raises(SequenceIndexError, match="no sequence index"):  # the control: the cache is not searched
        open_or_refuse(dataset, key)
    beside = build(dataset, key, index_directory(dataset.prefix))
    assert open_or_refuse(dataset, key, cache).path == beside.path == open_or_build(dataset, key, cache).path


def test_fault_A15_the_message_names_the_indexes_that_are_there(dataset):
    build(dataset, IndexKey(64, 0, 90), index_directory(dataset.prefix))
    with pytest.raises(SequenceIndexError, match="no sequence index s64-d0-90-m4, only s64-d0-90[.] Build it"):
        open_or_refuse(dataset, IndexKey(64, 0, 90, 4))


@pytest.mark.parametrize("first, end", [(3, 2), (-1, 2), (5, 0)])
def test_documents_that_are_no_range_have_no_index(first, end):
    assert IndexKey(8, 2, 2).name == "s8-d2-2"
    with pytest.raises(OptionError, match=f"documents {first} to {end} are not a range"):
        IndexKey(8, first, end)
