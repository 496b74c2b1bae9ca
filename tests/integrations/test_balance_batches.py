"""``--balance-batches``: which batches a run of Megatron gets, also while they grow and after a resume."""

import argparse
import random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_bfp import OptionError
from megatron_bfp.errors import UnsupportedMegatronError
from megatron_bfp.integrations import balance
from megatron_bfp.integrations.balance import Batches
from megatron_bfp.samples.balanced_dataset import BalancedDataset


class Packed:
    """A packed dataset whose samples are their numbers."""

    def __init__(self, length, samples_per_epoch=None, seed=0):
        self.works = np.random.default_rng(seed).integers(1, 1000, length)
        self.samples_per_epoch = samples_per_epoch or length

    def __len__(self):
        return len(self.works)

    def __getitem__(self, sample):
        return sample

    def work_of(self, samples):
        return self.works[samples]


class Schedule:
    """A calculator as Megatron's: the batch size goes up when so many samples are consumed."""

    def __init__(self, tile, *steps):
        self.tile, self.steps, self.micro_batches = tile, steps, None
        self.update(0, False)

    def update(self, consumed, consistency_check):
        size = [size for threshold, size in self.steps if threshold <= consumed][-1]
        assert not consistency_check or size % self.tile == 0
        self.micro_batches = size // self.tile

    def get(self):
        return self.micro_batches


def options(**changes):
    known = {"data_impl": "bfp", "balance_batches": 1, "consumed_train_samples": 0, "global_batch_size": 8}
    return argparse.Namespace(**known | {"micro_batch_size": 2, "data_parallel_size": 1} | changes)


def balanced(dataset, calculator=None, **changes):
    return balance.balanced(
        dataset,
        options(**changes),
        SimpleNamespace(_GLOBAL_NUM_MICROBATCHES_CALCULATOR=calculator, __name__="megatron"),
    )


def steps_of_training(calculator, tile, first, end):
    """The samples of each global batch as Megatron's loop takes them."""
    consumed, steps = first, []
    while True:
        calculator.update(consumed, False)
        size = tile * calculator.get()
        if consumed + size > end:
            return steps
        steps.append(range(consumed, consumed + size))
        consumed += size


def same_samples(dataset, step):
    return sorted(dataset[sample] for sample in step) == list(step)


growth = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 3)), max_size=4)


@given(
    tile=st.integers(1, 4),
    start=st.integers(1, 4),
    growth=growth,
    first=st.integers(0, 50),
    epoch=st.integers(5, 200),
    num_samples=st.integers(1, 150),
)
def test_every_global_batch_keeps_its_samples_while_it_grows(tile, start, growth, first, epoch, num_samples):
    thresholds, sizes = np.cumsum([threshold for threshold, _ in growth]), np.cumsum([start, *[g for _, g in growth]])
    steps = [(0, tile * start), *((int(at), tile * int(size)) for at, size in zip(thresholds, sizes[1:]))]
    dataset = Packed(first + num_samples, epoch)
    calculator = Schedule(tile, *steps)
    before = vars(calculator).copy()
    wrapped = balanced(dataset, calculator, micro_batch_size=1, data_parallel_size=tile, consumed_train_samples=first)
    assert vars(calculator) == before  # a copy was asked
    for step in steps_of_training(calculator, tile, first, len(dataset)):
        assert same_samples(wrapped, step)
    assert sorted(wrapped) == list(range(len(dataset)))


def test_blocks_of_one_size_do_not_keep_the_samples_of_growing_batches():
    """The control of the test above."""
    dataset = Packed(96)
    calculator = Schedule(2, (0, 4), (20, 8), (44, 12))
    steps = steps_of_training(calculator, 2, 0, 96)
    assert [len(step) for step in steps] == [4] * 5 + [8] * 3 + [12] * 4
    assert all(same_samples(balanced(dataset, calculator), step) for step in steps)
    for size in (8, 12):
        assert not all(same_samples(BalancedDataset(dataset, size), step) for step in steps)
    assert balance.order_in_words(balanced(dataset, calculator)) == ", balanced inside each global batch of 4 to 12"


