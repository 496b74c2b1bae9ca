"""BFPGPTDataset through megatron-core's builder: splits, blends, epochs, order, and the central invariant."""

import hashlib
import multiprocessing
import os
import pickle
import tempfile
from collections import Counter

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core.datasets.gpt_dataset")

from helpers.datasets import DATA, documents_of, write
from helpers.megatron_helpers import build, config
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer.data import GlobalOrderSampler

from megatron_bfp import BFPGPTDataset, OptionError, SequenceIndexError, pack

LENGTHS = [5, 0, 12, 3, 16, 2, 2, 9, 7, 1, 20, 8]


@pytest.fixture
def prefix(write_dataset):
    return write_dataset(documents_of(LENGTHS)).prefix


def digest(sample):
    return hashlib.sha256(b"".join(sample[name].numpy().tobytes() for name in sorted(sample))).hexdigest()


def counts(samples):
    """How often each token is an input and a target. Padding is 0 and no document holds it."""
    inputs, targets = Counter(), Counter()
    for sample in samples:
        inputs.update(sample["tokens"][sample["tokens"] > 0].tolist())
        targets.update(sample["labels"][sample["loss_mask"] > 0].tolist())
    return inputs, targets


def test_a_sample_has_megatron_s_fields(prefix):
    dataset = build([None] * 3, config(([prefix], None)))[0]
    sample = dataset[0]
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in sample.items()} == {
        "tokens": (torch.int64, (8,)),
        "labels": (torch.int64, (8,)),
        "loss_mask": (torch.float32, (8,)),
        "position_ids": (torch.int64, (8,)),
        "cu_seqlens": (torch.int32, (9,)),
        "max_seqlen": (torch.int32, ()),
    }
    for i in range(len(dataset)):
        assert dataset[i]["position_ids"].tolist() == list(range(8))


def test_one_epoch_is_every_sequence_once(prefix):
    dataset = build([None] * 3, config(([prefix], None)))[0]
    assert len(dataset) == len(pack(LENGTHS, 8))
    inputs, targets = counts(dataset[i] for i in range(len(dataset)))
    documents = documents_of(LENGTHS)
    assert inputs == Counter(token for document in documents for token in document)
    assert targets == Counter(token for document in documents for token in document[1:])


def test_three_epochs_give_each_sequence_three_times_in_another_order(prefix):
    num_sequences = len(pack(LENGTHS, 8))
    dataset = build([2 * num_sequences + 1, 0, 0], config(([prefix], None)))[0]
    assert len(dataset) == 3 * num_sequences
    order = [dataset.sequence_of(i) for i in range(len(dataset))]
    epochs = [tuple(order[e * num_sequences : (e + 1) * num_sequences]) for e in range(3)]
    assert all(sorted(epoch) == list(range(num_sequences)) for epoch in epochs)
    assert len(set(epochs)) == 3


@pytest.mark.case(28)
def test_the_order_depends_on_the_seed_alone(prefix):
    def order(**changes):
        sizes = changes.pop("sizes", [30, 0, 0])
        dataset = build(sizes, config(([prefix], None), **changes))[0]
        return [dataset.sequence_of(i) for i in range(30)]

    assert order() == order(sizes=[500, 0, 0]) == order(num_dataset_builder_threads=2)
    assert order() != order(random_seed=1)


@pytest.mark.case(30)
@pytest.mark.parametrize("index", [-1, 10**9])
def test_a_sample_that_is_not_there_is_an_index_error(prefix, index):
    dataset = build([None] * 3, config(([prefix], None)))[0]
    for wrong in (index, np.int64(index), len(dataset)):
        with pytest.raises(IndexError, match="not in"):
            dataset[wrong]
    with pytest.raises(TypeError):
        dataset[0.5]
    assert digest(dataset[np.int64(1)]) == digest(dataset[1])


def test_none_is_the_batch_padding_sample(prefix):
    dataset = build([None] * 3, config(([prefix], None)))[0]
    padding, first = dataset[None], dataset[0]
    assert not padding["loss_mask"].any()
    assert all(torch.equal(padding[name], first[name]) for name in first if name != "loss_mask")


@pytest.mark.case(21)
def test_two_reads_are_equal_and_a_change_to_one_stays_there(prefix):
    dataset = build([None] * 3, config(([prefix], None)))[0]
    first = dataset[3]
    expected = digest(first)
    for tensor in first.values():
        tensor.zero_()
    assert digest(dataset[3]) == expected


