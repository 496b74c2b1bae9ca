"""Evaluation is the mean over all target tokens of a split, each counted once."""

import dataclasses
import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core.models.gpt")

from helpers.datasets import documents_of
from helpers.equivalence import one_segment
from helpers.megatron_helpers import Tokenizer, initialize_megatron, model_options
from trainer.data import EvaluationSampler, build_valid_dataset, micro_batches
from trainer.evaluation import evaluate
from trainer.model import build_model

from megatron_bfp.megatron_core.attention import document_boundaries

SEQ_LENGTH = 32


@pytest.fixture
def model():
    initialize_megatron()
    torch.manual_seed(2)
    return build_model(model_options(seq_length=SEQ_LENGTH), 320)


def plain_evaluation(model, lengths, counted):
    """Every document alone, in chunks of at most L tokens, each predicting the next token of the document."""
    total, targets = 0.0, 0
    for document, length in zip(documents_of(lengths), lengths):
        if length not in counted:
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
def test_perplexity_equals_a_plain_loop_over_the_documents(blend_config, lengths, model, micro_batch_size):
    config = dataclasses.replace(blend_config, data_path=blend_config.data_path[1:2])
    valid = build_valid_dataset(config, Tokenizer())
    sampler = EvaluationSampler(len(valid), micro_batch_size, 0, 1)
    measured = evaluate(model, micro_batches(valid, sampler, 0, torch.device("cpu")))
    loss, targets = plain_evaluation(model, lengths, lengths[6:])
    assert measured.num_targets == targets
    assert measured.loss == pytest.approx(loss, rel=1e-5)
    assert measured.perplexity == pytest.approx(math.exp(loss), rel=1e-4)
    assert model.training