def test_batches_begin_where_the_run_begins():
    """In a resume with another batch size, and in Megatron-LM's phases of training."""
    dataset = Packed(100)
    resumed = balanced(dataset, Schedule(2, (0, 16)), global_batch_size=16, consumed_train_samples=24)
    assert resumed.stages == [(24, 16)]
    phases = {"phase_transition_iterations": [3, 7], "iteration": 5, "global_batch_size": 8}
    in_phase = balanced(dataset, Schedule(2, (0, 4), (40, 8)), consumed_train_samples=40, **phases)
    assert in_phase.stages == [(16, 8)]
    fresh = balanced(dataset, Schedule(2, (0, 4), (10, 8)))
    assert fresh.stages == [(0, 4), (12, 8)]  # a batch that has begun is finished


def test_a_batch_below_what_ranks_take_at_once_is_refused():
    with pytest.raises(OptionError, match="the global batch at sample 0 is smaller than 8, the data-parallel size"):
        balanced(Packed(50), Schedule(8, (0, 4), (16, 8)), data_parallel_size=4)
    assert balanced(Packed(50), Schedule(8, (0, 4), (16, 8)), data_parallel_size=4, consumed_train_samples=16)


def test_0_is_the_order_without_it_and_ranks_without_a_dataset_have_none():
    dataset = Packed(50)
    assert balanced(dataset, balance_batches=0) is dataset
    assert balanced(None) is None
    assert balance.order_in_words(dataset) == "" and not balance.is_composed_by_cost(dataset)
    with pytest.raises(UnsupportedMegatronError, match="megatron has no calculator .* give --balance-batches 0"):
        balanced(dataset)


def test_several_batches_are_balanced_in_blocks_that_are_counted_from_sample_0():
    dataset = Packed(100)
    wrapped = balanced(dataset, balance_batches=3, consumed_train_samples=40)
    assert (wrapped.stages, wrapped.num_batches) == ([(0, 8)], 3)
    assert balance.order_in_words(wrapped) == ", balanced over every 3 global batches of 8"
    assert balance.is_composed_by_cost(wrapped) and "composed by cost" in balance.COMPOSED_BY_COST
    assert same_samples(wrapped, range(24)) and not same_samples(wrapped, range(8))
    decreased = balanced(dataset, balance_batches=3, global_batch_size=20, data_parallel_size=3)
    assert decreased.stages == [(0, 18)]
    with pytest.raises(OptionError, match="begins at sample 42, which is no multiple of its global batch size, 8"):
        balanced(dataset, balance_batches=3, consumed_train_samples=42)


@pytest.mark.parametrize("value", [-1, 1.5, "2", None, True])
def test_what_is_no_number_of_batches_is_refused(value):
    with pytest.raises(OptionError, match=r"--balance-batches must be 0 \(off\), 1 .* got "):
        balance.check_balance_batches(options(balance_batches=value))
    for number in (0, 1, 64):
        balance.check_balance_batches(options(balance_batches=number))


@pytest.mark.parametrize(
    "attribute, value",
    [
        ("rampup_batch_size", ["4", "4", "16"]),
        ("step_batch_size_schedule", "0:4 16:8"),
        ("phase_transition_iterations", [3]),
    ],
)
def test_batches_of_changing_size_are_refused_for_blocks_of_several(attribute, value):
    option = f"--{attribute.replace('_', '-')}"
    with pytest.raises(OptionError, match=f"{option} cannot be used with --balance-batches 2: .* --balance-batches 1"):
        balance.check_balance_batches(options(balance_batches=2, **{attribute: value}))
    balance.check_balance_batches(options(**{attribute: value}))
    balance.check_balance_batches(options(balance_batches=2, **{attribute: None}))