def test_the_dense_mask_comes_only_if_asked(prefix):
    assert "attention_mask" not in build([None] * 3, config(([prefix], None)))[0][0]
    dataset = build([None] * 3, config(([prefix], None), create_attention_mask=True))[0]
    assert dataset[0]["attention_mask"].shape == (1, 8, 8)


def test_eod_masking_and_restarting_positions(prefix):
    class EOD5:
        vocab_size, eod, unique_identifiers = 100, 5, {}

    plain = build([None] * 3, config(([prefix], None)))[0]
    masked = build([None] * 3, config(([prefix], None), eod_mask_loss=True, tokenizer=EOD5()))[0]
    for i in range(len(plain)):
        expected = plain[i]["loss_mask"] * (plain[i]["tokens"] != 5)
        assert torch.equal(masked[i]["loss_mask"], expected)
    restarting = build([None] * 3, config(([prefix], None), reset_position_ids=True))[0]
    for i in range(len(plain)):
        starts = plain[i]["cu_seqlens"][:-1].unique().tolist()
        positions = restarting[i]["position_ids"]
        assert all(positions[start] == 0 for start in starts if start < 8)


# Splits


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=40),
    split=st.sampled_from(["969,30,1", "1,1,1", "90,5,5", "1,0,1", "0,1,0", "7,3"]),
    seq_length=st.integers(1, 12),
)
def test_splits_share_out_the_documents_and_keep_the_invariant(lengths, split, seq_length, tmp_path_factory):
    documents = documents_of(lengths)
    prefix = write(tmp_path_factory.mktemp("split") / "data", documents).prefix
    datasets = build([None] * 3, config(([prefix], None), seq_length, split=split))
    inputs, targets = Counter(), Counter()
    for dataset in datasets:
        if dataset is not None:
            of_split = counts(dataset[i] for i in range(len(dataset)))
            assert not inputs & of_split[0]
            inputs, targets = inputs + of_split[0], targets + of_split[1]
    assert inputs == Counter(token for document in documents for token in document)
    assert targets == Counter(token for document in documents for token in document[1:])


def test_the_builder_s_array_of_all_documents_stays_small(prefix):
    datasets = build([None] * 3, config(([prefix], None), split="8,3,1"))
    assert all(len(dataset.indices) <= 1 for dataset in datasets)
    assert [dataset.sequence_index.key.name for dataset in datasets] == ["s8-d0-8", "s8-d8-11", "s8-d11-12"]


@pytest.mark.case(27)
def test_a_split_without_documents_is_empty_and_one_without_samples_builds_nothing(prefix, tmp_path):
    train, valid, test = build([10, 5, 0], config(([prefix], None), split="999999,1,1"))
    assert len(train) > 0 and len(valid) == 0 and len(test) == 0
    for empty in (valid, test):
        for index in (0, None):
            with pytest.raises(IndexError):
                empty[index]
    assert sorted(os.listdir(tmp_path / "data.bfp")) == ["s8-d0-12", "s8-d12-12"]


@pytest.mark.case(26)
@pytest.mark.parametrize("split", ["-1,1,0", "90,abc5,5", "0,0,0"])
def test_a_split_that_is_none_is_refused(prefix, split):
    with pytest.raises(OptionError, match="--split"):
        config(([prefix], None), split=split)


def test_whole_epochs_are_no_longer_than_needed(prefix):
    num_sequences = len(pack(LENGTHS, 8))
    for num_samples, epochs in ((1, 1), (num_sequences, 1), (num_sequences + 1, 2), (2 * num_sequences, 2)):
        dataset = build([num_samples, 0, 0], config(([prefix], None)))[0]
        assert len(dataset) == epochs * num_sequences


def test_fault_D04_an_eod_of_id_0_is_masked_in_a_dataset(write_dataset):
    prefix = write_dataset([[1, 0, 2, 0], [3, 0]]).prefix
    for is_masked, expected in ((True, [1, 0, 1, 0, 1, 0, 0, 0]), (False, [1, 1, 1, 0, 1, 0, 0, 0])):
        dataset = build([None] * 3, config(([prefix], None), eod_mask_loss=is_masked))[0]
        assert dataset.config.tokenizer.eod == 0
        assert dataset[0]["loss_mask"].tolist() == expected


