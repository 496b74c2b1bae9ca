"""Targets only changes no loss and no gradient: packed equals alone, and an epoch with it an epoch without it."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core.models.gpt")

from helpers import equivalence
from helpers.datasets import documents_of
from helpers.megatron_helpers import build, config

LENGTH, VOCAB_SIZE = 64, 1024
LENGTHS = [37, 1, 20, 64 + 11, 65, 40, 9, 13, 30, 17, 8, 26, 5, 50, 2, 1]


@pytest.fixture
def prefix(write_dataset):
    return write_dataset(documents_of(LENGTHS)).prefix


def epoch_of(prefix, targets_only):
    """All sequences of a dataset."""
    dataset = build([None] * 3, config(([prefix], None), LENGTH, targets_only=targets_only))[0]
    return [dataset[i] for i in range(len(dataset))]


def rows_of(samples):
    """Each sample as the arguments of ``equivalence.run``, a micro-batch of one."""
    names = ("tokens", "labels", "loss_mask", "cu_seqlens")
    return [[sample[name][None] for name in names] for sample in samples]


@pytest.mark.parametrize("path", ["micro-batch 4", "joined rows"])
def test_packed_equals_alone(prefix, path):
    case = equivalence.Case("sdpa", "fp32", "GQA", path)
    model = equivalence.make_model(case, LENGTH, VOCAB_SIZE, "cpu")
    samples = sorted(epoch_of(prefix, True), key=lambda sample: -len(equivalence.chunk_bounds(sample["cu_seqlens"])))
    batch = torch.utils.data.default_collate(samples[:4])
    alone = equivalence.run_alone(model, batch)
    errors = equivalence.differences(equivalence.run_packed(model, batch, path), alone)
    crossing = equivalence.differences(
        equivalence.run_packed(model, equivalence.without_boundaries(batch), path), alone
    )
    equivalence.check_errors(case, errors, crossing)


def test_an_epoch_has_the_loss_and_gradients_of_one_in_which_every_token_is_an_input(prefix):
    case = equivalence.Case("sdpa", "fp32", "MHA", "micro-batch 1")
    model = equivalence.make_model(case, LENGTH, VOCAB_SIZE, "cpu")
    epochs = {targets_only: epoch_of(prefix, targets_only) for targets_only in (False, True)}
    results = {only: equivalence.run_in_parts(model, rows_of(samples)) for only, samples in epochs.items()}
    inputs = {only: sum(int((sample["tokens"] > 0).sum()) for sample in samples) for only, samples in epochs.items()}
    assert (inputs[True], inputs[False]) == (sum(LENGTHS) - len(LENGTHS), sum(LENGTHS))
    (_, loss, gradients), (_, expected_loss, expected) = results[True], results[False]
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    wrong = equivalence.run_in_parts(model, rows_of(epochs[True])[1:])[2]  # the control: a sequence is missing
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).abs().max() < 1e-4 * gradient.abs().max()
        assert (wrong[name] - gradient).abs().max() > 1e-2 * gradient.abs().max()


def test_the_mean_of_micro_batch_means_is_the_mean_over_targets_up_to_padding(write_dataset):
    """Here there is no padding. If the targets of micro-batches differ, those of short documents count more."""
    dataset = write_dataset(documents_of([65] * 6 + [5] * 64))
    case = equivalence.Case("sdpa", "fp32", "MHA", "micro-batch 1")
    model = equivalence.make_model(case, LENGTH, VOCAB_SIZE, "cpu")
    errors = []
    for targets_only in (True, False):
        samples = epoch_of(dataset.prefix, targets_only)
        losses = [equivalence.run(model, *row).loss for row in rows_of(samples)]
        targets = [sample["loss_mask"].sum().item() for sample in samples]
        mean_of_means = sum(loss / count for loss, count in zip(losses, targets)) / len(losses)
        errors.append(abs(mean_of_means / (sum(losses) / sum(targets)) - 1))
        assert targets_only == (set(targets) == {LENGTH})
    assert errors[0] < 1e-6 and errors[1] > 1e-4