def wrapped_by(batches, dataset, consumed=0):
    """The training split of a run."""
    changes = {"micro_batch_size": batches.micro_batch_size, "global_batch_size": batches.global_batch_size}
    changes |= {"data_parallel_size": batches.data_parallel_size}
    changes |= {"balance_batches": batches.num_batches, "consumed_train_samples": consumed}
    return balanced(dataset, Schedule(batches.tile, (0, batches.global_batch_size)), **changes)


def seen_before_and_after(before, now, consumed, dataset):
    """The samples that the run of a checkpoint saw, and those that a resumed run goes on to see."""
    first = wrapped_by(before, dataset)
    second = wrapped_by(now, dataset, consumed)
    return [first[i] for i in range(consumed)] + [second[i] for i in range(consumed, len(dataset))]


batches = st.builds(
    lambda num_batches, micro_steps, size, ranks: Batches(num_batches, micro_steps * size * ranks, size, ranks),
    st.integers(0, 4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
)


@given(before=batches, now=batches, steps=st.integers(0, 30), epoch=st.integers(20, 300))
def test_a_resume_that_is_not_refused_loses_no_sample_and_shows_none_twice(before, now, steps, epoch):
    consumed = min(steps, 300 // before.global_batch_size) * before.global_batch_size
    try:
        balance.check_resume(before, now, consumed)
    except OptionError as refused:
        assert max(before.num_batches, now.num_batches) > 1 and before != now
        assert str(before) in str(refused) and str(now) in str(refused)
        return
    dataset = Packed(300, epoch)
    assert sorted(seen_before_and_after(before, now, consumed, dataset)) == list(range(300))


@pytest.mark.parametrize(
    "before, now, consumed, multiple",
    [
        (Batches(4, 8, 1, 2), Batches(4, 8, 1, 4), 40, 32),
        (Batches(4, 8, 1, 4), Batches(4, 8, 4, 1), 40, 32),  # the same number of samples at once
        (Batches(4, 8, 1, 2), Batches(4, 16, 1, 2), 48, 64),
        (Batches(4, 8, 1, 2), Batches(2, 8, 1, 2), 40, 32),
        (Batches(3, 8, 1, 2), Batches(2, 8, 1, 2), 24, 48),
        (Batches(4, 8, 1, 2), Batches(1, 8, 1, 2), 40, 32),
        (Batches(0, 8, 1, 2), Batches(4, 8, 1, 2), 40, 32),
    ],
)
def test_a_change_inside_a_block_is_refused_and_would_lose_samples(before, now, consumed, multiple):
    with pytest.raises(OptionError) as refused:
        balance.check_resume(before, now, consumed)
    assert f"this run has {now}; its checkpoint has {before}" in str(refused.value)
    assert f"from a checkpoint at a multiple of {multiple} samples" in str(refused.value)
    balance.check_resume(before, now, multiple)
    balance.check_resume(before, before, consumed)
    dataset = Packed(96)
    assert len(set(seen_before_and_after(before, now, consumed, dataset))) < 96
    assert len(set(seen_before_and_after(before, before, consumed, dataset))) == 96


def resume(checkpoint, **changes):
    """Megatron's check of a checkpoint's options, with ours."""
    calls = []

    def check_checkpoint_args(checkpoint_args, skip_args=None):
        calls.append((checkpoint_args, skip_args))

    balance.refuse_other_batches(check_checkpoint_args, lambda: options(**changes))(
        checkpoint, skip_args={"num_layers"}
    )
    assert calls == [(checkpoint, {"num_layers"})]


def test_a_checkpoints_options_are_compared_with_the_runs():
    dealt = options(balance_batches=4, consumed_train_samples=40)
    resume(dealt, balance_batches=4)
    of_one_sample_at_once = {"data_parallel_size": 2, "micro_batch_size": 1}
    for changes in (
        {"data_parallel_size": 2},
        of_one_sample_at_once,
        {"global_batch_size": 16},
        {"balance_batches": 1},
    ):
        with pytest.raises(OptionError, match="Sample 40 is inside a block of batches that are balanced together"):
            resume(dealt, **{"balance_batches": 4} | changes)
    with pytest.raises(OptionError, match="Sample 40 is inside"):
        resume(dealt, balance_batches=4, gtp_weight_remat_size=2)
    resume(
        options(consumed_train_samples=40, global_batch_size=4), data_parallel_size=4
    )  # blocks of one batch are free
    resume(dealt, balance_batches=1, override_ckpt_iteration=8)
    with pytest.raises(OptionError, match="Sample 24 is inside"):
        resume(dealt, balance_batches=1, override_ckpt_iteration=3)
    balance.refuse_other_batches(lambda checkpoint_args: None, lambda: None)(dealt)  # none of our runs


@pytest.mark.parametrize("of_before", [{"data_impl": "mmap"}, {}], ids=["other samples", "before the option"])
def test_a_checkpoint_without_the_option_has_batches_in_the_seeded_order(of_before):
    stated = {"micro_batch_size": 2, "data_parallel_size": 1, "global_batch_size": 8, "consumed_train_samples": 40}
    checkpoint = argparse.Namespace(**stated | of_before)
    resume(checkpoint)
    with pytest.raises(OptionError, match="its checkpoint has --balance-batches 0,"):
        resume(checkpoint, balance_batches=4)
    checkpoint.consumed_train_samples = 64
    resume(checkpoint, balance_batches=4)
    resume(argparse.Namespace())  # a converted checkpoint


@given(num_batches=st.integers(2, 5), steps=st.integers(1, 20), more=st.integers(0, 20), surplus=st.integers(0, 3))
def test_a_run_that_is_extended_later_continues_its_last_block(num_batches, steps, more, surplus):
    """Blends are as long as they were asked to be, or a little longer."""
    args = options(balance_batches=num_batches)
    before, now = (balance.whole_blocks(args, 8 * number) for number in (steps, steps + more))
    assert 8 * steps <= before < 8 * (steps + num_batches)
    works = Packed(now + surplus).works
    first, second = Packed(before + surplus), Packed(now + surplus)
    first.works = works[: before + surplus]
    sizes = 8, num_batches, 2
    first, second = BalancedDataset(first, *sizes), BalancedDataset(second, *sizes)
    assert [first[i] for i in range(8 * steps)] == [second[i] for i in range(8 * steps)]


def test_an_end_inside_a_block_would_not_continue():
    """The control of the test above."""
    cut, whole = Packed(40), Packed(96)
    cut.works = whole.works[:40]
    cut, whole = BalancedDataset(cut, 8, 4, 2), BalancedDataset(whole, 8, 4, 2)
    assert [cut[i] for i in range(40)] != [whole[i] for i in range(40)]
    assert balance.whole_blocks(options(), 40) == balance.whole_blocks(options(balance_batches=0), 40) == 40


def test_a_blend_that_opens_its_index_late_is_balanced():
    """megatron-core's with ``defer_npy_index_mmap``: it has no index until a sample is read."""

    class Blend:
        datasets = [Packed(20, seed=1), Packed(20, seed=2)]
        dataset_index = dataset_sample_index = None

        def __len__(self):
            return 40

        def __getitem__(self, sample):
            if self.dataset_index is None:
                order = random.Random(3).sample(range(40), 40)
                self.dataset_index, self.dataset_sample_index = np.divmod(np.array(order), 20)
            return int(self.dataset_index[sample] * 20 + self.dataset_sample_index[sample])

    wrapped = balanced(Blend(), Schedule(2, (0, 8)))
    in_order = Blend()
    for start in range(0, 40, 8):
        step = range(start, start + 8)
        assert sorted(wrapped[sample] for sample in step) == sorted(in_order[sample] for sample in step)
    assert list(wrapped) != list(in_order)
