"""The simulated ranks: real works in the order of a run, and what the slowest rank costs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bfp import pack
from megatron_bfp.inspection.report import plan_sequences
from megatron_bfp.inspection.waiting import (
    ATTENTION_COEFFICIENT,
    BALANCED_TOGETHER,
    STEPS,
    Ranks,
    TimeLost,
    WorkOfPlan,
    costs_by_order,
    time_lost,
    time_lost_in_pipelines,
    waiting_of_plan,
)
from megatron_bfp.samples.balanced_dataset import BalancedDataset

SEQ_LENGTH, HIDDEN_SIZE, SEED = 512, 64, 3


def packing(num_documents=4000, even=False):
    lengths = np.ceil(np.random.default_rng(1).lognormal(4, 1.2, num_documents)).astype(np.int64)
    packed = pack(lengths, SEQ_LENGTH, even=even)
    planned = plan_sequences(packed.census, SEQ_LENGTH, even=even)
    return packed, WorkOfPlan(planned.counts, planned.work)


def test_time_lost_is_that_of_the_slowest_over_the_mean():
    costs = np.array([[[1.0, 3.0], [5.0, 1.0]], [[2.0, 2.0], [2.0, 2.0]]])  # two steps, two micro-steps, two ranks
    assert time_lost(costs) == TimeLost((6 + 4) / (5 + 4) - 1, (3 + 5 + 2 + 2) / (2 + 3 + 2 + 2) - 1)
    assert time_lost(np.ones((3, 2, 4))) == TimeLost(0, 0)


def flow_shop(times, num_stages):
    """When a pipeline of equal stages is done, stage by stage and micro-batch by micro-batch."""
    done = [0.0] * num_stages
    for time in times:
        before = 0.0
        for stage in range(num_stages):
            before = done[stage] = max(done[stage], before) + time
    return done[-1]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.integers(0, 99))
def test_pipelines_are_flow_shops(micro_batches, ranks, num_stages, seed):
    costs = np.random.default_rng(seed).uniform(1, 3, (2, micro_batches, ranks))
    slowest = sum(max(flow_shop(step[:, rank], num_stages) for rank in range(ranks)) for step in costs)
    even = sum(flow_shop(np.full(micro_batches, step.mean()), num_stages) for step in costs)
    assert time_lost_in_pipelines(costs, num_stages) == pytest.approx(slowest / even - 1)
    if num_stages == 1:
        assert time_lost_in_pipelines(costs, 1) == pytest.approx(
            sum(step.sum(axis=0).max() for step in costs) / sum(step.sum(axis=0).mean() for step in costs) - 1
        )


@pytest.mark.parametrize("even", [False, True])
def test_samples_have_the_works_of_the_plan_epoch_after_epoch(even):
    packed, plan = packing(even=even)
    num_sequences = len(packed)
    work = plan.of_samples(3 * num_sequences, SEED)
    for epoch in range(3):
        of_epoch = work[epoch * num_sequences : (epoch + 1) * num_sequences]
        assert sorted(of_epoch) == sorted(packed.work) and of_epoch.tolist() != packed.work.tolist()
    assert work[:num_sequences].tolist() != work[num_sequences : 2 * num_sequences].tolist()


class Samples:
    """A dataset that knows the work of its samples: what ``BalancedDataset`` needs."""

    def __init__(self, work):
        self._work, self.samples_per_epoch = work, len(work)

    def __len__(self):
        return len(self._work)

    def work_of(self, samples):
        return self._work[samples]


@pytest.mark.parametrize("ranks", [Ranks(4, 2), Ranks(3, 1), Ranks(2, 3)])
def test_orders_are_those_that_a_run_has(ranks):
    plan = packing()[1]
    num_samples = STEPS * ranks.global_batch_size
    work = plan.of_samples(num_samples, SEED)
    seen = []
    for num_batches, costs in costs_by_order(plan, SEQ_LENGTH, HIDDEN_SIZE, ranks, SEED):
        order = np.arange(num_samples)
        if num_batches:
            tile = ranks.data_parallel_size
            balanced = BalancedDataset(Samples(work), ranks.global_batch_size, num_batches, tile)
            order = np.array([balanced.sample_of(sample) for sample in range(num_samples)])
        expected = 1 + ATTENTION_COEFFICIENT * work[order] / (SEQ_LENGTH * HIDDEN_SIZE)
        assert costs.ravel().tolist() == expected.tolist()
        assert costs.shape == (STEPS, ranks.micro_batches, ranks.data_parallel_size)
        seen.append(num_batches)
        if num_batches <= 1:  # each step has the sequences that it has in random order
            steps = np.sort(expected.reshape(STEPS, -1))
            random = np.sort((1 + ATTENTION_COEFFICIENT * work / (SEQ_LENGTH * HIDDEN_SIZE)).reshape(STEPS, -1))
            assert steps.tolist() == random.tolist()
    assert seen == [0, 1, BALANCED_TOGETHER]


def test_balancing_loses_less_time_and_one_rank_none():
    lost = waiting_of_plan(packing()[1], SEQ_LENGTH, HIDDEN_SIZE, Ranks(8, 4), SEED)
    for meeting in ("once_per_step", "every_micro_step"):
        times = [getattr(order, meeting) for order in (lost.random, lost.balanced, lost.over_batches)]
        assert times[0] > 1.5 * times[1] > 1.5 * times[2] > 0
    assert lost.random.every_micro_step > lost.random.once_per_step
    alone = waiting_of_plan(packing()[1], SEQ_LENGTH, HIDDEN_SIZE, Ranks(1, 4), SEED)
    assert {*vars(alone).values()} == {TimeLost(0, 0)}


def test_a_corpus_smaller_than_a_batch_is_repeated():
    packed, plan = packing(40)
    assert len(packed) < 64
    lost = waiting_of_plan(plan, SEQ_LENGTH, HIDDEN_SIZE, Ranks(16, 4), SEED)
    assert 0 < lost.balanced.every_micro_step < lost.random.every_micro_step
