"""BalancedDataset over megatron-core's builder, its blends and torch's loaders: one global order, whoever reads it."""

import hashlib
import pickle
from collections import Counter

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core.datasets.gpt_dataset")

from helpers.datasets import documents_of, write
from helpers.megatron_helpers import build, config
from trainer.data import GlobalOrderSampler

from megatron_bfp import BalancedDataset

LENGTHS = [5, 0, 12, 3, 16, 2, 2, 9, 7, 1, 20, 8] * 6
BATCH = 64


def digest(sample):
    return hashlib.sha256(b"".join(np.asarray(sample[name]).tobytes() for name in sorted(sample))).hexdigest()


@pytest.fixture(scope="module")
def blend(tmp_path_factory):
    """Three corpora, for some four epochs each."""
    folder = tmp_path_factory.mktemp("blend")
    prefixes = [write(folder / f"corpus{i}", documents_of(LENGTHS[i:])).prefix for i in range(3)]
    return build([640, 0, 0], config((prefixes, [2.0, 1.0, 1.0])))[0]


@pytest.fixture(scope="module")
def samples(blend):
    """The digest of each sample, in the order without balancing."""
    return [digest(blend[i]) for i in range(640)]


def work_of(sample):
    """From the sample itself: padding, the last segment of a row with fewer targets, is no chunk."""
    ends = np.unique(sample["cu_seqlens"].numpy())
    chunks = np.diff(ends)
    is_padding = not sample["tokens"][ends[-2] :].any()
    return int((chunks[:-1] ** 2).sum() if is_padding else (chunks**2).sum())


def test_a_batch_holds_the_same_samples_by_their_work(blend, samples):
    balanced = BalancedDataset(blend, BATCH)
    assert len(balanced) == len(blend) >= 640
    read = [balanced[i] for i in range(640)]
    digests = list(map(digest, read))
    for first in range(0, 640, BATCH):
        assert Counter(digests[first : first + BATCH]) == Counter(samples[first : first + BATCH])
    assert digests != samples
    assert [balanced.work(i) for i in range(640)] == list(map(work_of, read))


def test_each_epoch_of_a_corpus_shows_each_sequence_once(tmp_path):
    dataset = build([500, 0, 0], config(([write(tmp_path / "data", documents_of(LENGTHS[7:])).prefix], None)))[0]
    balanced, per_epoch = BalancedDataset(dataset, BATCH), dataset.samples_per_epoch
    assert per_epoch % BATCH and len(dataset) % per_epoch == 0
    sequences = [dataset.sequence_of(balanced.sample_of(i)) for i in range(len(dataset))]
    for first in range(0, len(dataset), per_epoch):
        assert sorted(sequences[first : first + per_epoch]) == list(range(per_epoch))


def global_order(dataset, ranks, micro_batch_size, consumed=0, **loader):
    """The digests of all samples in the order in which all ranks together read them: micro-step by micro-step."""
    readers = []
    for rank in range(ranks):
        sampler = GlobalOrderSampler(consumed, 640, micro_batch_size, BATCH, rank, ranks)
        readers.append(torch.utils.data.DataLoader(dataset, batch_sampler=sampler, collate_fn=list, **loader))
    return [digest(sample) for of_ranks in zip(*readers, strict=True) for batch in of_ranks for sample in batch]


@pytest.fixture(scope="module")
def balanced_order(blend):
    balanced = BalancedDataset(blend, BATCH)
    return [digest(balanced[i]) for i in range(640)]


@pytest.mark.parametrize("ranks, micro_batch_size", [(1, 1), (1, 64), (2, 4), (8, 2), (64, 1)])
def test_one_global_order_for_every_number_of_ranks(blend, balanced_order, ranks, micro_batch_size):
    assert global_order(BalancedDataset(blend, BATCH), ranks, micro_batch_size) == balanced_order


@pytest.mark.parametrize("consumed", [64, 320, 576])
def test_a_run_resumes_after_any_batch(blend, balanced_order, consumed):
    assert global_order(BalancedDataset(blend, BATCH), 2, 8, consumed) == balanced_order[consumed:]
    assert [digest(BalancedDataset(blend, BATCH)[i]) for i in (consumed + 7, consumed)] == [
        balanced_order[consumed + 7],
        balanced_order[consumed],
    ]


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_loader_workers_read_the_same_order(blend, balanced_order, start):
    loader = {"num_workers": 4, "multiprocessing_context": start}
    assert global_order(BalancedDataset(blend, BATCH), 1, 32, **loader) == balanced_order


def test_a_pickled_dataset_has_the_same_order(blend, balanced_order):
    balanced = BalancedDataset(blend, BATCH)
    balanced[5]
    again = pickle.loads(pickle.dumps(balanced))
    assert [digest(again[i]) for i in range(640)] == balanced_order


def test_several_batches_need_the_tile_and_hold_the_same_samples_together(blend, samples):
    balanced = BalancedDataset(blend, BATCH, num_batches=5, tile=16)
    digests = [digest(balanced[i]) for i in range(640)]
    for first in (0, 320):
        assert Counter(digests[first : first + 320]) == Counter(samples[first : first + 320])
    assert Counter(digests[:BATCH]) != Counter(samples[:BATCH])  # the control: composed by work
