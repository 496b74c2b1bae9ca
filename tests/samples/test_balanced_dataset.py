"""BalancedDataset over stand-ins that know the work of their samples: blocks, epochs, stages, blends, resumption."""

import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bfp import BalancedDataset, OptionError


class Samples:
    """Samples that are their own numbers, epoch after epoch."""

    def __init__(self, num_samples, samples_per_epoch, salt=0):
        self.num_samples, self.samples_per_epoch, self.salt = num_samples, samples_per_epoch, salt

    def __len__(self):
        return self.num_samples

    def __getitem__(self, idx):
        return "padding" if idx is None else (self.salt, int(idx))

    def work_of(self, samples):
        return (samples * 7919 + self.salt) % 1009


class Blend:
    """As megatron-core's BlendedDataset."""

    def __init__(self, datasets, num_samples):
        self.datasets = datasets
        self.dataset_index = np.arange(num_samples, dtype=np.int16) * 5 % len(datasets)
        self.dataset_sample_index = np.array(
            [int((self.dataset_index[:sample] == corpus).sum()) for sample, corpus in enumerate(self.dataset_index)]
        )

    def __len__(self):
        return len(self.dataset_index)

    def __getitem__(self, idx):
        return self.datasets[self.dataset_index[idx]][self.dataset_sample_index[idx]]


SIZES = st.tuples(st.integers(1, 40), st.integers(1, 90), st.integers(0, 40))


def global_batches(samples, size, first=0):
    return [Counter(samples[start : start + size]) for start in range(first, len(samples), size)]


@settings(max_examples=300, deadline=None)
@given(SIZES, st.integers(1, 5))
def test_every_global_batch_holds_the_same_samples_and_every_epoch_each_once(sizes, micro_batch_size):
    size, per_epoch, more = sizes
    dataset = Samples(2 * per_epoch + more, per_epoch)
    balanced = BalancedDataset(dataset, size, micro_batch_size=micro_batch_size)
    before, after = [dataset[i] for i in range(len(dataset))], [balanced[i] for i in range(len(balanced))]
    assert global_batches(after, size) == global_batches(before, size)
    for epoch in range(0, len(dataset), per_epoch):
        assert sorted(after[epoch : epoch + per_epoch]) == before[epoch : epoch + per_epoch]
    assert len(balanced) == len(dataset) and balanced[None] == "padding"


def test_the_order_is_another_one_and_follows_the_work():
    dataset = Samples(64, 64)
    balanced = BalancedDataset(dataset, 16)
    assert [balanced[i] for i in range(64)] != [dataset[i] for i in range(64)]
    assert [balanced.work(i) for i in range(16)] == dataset.work_of(
        np.array([balanced[i][1] for i in range(16)])
    ).tolist()
    tiles = np.array([balanced.work(i) for i in range(16)]).reshape(4, 4)
    ranges = sorted(zip(tiles.min(axis=1), tiles.max(axis=1)))
    assert all(before[1] <= after[0] for before, after in zip(ranges, ranges[1:]))


@settings(max_examples=200, deadline=None)
@given(SIZES, st.integers(1, 5), st.integers(1, 6), st.randoms())
def test_any_sample_may_be_asked_first(sizes, num_batches, tile, random):
    size, per_epoch, more = sizes
    dataset = Samples(2 * per_epoch + more, per_epoch)

    def make():
        return BalancedDataset(dataset, size * tile, num_batches, tile)

    in_order = [make()[i] for i in range(len(dataset))]
    assert Counter(in_order) == Counter(dataset[i] for i in range(len(dataset)))
    shuffled = list(range(len(dataset)))
    random.shuffle(shuffled)
    balanced = make()
    assert {i: balanced[i] for i in shuffled} == dict(enumerate(in_order))
    again = pickle.loads(pickle.dumps(balanced))
    assert [again[i] for i in range(len(dataset))] == in_order


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 5), st.integers(1, 60), st.integers(0, 9))
def test_several_batches_together_hold_the_same_samples(tile, micro_steps, num_batches, per_epoch, more):
    size = tile * micro_steps
    dataset = Samples(3 * per_epoch + more, per_epoch)
    balanced = BalancedDataset(dataset, size, num_batches, tile)
    before, after = [dataset[i] for i in range(len(dataset))], [balanced[i] for i in range(len(dataset))]
    assert global_batches(after, size * num_batches) == global_batches(before, size * num_batches)
    for epoch in range(0, len(dataset), per_epoch):
        assert sorted(after[epoch : epoch + per_epoch]) == before[epoch : epoch + per_epoch]


