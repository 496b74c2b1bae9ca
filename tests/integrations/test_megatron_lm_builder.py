"""Megatron-LM's dataset builder with ``--data-impl bfp``: empty splits, first samples, the config."""

import argparse
import sys
import types

import pytest
from test_balance_batches import Packed, Schedule, balanced, same_samples, steps_of_training

from megatron_bfp import IndexedDatasetError, OptionError
from megatron_bfp.integrations import summary
from megatron_bfp.integrations.balance import COMPOSED_BY_COST
from megatron_bfp.integrations.megatron_lm import builder, changes
from megatron_bfp.samples.balanced_dataset import BalancedDataset


def options(**changed):
    known = {"dataloader_inter_document_masking": True, "context_parallel_size": 1, "dataloader_type": None}
    known |= {"balance_batches": 0, "fim_rate": None, "fim_spm_rate": 0.5}
    return argparse.Namespace(**(known | {"data_impl": "bfp"} | changed))


class Split:
    """A split as Megatron-LM's builder returns it."""

    dataset_path = "text"

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, sample):
        if sample in getattr(self, "bad", ()):
            raise IndexedDatasetError(f"sample {sample}")


def built(datasets, **changed):
    """What our part of the builder returns for datasets."""
    args = options(**changed)
    module = types.SimpleNamespace(get_args=lambda: args)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "megatron.training.global_vars", module)
        patch.setattr(builder, "_sum_up", lambda *_: None)
        return builder.check_and_sum_up(lambda self: datasets)(None)


def test_fault_B03_an_empty_split_is_none():
    full, empty = Split(5), Split(0)
    assert built([full, empty, empty]) == [full, None, None]
    assert built([full, None, full]) == [full, None, full]
    assert built([empty, full, full], skip_train=True) == [None, full, full]
    assert built([full, [full, full], empty]) == [full, [full, full], None]
    with pytest.raises(OptionError, match="the train split has no tokens"):
        built([empty, full, full])
    with pytest.raises(OptionError, match="text: has no tokens; take it out of the validation sets"):
        built([full, [full, empty], empty])


def train_step(
    forward_step_func,
    data_iterator,
    model,
    optimizer,
    opt_param_scheduler,
    config,
    forward_backward_func,
    iteration,
    pg_collection=None,
    p2p_communicator=None,
):
    """Megatron-LM's, as far as the hooks look at it."""


@pytest.mark.parametrize("loaders, evaluates", [([None], 0), ([], 0), (None, 0), (["one"], 1), ([None, "two"], 1)])
def test_fault_B03_an_empty_split_is_not_evaluated(monkeypatch, loaders, evaluates):
    args = options(do_valid=1)
    module = types.SimpleNamespace(get_args=lambda: args)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)
    monkeypatch.setattr(builder, "_as_on_rank_0", lambda flag: flag)
    training = types.ModuleType("megatron.training.training")
    training.build_train_valid_test_data_loaders = lambda build_train_valid_test_datasets_provider: (1, loaders, 3)
    training.train_step = train_step
    training.get_forward_backward_func = lambda pp_size=None, vp_size=None, schedule_pg_collection=None: None
    changes.HOOKS["megatron.training.training"](training)
    train, valid, test = training.build_train_valid_test_data_loaders(None)
    assert (train, test, args.do_valid) == (1, 3, evaluates) and valid == (loaders if evaluates else None)


def test_fault_A13_the_first_samples_are_read_before_the_first_step():
    full, damaged = Split(500), Split(500)
    damaged.bad = (63,)
    assert built([full, None, None])
    with pytest.raises(IndexedDatasetError, match="sample 63") as raised:
        built([damaged, None, None])
    assert raised.value.on_every_rank
    damaged.bad = (64,)
    assert built([damaged, None, None])
    with pytest.raises(IndexedDatasetError, match="sample 64"):
        built([damaged, None, None], consumed_train_samples=1)
    with pytest.raises(IndexedDatasetError, match="sample 64"):
        built([full, [full, damaged], None], consumed_valid_samples=64)
    damaged.samples = 64  # no more are asked for than there are
    assert built([damaged, None, None], consumed_train_samples=60)


