"""Datasets and micro-batches: valid splits whole, samples traced to documents, bad ids and workers' errors told."""

import dataclasses
import multiprocessing

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core.models.gpt")

from helpers.megatron_helpers import Tokenizer, initialize_megatron
from trainer.data import EvaluationSampler, build_train_dataset, build_valid_dataset, micro_batches, origin_of

from megatron_bfp import OptionError
from megatron_bfp.errors import IndexedDatasetError


def test_all_valid_splits_are_seen_whole_by_any_number_of_ranks(blend_config, lengths):
    initialize_megatron()
    valid = build_valid_dataset(blend_config, Tokenizer())
    assert len(valid) == sum(len(dataset) for dataset in valid.datasets) and len(valid.datasets) == 2
    assert sum(int(valid[i]["loss_mask"].sum()) for i in range(len(valid))) == sum(lengths) - len(lengths)
    assert valid[None]["loss_mask"].sum() == 0
    for ranks in (1, 2, 3):
        batches = [list(EvaluationSampler(len(valid), 2, rank, ranks)) for rank in range(ranks)]
        assert len({len(of_rank) for of_rank in batches}) == 1
        assert len(batches[0]) == len(EvaluationSampler(len(valid), 2, 0, ranks))
        seen = [number for of_rank in batches for batch in of_rank for number in batch]
        assert sorted(number for number in seen if number is not None) == list(range(len(valid)))


class Unreadable(torch.utils.data.Dataset):
    def __getitem__(self, idx):
        raise IndexedDatasetError("data.bin: has 10 bytes, not 20: get a whole copy")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_in_a_worker_is_one_line(num_workers):
    with pytest.raises(IndexedDatasetError) as error:
        next(micro_batches(Unreadable(), [[0]], num_workers, torch.device("cpu")))
    assert str(error.value) == "data.bin: has 10 bytes, not 20: get a whole copy"
    assert multiprocessing.active_children() == []  # Python would wait for it at its end, for ever


@pytest.mark.parametrize("data_impl", ["bfp", "mmap"])
@pytest.mark.parametrize("build", [build_train_dataset, build_valid_dataset])
def test_fault_A13_ids_outside_the_padded_vocabulary_stop_the_trainer_at_its_start(
    blend_config, lengths, data_impl, build
):
    initialize_megatron()
    config = dataclasses.replace(blend_config, data_impl=data_impl)
    assert max(sum(lengths), 240) < 256
    tokenizer = Tokenizer()
    tokenizer.vocab_size = 241  # its embedding has 256 rows
    assert build(config, tokenizer)
    tokenizer.vocab_size = 240
    with pytest.raises(OptionError, match="first.bin: document 10 holds the token id 240, the model's vocabulary ends"):
        build(config, tokenizer)


@pytest.mark.parametrize("data_impl", ["bfp", "mmap"])
def test_a_sample_is_traced_to_its_documents(blend_config, lengths, data_impl):
    initialize_megatron()
    config = dataclasses.replace(blend_config, data_impl=data_impl)
    train = build_train_dataset(config, Tokenizer())
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    reverse = [sum(lengths[::-1][:i]) for i in range(len(lengths))]
    for sample in range(16):
        origin = origin_of(train, sample)
        own, begins = (lengths, starts) if origin.prefix == config.data_path[1] else (lengths[::-1], reverse)
        tokens = {token for token in train[sample]["tokens"].tolist() if token}
        allowed = {begins[i] + 1 + k for i in origin.documents for k in range(own[i])}
        assert tokens <= allowed
        assert (origin.sequence is None) == (data_impl == "mmap")
