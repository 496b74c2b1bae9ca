"""Packed datasets for Megatron-DeepSpeed: their samples, their splits, and how its builder makes them."""

import pickle
import sys
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")

from helpers.datasets import documents_of
from helpers.megatron_deepspeed_stand_ins import LENGTH, module_with
from test_balance_batches import Schedule

from megatron_bfp.errors import IndexedDatasetError, OptionError
from megatron_bfp.integrations.balance import COMPOSED_BY_COST
from megatron_bfp.integrations.megatron_deepspeed import builder
from megatron_bfp.integrations.megatron_deepspeed.dataset import build_dataset, build_splits
from megatron_bfp.samples.balanced_dataset import BalancedDataset
from megatron_bfp.sequence_index.builder import build
from megatron_bfp.sequence_index.key import IndexKey, index_directory
from megatron_bfp.sequence_index.split import PackedSplit

LENGTHS = [3, 40, 16, 1, 5, 5, 9, 33, 2, 1, 7, 12, 16, 17]


@pytest.fixture
def packed(write_dataset):
    dataset = write_dataset(documents_of(LENGTHS))
    return build_dataset(PackedSplit.open(dataset, LENGTH, None), 1, seed=7)


def test_every_token_is_an_input_once_and_every_one_but_a_first_a_target_once(packed):
    inputs, targets = [], []
    for number in range(len(packed)):
        sample = packed[number]
        assert {name: (array.dtype, len(array)) for name, array in sample.items()} == {
            "text": (np.int64, LENGTH + 1),
            "cu_seqlens": (np.int64, LENGTH + 1),
            "loss_mask": (np.int64, LENGTH),
        }
        tokens, labels = sample["text"][:-1], sample["text"][1:]
        inputs += tokens[tokens > 0].tolist()
        is_target = sample["loss_mask"] == 1
        assert np.array_equal(tokens[is_target] + 1, labels[is_target])
        targets += labels[is_target].tolist()
    firsts = (np.cumsum([0, *LENGTHS[:-1]]) + 1).tolist()
    assert sorted(inputs) == list(range(1, sum(LENGTHS) + 1))
    assert sorted(targets) == sorted(set(range(1, sum(LENGTHS) + 1)) - set(firsts))


def test_samples_last_for_whole_epochs_and_survive_pickling(write_dataset):
    dataset = write_dataset(documents_of(LENGTHS))
    split = PackedSplit.open(dataset, LENGTH, None)
    sequences = len(build_dataset(split, 0, 7))
    packed = build_dataset(split, sequences + 1, 7)
    assert len(packed) == 2 * sequences and len(list(packed)) == 2 * sequences
    again = pickle.loads(pickle.dumps(packed))
    assert np.array_equal(again[3]["text"], packed[3]["text"])
    for number in (-1, len(packed)):
        with pytest.raises(IndexError, match=f"sample {number} is not in"):
            packed[number]
    assert packed.desc != build_dataset(split, sequences + 1, 8).desc


def test_splits_are_those_of_the_prebuilt_indexes(write_dataset):
    dataset = write_dataset(documents_of([5] * 1000))
    for first, end in ((0, 969), (969, 999), (999, 1000)):
        build(dataset, IndexKey(LENGTH, first, end), index_directory(dataset.prefix))
    for split in ("969, 30, 1", "969/30/1"):
        datasets = build_splits(dataset.prefix, split, [1, 1, 1], LENGTH, 7)
        names = [dataset.sequence_index.key.name for dataset in datasets]
        assert names == ["s16-d0-969", "s16-d969-999", "s16-d999-1000"]
        assert not any(dataset.sequence_index.was_built for dataset in datasets)


