"""Evaluation is the mean over all target tokens of a split, each once; and what a run stops at."""

import argparse
import json
import math
import multiprocessing

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core.models.gpt")

from helpers.datasets import documents_of
from helpers.equivalence import one_segment
from helpers.megatron_helpers import Tokenizer, initialize_megatron, model_options
from trainer.data import EvaluationSampler, build_train_dataset, build_valid_dataset, micro_batches, origin_of
from trainer.evaluation import Evaluation, evaluate
from trainer.log import Log, SpikeDetector, Work, model_flops
from trainer.model import build_model

from megatron_bfp import OptionError
from megatron_bfp.errors import IndexedDatasetError
from megatron_bfp.megatron_core.attention import document_boundaries

SEQ_LENGTH = 32
LENGTHS = [5, 40, 1, 17, 31, 32, 9, 70, 3, 12, 25, 8]


@pytest.fixture
def options(write_dataset):
    """The options of a run on two datasets, of which the last half is the valid split."""
    first = write_dataset(documents_of(LENGTHS), "first").prefix
    second = write_dataset(documents_of(LENGTHS[::-1]), "second").prefix
    return argparse.Namespace(
        data_path=["0.5", first, "0.5", second],
        data_impl="bfp",
        dataloader_inter_document_masking=False,
        split="1,1,0",
        seed=3,
        seq_length=SEQ_LENGTH,
        make_vocab_size_divisible_by=8,
        tensor_model_parallel_size=2,
        data_cache_path=None,
        num_dataset_builder_threads=1,
        eod_mask_loss=False,
        max_documents_per_sequence=None,
        train_iters=4,
        global_batch_size=4,
    )


@pytest.fixture
def model():
    initialize_megatron()
    torch.manual_seed(2)
    return build_model(model_options(seq_length=SEQ_LENGTH), 320)


def plain_evaluation(model, lengths):
    """Every document alone, in chunks of at most L tokens, each predicting the next token of the document."""
    total, targets = 0.0, 0
    for document, length in zip(documents_of(LENGTHS), LENGTHS):
        if length not in lengths:
            continue
        for start in range(0, length, SEQ_LENGTH):
            inputs = torch.tensor([document[start : start + SEQ_LENGTH]])
            answers = torch.tensor(document[start + 1 : start + 1 + SEQ_LENGTH])
            positions = torch.arange(inputs.shape[1])[None]
            boundaries = document_boundaries(one_segment(inputs.shape[1]))
            with torch.no_grad():
                logits = model(inputs, positions, None, packed_seq_params=boundaries)[0, : len(answers)]
            if len(answers):
                total += torch.nn.functional.cross_entropy(logits, answers, reduction="sum").item()
            targets += len(answers)
    return total / targets, targets


@pytest.mark.parametrize("micro_batch_size", [1, 3])
def test_perplexity_equals_a_plain_loop_over_the_documents(options, model, micro_batch_size):
    options.data_path = options.data_path[1:2]
    valid = build_valid_dataset(options, Tokenizer())
    sampler = EvaluationSampler(len(valid), micro_batch_size, 0, 1)
    found = evaluate(model, micro_batches(valid, sampler, 0, torch.device("cpu")))
    loss, targets = plain_evaluation(model, LENGTHS[6:])
    assert found.num_targets == targets
    assert found.loss == pytest.approx(loss, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(loss), rel=1e-4)
    assert model.training


def test_all_valid_splits_are_seen_whole_by_any_number_of_ranks(options):
    valid = build_valid_dataset(options, Tokenizer())
    assert len(valid) == sum(len(dataset) for dataset in valid.datasets) and len(valid.datasets) == 2
    assert sum(int(valid[i]["loss_mask"].sum()) for i in range(len(valid))) == sum(LENGTHS) - len(LENGTHS)
    assert valid[None]["loss_mask"].sum() == 0
    for ranks in (1, 2, 3):
        batches = [list(EvaluationSampler(len(valid), 2, rank, ranks)) for rank in range(ranks)]
        assert len({len(found) for found in batches}) == 1 and len(batches[0]) == len(
            EvaluationSampler(len(valid), 2, 0, ranks)
        )
        seen = [number for found in batches for batch in found for number in batch]
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
def test_fault_A13_ids_outside_the_padded_vocabulary_stop_the_trainer_at_its_start(options, data_impl, build):
    initialize_megatron()
    options.data_impl = data_impl
    assert max(sum(LENGTHS), 240) < 256
    tokenizer = Tokenizer()
    tokenizer.vocab_size = 241  # its embedding has 256 rows
    assert build(options, tokenizer)
    tokenizer.vocab_size = 240
    with pytest.raises(OptionError, match="first.bin: document 10 holds the token id 240, the model's vocabulary ends"):
        build(options, tokenizer)


@pytest.mark.parametrize("data_impl", ["bfp", "mmap"])
def test_a_sample_is_traced_to_its_documents(options, data_impl):
    options.data_impl = data_impl
    train = build_train_dataset(options, Tokenizer())
    starts = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    reverse = [sum(LENGTHS[::-1][:i]) for i in range(len(LENGTHS))]
    for sample in range(16):
        origin = origin_of(train, sample)
        lengths, begins = (LENGTHS, starts) if origin.prefix == options.data_path[1] else (LENGTHS[::-1], reverse)
        tokens = {token for token in train[sample]["tokens"].tolist() if token}
        allowed = {begins[i] + 1 + k for i in origin.documents for k in range(lengths[i])}
        assert tokens <= allowed
        assert (origin.sequence is None) == (data_impl == "mmap")


def test_a_run_stops_at_spikes_and_at_what_is_no_number():
    detector = SpikeDetector(3.0)
    assert all(detector.reason(loss, 1.0) is None for loss in [9.0, 30.0, *[5.0] * 10])
    assert "30.0" in detector.reason(30.0, 1.0)
    assert "nan" in detector.reason(math.nan, 1.0)
    assert "gradient norm is inf" in detector.reason(5.0, math.inf)
    assert detector.reason(6.0, 1.0) is None
    assert SpikeDetector(0.0).reason(1e9, 1.0) is None


def test_flops_count_real_attention():
    # one sequence of 8 tokens in chunks of 5 and 3, a model of 100 weights, 2 layers, hidden size 4
    assert model_flops(Work(8, 25 + 9), 100, 2, 4) == 6 * 8 * 100 + 6 * 34 * 2 * 4
    assert model_flops(Work(8, 64), 0, 1, 4) == 3 * (2 * 2 * 8 * 8 / 2 * 4)


def test_events_go_to_tensorboard(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log = Log(None, str(tmp_path))
    for iteration in (1, 2):
        log.write("train", iteration, {"loss": 1.5 * iteration})
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 1.5), (2, 3.0)]


def test_events_are_json_lines(tmp_path):
    for _ in range(2):
        log = Log(str(tmp_path / "log.jsonl"), None)
        log.write("train", 3, {"loss": 1.5})
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert lines == [{"event": "train", "iteration": 3, "loss": 1.5}] * 2
    assert Evaluation(1000.0, 1).perplexity == math.inf