def test_fault_B15_datasets_are_summed_up_once_for_all_virtual_stages(monkeypatch):
    def parts(*names):
        index = [types.SimpleNamespace(path=name, key=types.SimpleNamespace(name="s8")) for name in names]
        return [types.SimpleNamespace(sequence_index=one) for one in index]

    assert summary.is_news(parts("virtual a", "virtual b")) and not summary.is_news(parts("virtual a", "virtual b"))
    assert summary.is_news(parts("virtual a"))
    said = []
    args = options()
    module = types.SimpleNamespace(get_args=lambda: args)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)
    monkeypatch.setattr(builder, "_sum_up", lambda *_: said.append(1))
    split = Split(3)
    split.sequence_index = parts("virtual c")[0].sequence_index
    build = builder.check_and_sum_up(lambda self: [split, None, None])
    assert [build(None) and len(said) for _ in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("tensor_rank, pipeline_rank, reads", [(0, 0, True), (0, 1, True), (1, 0, False)])
def test_batches_are_read_by_the_first_tensor_parallel_rank_of_every_stage(
    monkeypatch, tensor_rank, pipeline_rank, reads
):
    state = pytest.importorskip("megatron.core.parallel_state")
    monkeypatch.setattr(state, "get_tensor_model_parallel_rank", lambda: tensor_rank)
    monkeypatch.setattr(state, "get_pipeline_model_parallel_rank", lambda: pipeline_rank)
    assert builder.reads_batches() == reads


def test_options_reach_the_config_that_takes_the_place_of_megatron_s():
    gpt_dataset = pytest.importorskip("megatron.core.datasets.gpt_dataset")
    from helpers.megatron_helpers import config

    from megatron_bfp import BFPGPTDataset, BFPGPTDatasetConfig

    theirs = config((["text"], None), 32, gpt_dataset.GPTDatasetConfig, eod_mask_loss=True, path_to_cache="cache")
    given = options(max_documents_per_sequence=3, even_sequences=True, targets_only=True, padded_vocab_size=600)
    cls, ours = builder.packed(gpt_dataset.GPTDataset, theirs, given)
    assert cls is BFPGPTDataset and type(ours) is BFPGPTDatasetConfig
    assert (ours.max_documents_per_sequence, ours.even_sequences, ours.model_vocab_size) == (3, True, 600)
    assert ours.targets_only
    assert (ours.sequence_length, ours.eod_mask_loss, ours.path_to_cache, ours.blend) == (
        32,
        True,
        "cache",
        theirs.blend,
    )
    args = options(max_documents_per_sequence=5, even_sequences=False, targets_only=False, padded_vocab_size=512)
    built_with = []
    initialize = builder.choose_dataset(lambda self, *arguments: built_with.extend(arguments))
    module = types.SimpleNamespace(get_args=lambda: args)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "megatron.training.global_vars", module)
        initialize(None, gpt_dataset.GPTDataset, [1, 1, 1], lambda: True, theirs)
    cls, sizes, reads, ours = built_with
    assert (cls, sizes, reads) == (BFPGPTDataset, [1, 1, 1], builder.reads_batches)
    assert (ours.max_documents_per_sequence, ours.even_sequences, ours.model_vocab_size) == (5, False, 512)
    assert not ours.targets_only