@pytest.mark.case(27)
def test_a_split_without_documents_is_none_and_refused_in_a_blend(write_dataset):
    dataset = write_dataset(documents_of([5] * 10))
    train, valid, test = build_splits(dataset.prefix, "98,2,0", [1, 1, 1], LENGTH, 7)
    assert train and valid is None and test is None
    with pytest.raises(OptionError, match="the valid split, documents 10 to 10 of 10, has no tokens"):
        build_splits(dataset.prefix, "98,2,0", [1, 1, 1], LENGTH, 7, is_in_blend=True)


@pytest.mark.parametrize(
    "paths, is_in_blend", [(["text"], False), (["1", "text"], True), (["0.5", "a", "0.5", "b"], True)]
)
def test_options_reach_the_datasets_of_megatron_deepspeed_s_builder(monkeypatch, paths, is_in_blend):
    args = SimpleNamespace(data_path=paths, max_documents_per_sequence=3, padded_vocab_size=512)
    args.even_sequences, args.targets_only, args.fim_rate = True, False, None
    calls = []
    monkeypatch.setattr(builder, "parsed_options", lambda: args)
    monkeypatch.setattr(builder, "build_splits", lambda *rest, **keywords: calls.append((rest, keywords)))
    build_packed = builder.build_packed_splits(None)
    build_packed("text", "bfp", "9,1,0", [4, 5, 6], 32, 7, True, data_cache_path="cache")
    keywords = {"is_in_blend": is_in_blend, "vocab_size": 512, "even_sequences": True, "targets_only": False}
    keywords |= {"fim_rate": None, "fim_form": None}
    assert calls == [(("text", "9,1,0", [4, 5, 6], 32, 7, 3, "cache"), keywords)]


def test_fault_A13_ids_outside_the_vocabulary_are_named(write_dataset, monkeypatch):
    prefix = write_dataset(documents_of(LENGTHS)).prefix
    last = sum(LENGTHS)
    train, *_ = build_splits(prefix, "1,0,0", [1, 1, 1], LENGTH, 7, vocab_size=last + 1)
    assert len(list(train)) == len(train)
    reason = f"data.bin: document {len(LENGTHS) - 1} holds the token id {last}, the model's vocabulary ends at"
    train, *_ = build_splits(prefix, "1,0,0", [1, 1, 1], LENGTH, 7, vocab_size=last)
    with pytest.raises(IndexedDatasetError, match=reason):
        list(train)
    args = SimpleNamespace(data_path=[], max_documents_per_sequence=None, even_sequences=False, padded_vocab_size=last)
    args.targets_only, args.fim_rate, args.balance_batches = False, None, 0
    args.consumed_train_samples = args.consumed_valid_samples = 0
    monkeypatch.setattr(builder, "parsed_options", lambda: args)
    of_a_split = builder.build_packed_split(None)
    with pytest.raises(IndexedDatasetError, match=reason):
        list(of_a_split("train", prefix, "bfp", "", 1, LENGTH, 7, True))
    monkeypatch.setitem(
        sys.modules, "megatron", module_with("megatron", print_rank_0=lambda line: None, global_vars=None)
    )
    for which in range(3):  # before training, from any split
        splits = [None] * 3
        splits[which] = train
        with pytest.raises(IndexedDatasetError, match=reason) as raised:
            builder.check_and_sum_up(lambda splits=splits: splits)()
        assert raised.value.on_every_rank


def test_fault_B15_datasets_are_summed_up_once_for_all_virtual_stages(packed, monkeypatch):
    lines = []
    args = SimpleNamespace(use_flash_attn=False, reset_position_ids=False, balance_batches=0)
    monkeypatch.setattr(builder, "parsed_options", lambda: args)
    monkeypatch.setitem(sys.modules, "megatron", module_with("megatron", print_rank_0=lines.append, global_vars=None))
    build_checked = builder.check_and_sum_up(lambda: (packed, None, None))
    assert build_checked() == (packed, None, None) and len(lines) == 1
    assert build_checked() == (packed, None, None) and len(lines) == 1


