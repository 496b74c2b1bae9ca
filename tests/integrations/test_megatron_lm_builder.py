"""Megatron-LM's dataset builder with ``--data-impl bfp``: empty splits, first samples, the config."""

import argparse
import sys
import types

import pytest

from megatron_bfp import IndexedDatasetError, OptionError
from megatron_bfp.integrations import summary
from megatron_bfp.integrations.megatron_lm import builder, changes


def options(**changed):
    known = {"dataloader_inter_document_masking": True, "context_parallel_size": 1, "dataloader_type": None}
    known |= {"balance_batches": 0}
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
    given = options(max_documents_per_sequence=3, even_sequences=True, padded_vocab_size=600)
    cls, ours = builder.packed(gpt_dataset.GPTDataset, theirs, given)
    assert cls is BFPGPTDataset and type(ours) is BFPGPTDatasetConfig
    assert (ours.max_documents_per_sequence, ours.even_sequences, ours.model_vocab_size) == (3, True, 600)
    assert (ours.sequence_length, ours.eod_mask_loss, ours.path_to_cache, ours.blend) == (
        32,
        True,
        "cache",
        theirs.blend,
    )
    args = options(max_documents_per_sequence=5, even_sequences=False, padded_vocab_size=512)
    built_with = []
    initialize = builder.choose_dataset(lambda self, *arguments: built_with.extend(arguments))
    module = types.SimpleNamespace(get_args=lambda: args)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "megatron.training.global_vars", module)
        initialize(None, gpt_dataset.GPTDataset, [1, 1, 1], lambda: True, theirs)
    cls, sizes, reads, ours = built_with
    assert (cls, sizes, reads) == (BFPGPTDataset, [1, 1, 1], builder.reads_batches)
    assert (ours.max_documents_per_sequence, ours.even_sequences, ours.model_vocab_size) == (5, False, 512)