@pytest.mark.parametrize("seq_length", [(1 << 24) + 1, (1 << 31) - 1])
def test_fault_B09_a_config_refuses_a_sequence_that_memory_cannot_hold(prefix, seq_length):
    with pytest.raises(OptionError, match="sequence_length must be an integer from 1 to 16,777,216"):
        config(([prefix], None), seq_length)


# Refusals


@pytest.mark.case(11)
def test_a_stale_index_stops_the_start(prefix, tmp_path):
    build([None] * 3, config(([prefix], None)))
    write(tmp_path / "data", documents_of(LENGTHS[:-1] + [9]))
    with pytest.raises(SequenceIndexError, match="--overwrite"):
        build([None] * 3, config(([prefix], None)))


def test_what_cannot_be_honoured_is_refused_by_name(prefix):
    with pytest.raises(OptionError, match="mock data"):
        config(None, split="1")
    with pytest.raises(OptionError, match="context parallel"):
        config(([prefix], None), context_parallel_size=2)
    with pytest.raises(OptionError, match="max_documents_per_sequence"):
        config(([prefix], None), max_documents_per_sequence=0)
    with pytest.raises(OptionError, match="object storage"):
        build([None] * 3, config((["s3://bucket/data"], None)))


def test_a_cap_is_part_of_the_index_and_of_the_identity(prefix):
    capped = build([None] * 3, config(([prefix], None), max_documents_per_sequence=1))[0]
    assert capped.sequence_index.key.name == "s8-d0-12-m1"
    assert all(len(capped.sequence_index.chunk_spans(i)) == 1 for i in range(len(capped)))
    free = build([None] * 3, config(([prefix], None)))[0]
    assert capped.unique_description != free.unique_description


# Ranks, workers, resuming


def test_pickled_datasets_are_small_and_give_the_same_samples(tmp_path):
    lengths = np.load(DATA / "text_lengths.npy")[:2000]
    prefix = write(tmp_path / "data", [np.arange(n) % 60_000 for n in lengths]).prefix
    dataset = build([None] * 3, config(([prefix], None), 2048))[0]
    content = pickle.dumps(dataset)
    assert len(content) < 10_000
    assert digest(pickle.loads(content)[7]) == digest(dataset[7])


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_loader_workers_give_the_same_samples(prefix, start_method, mmap):
    dataset = build([40, 0, 0], config(([prefix], None), mmap_bin_files=mmap))[0]
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context=start_method)
    assert [digest(sample) for sample in loader] == [digest(dataset[i]) for i in range(len(dataset))]


@pytest.mark.case(28)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_read_the_same_samples_in_the_same_global_order(prefix, world_size):
    dataset = build([48, 0, 0], config(([prefix], None)))[0]
    expected = [digest(dataset[i]) for i in range(48)]
    for consumed in range(0, 48, 8):  # a resume after any step
        samplers = [iter(GlobalOrderSampler(consumed, 48, 2, 8, rank, world_size)) for rank in range(world_size)]
        digests = []
        for _ in range((48 - consumed) // (2 * world_size)):
            for sampler in samplers:
                digests += [digest(dataset[i]) for i in next(sampler)]
        assert digests == expected[consumed:]


def digests_in_rank(rank, world_size, store, prefix, results):
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    dataset = build([24, 0, 0], config(([prefix], None), split="9,2,1"))[0]
    results.put((rank, [digest(dataset[i]) for i in range(24)]))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.case(8)
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_real_ranks_build_once_and_agree(prefix, tmp_path, world_size):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=digests_in_rank, args=(rank, world_size, f"{folder}/store", prefix, results))
            for rank in range(world_size)
        ]
        for rank in ranks:
            rank.start()
        by_rank = dict(results.get(timeout=120) for _ in ranks)
        for rank in ranks:
            rank.join(timeout=60)
            assert rank.exitcode == 0
    dataset = build([24, 0, 0], config(([prefix], None), split="9,2,1"))[0]
    expected = [digest(dataset[i]) for i in range(24)]
    assert all(by_rank[rank] == expected for rank in range(world_size))
    assert os.listdir(tmp_path / "data.bfp") == ["s8-d0-9"]


@pytest.mark.case(18)
def test_reading_is_linear_in_the_sequence_and_makes_nothing_dense(tmp_path):
    prefix = write(tmp_path / "data", [np.arange(300) % 60_000] * 3000).prefix
    dataset = build([None] * 3, config(([prefix], None), 131_072))[0]
    assert isinstance(dataset, BFPGPTDataset)
    assert max(tensor.numel() for tensor in dataset[0].values()) == 131_073