def test_what_is_active_is_said_in_a_line_for_each_split(packed):
    lines = builder.description((SimpleNamespace(datasets=[packed, packed]), packed, None))
    assert lines[0].startswith("best-fit packing: train: 2 indexes (") and ", 22 sequences, padding " in lines[0]
    assert lines[1].startswith(f"best-fit packing: valid: {packed.sequence_index.path} (1 built, 0 opened), 11 seq")
    assert len(lines) == 2  # attention is spoken of when the first step has shown it


def test_only_the_training_split_is_balanced_and_the_log_says_so(packed, monkeypatch):
    lines, asked = [], []
    args = SimpleNamespace(data_impl="bfp", balance_batches=1, consumed_train_samples=0, consumed_valid_samples=0)
    vars(args).update(global_batch_size=4, micro_batch_size=2, data_parallel_size=1)
    monkeypatch.setattr(builder, "parsed_options", lambda: args)
    monkeypatch.setattr(builder, "is_news", lambda parts: True)
    global_vars = module_with("megatron.global_vars", _GLOBAL_NUM_MICROBATCHES_CALCULATOR=Schedule(2, (0, 4)))
    megatron = module_with("megatron", print_rank_0=lines.append, global_vars=global_vars)
    monkeypatch.setitem(sys.modules, "megatron", megatron)

    def build_train_valid_test_datasets(data_prefix, data_impl, splits_string, train_valid_test_num_samples):
        asked.append(train_valid_test_num_samples)
        return packed, packed, None

    build_checked = builder.check_and_sum_up(build_train_valid_test_datasets)
    train, valid, test = build_checked(["text"], "bfp", "9,1,0", train_valid_test_num_samples=[10, 4, 0])
    assert isinstance(train, BalancedDataset) and train.stages == [(0, 4)] and (valid, test) == (packed, None)
    assert train.desc == packed.desc
    assert [", balanced inside each global batch of 4" in line for line in lines] == [True, False]
    args.balance_batches = 2
    train, *_ = build_checked(["text"], "bfp", "9,1,0", [10, 4, 0])
    assert train.num_batches == 2 and asked == [[10, 4, 0], [16, 4, 0]]
    assert lines[2].endswith(", balanced over every 2 global batches of 4") and lines[3] == COMPOSED_BY_COST
    args.balance_batches = 0
    assert build_checked(["text"], "bfp", "9,1,0", [10, 4, 0]) == (packed, packed, None)
    args.balance_batches, args.consumed_train_samples = 2, 2
    with pytest.raises(OptionError, match="begins at sample 2") as raised:
        build_checked(["text"], "bfp", "9,1,0", [10, 4, 0])
    assert raised.value.on_every_rank


def test_even_sequences_and_targets_only_reach_the_indexes(write_dataset, monkeypatch):
    prefix = write_dataset(documents_of(LENGTHS)).prefix
    for even, targets_only, end in ((False, False, "-m3"), (True, False, "-m3-e"), (False, True, "-m3-t")):
        rule = {"even_sequences": even, "targets_only": targets_only}
        train, *_ = build_splits(prefix, "1,0,0", [1, 1, 1], LENGTH, 7, 3, **rule)
        assert train.sequence_index.key.name.endswith(end)
        args = SimpleNamespace(max_documents_per_sequence=3, padded_vocab_size=None, fim_rate=None, **rule)
        monkeypatch.setattr(builder, "parsed_options", lambda args=args: args)
        split = builder.build_packed_split(None)("train", prefix, "bfp", "", 1, LENGTH, 7, True)
        assert split.sequence_index.key.name.endswith(end)
        for sample in map(train.__getitem__, range(train.samples_per_epoch)):
            labels = sample["labels"] if targets_only else sample["text"][1:]
            is_target = sample["loss_mask"] > 0  # all tokens differ, and follow each other in their documents
            assert np.array_equal(labels[is_target], sample["text"][:-1][is_target] + 1)
            assert not targets_only or np.array_equal(is_target, sample["text"][:-1] > 0)