def test_megatron_cores_own_calculators_are_followed():
    calculators = pytest.importorskip("megatron.core.num_microbatches_calculator")
    dataset = Packed(200)
    constant = calculators.ConstantNumMicroBatchesCalculator(20, 2, 3, True, 1)
    assert balanced(dataset, constant, data_parallel_size=3).stages == [(0, 18)]  # decreased so that ranks can share it
    ramp_up = getattr(calculators, "RampupBatchsizeNumMicroBatchesCalculator", None)
    if ramp_up is None:
        schedule = calculators.StepBatchsizeNumMicroBatchesCalculator(2, 1, False, 1, "0:4 16:8 48:16")
        assert balanced(dataset, schedule).stages == [(0, 4), (16, 8), (48, 16)]
        return
    for decreases in (False, True):
        tile = 6 if decreases else 2
        calculator = ramp_up(24, 2, tile // 2, decreases, 1, 8, 4, 90)
        wrapped = balanced(dataset, calculator, data_parallel_size=tile // 2)
        assert [size for _, size in wrapped.stages] == ([6, 12, 18, 24] if decreases else [8, 12, 16, 20, 24])
        assert all(same_samples(wrapped, step) for step in steps_of_training(calculator, tile, 0, 200))


OF_A_RUN = {"balance_batches": 1, "global_batch_size": 8, "micro_batch_size": 2, "data_parallel_size": 1}


def test_only_the_training_split_is_balanced(monkeypatch):
    calculators = pytest.importorskip("megatron.core.num_microbatches_calculator")
    monkeypatch.setattr(calculators, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", Schedule(2, (0, 4), (8, 8)))
    splits = [Packed(50, seed=seed) for seed in range(3)]
    train, *others = built(splits, **OF_A_RUN, consumed_train_samples=4)
    assert isinstance(train, BalancedDataset) and train.dataset is splits[0] and train.stages == [(4, 4), (8, 8)]
    assert others == splits[1:]
    assert built(splits, **OF_A_RUN, skip_train=True) == splits
    assert built([None] * 3, **OF_A_RUN, consumed_train_samples=0) == [None] * 3  # a rank that reads no batches
    with pytest.raises(OptionError, match="balanced batches need packed datasets"):
        built([Split(50), None, None], **OF_A_RUN, consumed_train_samples=0)


def test_the_log_says_how_batches_are_composed(monkeypatch):
    said = []
    monkeypatch.setattr(builder, "say", said.append)
    monkeypatch.setattr(builder, "summary", lambda parts: f"{len(parts)} indexes")
    split = Packed(50)
    split.sequence_index = "index"
    args = options(calculate_per_token_loss=True, targets_only=False)
    builder._sum_up(args, [BalancedDataset(split, 8), split, None])
    assert said == [
        "best-fit packing: train: 1 indexes, balanced inside each global batch of 8",
        "best-fit packing: valid: 1 indexes",
    ]
    builder._sum_up(args, [BalancedDataset(split, 8, 3, 2), None, None])
    assert said[2:] == [
        "best-fit packing: train: 1 indexes, balanced over every 3 global batches of 8",
        COMPOSED_BY_COST,
    ]
    for given, warns in (({}, 1), ({"targets_only": True}, 0), ({"targets_only": True, "eod_mask_loss": True}, 1)):
        said.clear()
        args = options(**{"calculate_per_token_loss": False, "targets_only": False} | given)
        builder._sum_up(args, [None] * 3)
        assert len(said) == warns == sum("number of targets differs" in line for line in said)


def test_a_blend_holds_whole_blocks(monkeypatch):
    gpt_dataset = pytest.importorskip("megatron.core.datasets.gpt_dataset")
    from helpers.megatron_helpers import config

    sizes = []
    initialize = builder.choose_dataset(lambda self, cls, asked, *others: sizes.append(asked))
    for num_batches in (1, 3):
        args = options(**OF_A_RUN | {"balance_batches": num_batches}, max_documents_per_sequence=None)
        args.even_sequences = args.targets_only = False
        module = types.SimpleNamespace(get_args=lambda args=args: args)
        monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)
        for train_size in (80, 72, None):
            theirs = config((["text"], None), 32, gpt_dataset.GPTDatasetConfig)
            initialize(None, gpt_dataset.GPTDataset, [train_size, 10, None], lambda: True, theirs)
    assert [train_size for train_size, *_ in sizes] == [80, 72, None, 96, 72, None]
    assert all(others == [10, None] for _, *others in sizes)