def test_several_batches_are_composed_by_work():
    dataset = Samples(64, 64)
    before, after = [dataset[i] for i in range(64)], [BalancedDataset(dataset, 8, 4, 8)[i] for i in range(64)]
    assert global_batches(after, 8) != global_batches(before, 8)
    works = dataset.work_of(np.array([number for _, number in after])).reshape(2, 4, 8)
    for block in works:  # each step's samples are neighbours in the sorted order of the block
        ranges = sorted(zip(block.min(axis=1), block.max(axis=1)))
        assert all(before[1] <= after[0] for before, after in zip(ranges, ranges[1:]))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=4), st.integers(0, 20))
def test_stages_have_batches_of_their_own_size(stages, first):
    pairs, starts, begin = [], [], first
    for size, steps in stages:
        pairs.append((begin, size))
        starts += range(begin, begin + size * steps, size)
        begin += size * steps
    dataset = Samples(begin, 37)
    balanced = BalancedDataset(dataset, pairs)
    before, after = [dataset[i] for i in range(begin)], [balanced[i] for i in range(begin)]
    assert after[:first] == before[:first]  # of an earlier run, whose batches nobody knows here
    for start, end in zip(starts, [*starts[1:], begin]):
        assert Counter(after[start:end]) == Counter(before[start:end])


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 12), st.integers(1, 70))
def test_a_run_that_goes_on_with_another_batch_size_loses_no_sample_and_shows_none_twice(size, consumed):
    dataset = Samples(150, 61)
    consumed = consumed // size * size
    before = [BalancedDataset(dataset, size)[i] for i in range(consumed)]
    after = [BalancedDataset(dataset, [(consumed, 16)])[i] for i in range(consumed, 150)]
    assert Counter(before + after) == Counter(dataset[i] for i in range(150))


def test_control_a_grid_that_begins_elsewhere_loses_samples():
    dataset = Samples(150, 150)
    shown = [BalancedDataset(dataset, 12)[i] for i in range(36)] + [
        BalancedDataset(dataset, 16)[i] for i in range(36, 150)
    ]
    assert Counter(shown) != Counter(dataset[i] for i in range(150))


@pytest.mark.parametrize("num_corpora", [1, 3])
def test_a_blend_is_balanced_over_all_its_corpora(num_corpora):
    blend = Blend([Samples(80, 11, salt) for salt in range(num_corpora)], 80)
    balanced = BalancedDataset(blend, 16)
    before, after = [blend[i] for i in range(80)], [balanced[i] for i in range(80)]
    assert after != before and global_batches(after, 16) == global_batches(before, 16)
    works = [balanced.work(i) for i in range(80)]
    assert works == [(number * 7919 + salt) % 1009 for salt, number in after]
    tiles = np.array(works[:16]).reshape(2, 8)
    assert tiles[0].max() <= tiles[1].min()


def test_other_attributes_are_the_dataset_s():
    balanced = BalancedDataset(Samples(8, 8, salt=3), 4)
    assert balanced.salt == 3 and not hasattr(balanced, "__getitems__")
    with pytest.raises(AttributeError):
        balanced.nothing


@pytest.mark.parametrize("idx", [-1, 8])
def test_a_sample_that_is_not_there_is_an_index_error(idx):
    balanced = BalancedDataset(Samples(8, 8), 4)
    for ask in (balanced.__getitem__, balanced.work, balanced.sample_of):
        with pytest.raises(IndexError, match=r"\[0, 8\)"):
            ask(idx)


@pytest.mark.parametrize(
    "arguments, reason",
    [
        ((0,), "global_batch_size"),
        ((8, 0), "num_batches"),
        ((8, 2), "needs tile"),
        ((8, 2, 3), "not a multiple of 3"),
        ((8, 2, 4, 3), "tile 4 is not a multiple of 3"),
        ((8, 1, None, 0), "micro_batch_size"),
        (([],), "ascending"),
        (([(4, 2), (4, 3)],), "ascending"),
        (([(-1, 2)],), "ascending"),
        (([(0, 0)],), "global_batch_size"),
    ],
)
def test_bad_arguments_are_named(arguments, reason):
    with pytest.raises(OptionError, match=reason):
        BalancedDataset(Samples(8, 8), *arguments)


def test_a_dataset_without_work_is_refused_by_name():
    with pytest.raises(OptionError, match="list"):
        BalancedDataset([1, 2, 3], 2)[0]


def test_few_orders_are_kept():
    balanced = BalancedDataset(Samples(10_000, 10_000), 10)
    for i in range(0, 10_000, 10):
        balanced[i]
    assert len(balanced._blocks) <= 4
