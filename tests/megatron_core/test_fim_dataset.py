"""Fill-in-the-middle in megatron-core's builder: the config, blends, ranks and resumption, balanced batches."""

import pickle
from collections import Counter

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core.datasets.gpt_dataset")

from helpers.datasets import documents_of
from helpers.megatron_helpers import build, config

from megatron_bfp import BalancedDataset, OptionError

EOD, PREFIX, MIDDLE, SUFFIX = 0, 64_001, 64_002, 64_003
FIM = {"fim_rate": 0.5, "fim_extra_tokens": {"prefix": PREFIX, "middle": MIDDLE, "suffix": SUFFIX}}
LENGTHS = [30, 12, 1, 25, 40, 9, 17, 8, 33, 2, 29, 5, 64, 7, 32] * 3


@pytest.fixture
def prefixes(write_dataset):
    """Two corpora without a token in common; their documents end with the EOD."""
    starts = {"first": 1, "second": 10_000}
    documents = {name: [[*text[:-1], EOD] for text in documents_of(LENGTHS, start)] for name, start in starts.items()}
    return [write_dataset(texts, name).prefix for name, texts in documents.items()]


def rows(samples):
    """Tokens of samples, to be compared."""
    return [tuple(sample["tokens"].tolist()) for sample in samples]


@pytest.mark.parametrize("options", [{}, {"targets_only": True}, {"targets_only": True, "even_sequences": True}])
def test_every_token_is_in_each_epoch_of_a_blend(prefixes, options):
    blend = build([None] * 3, config((prefixes, None), 32, **FIM, **options))[0]
    samples = [blend[i] for i in range(len(blend))]
    targets, number = Counter(), 0
    for sample in samples:
        targets.update(sample["labels"][sample["loss_mask"] > 0].tolist())
        number += int((sample["tokens"] == PREFIX).sum())
        count = int(sample["loss_mask"].sum())
        assert not options or sample["loss_mask"].tolist() == [1] * count + [0] * (32 - count)
    assert number == sum(part.sequence_index.counts["fim_documents"] for part in blend.datasets) > 10
    assert targets[SUFFIX] == targets[MIDDLE] == number and targets[PREFIX] == 0
    words = [token for start in (1, 10_000) for text in documents_of(LENGTHS, start) for token in text[:-1]]
    assert all(targets[word] <= 1 for word in words)
    assert sum(targets[word] for word in words) >= len(words) - 2 * len(LENGTHS)  # all but first ones


def test_ranks_workers_and_resumed_runs_see_the_same(prefixes):
    def made():
        return build([200, 0, 0], config((prefixes, [0.5, 0.5]), 32, **FIM))[0]

    whole = rows(made()[i] for i in range(200))
    resumed = made()
    assert rows(resumed[i] for i in range(120, 200)) == whole[120:]
    for ranks in (2, 4):
        for rank in range(ranks):
            of_rank = pickle.loads(pickle.dumps(made().datasets[0]))  # as in a worker
            assert rows(of_rank[i] for i in range(rank, 40, ranks)) == rows(
                made().datasets[0][i] for i in range(rank, 40, ranks)
            )
    other = build([200, 0, 0], config((prefixes, [0.5, 0.5]), 32, **FIM, random_seed=5))[0]
    assert rows(other[i] for i in range(200)) != whole  # the control


def test_balanced_batches_keep_their_samples(prefixes):
    dataset = build([None] * 3, config((prefixes[:1], None), 32, **FIM, targets_only=True))[0]
    balanced = BalancedDataset(dataset, 8)
    assert sorted(rows(balanced[i] for i in range(8))) == sorted(rows(dataset[i] for i in range(8)))
    for i in range(8):
        bounds = sorted(set(balanced[i]["cu_seqlens"].tolist()))
        work = sum((end - start) ** 2 for start, end in zip(bounds, bounds[1:]))
        padding = 32 - int((balanced[i]["loss_mask"] > 0).sum())
        assert balanced.work(i) == work - padding**2


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"fim_rate": 0.0}, "--fim-rate 0.0: give a number above 0"),
        ({"fim_spm_rate": 2.0}, "--fim-spm-rate 2.0"),
        ({"fim_extra_tokens": None}, "an id of its own for each of prefix, middle, suffix"),
        ({"fim_extra_tokens": {"prefix": 1, "middle": 2}}, "an id of its own"),
        ({"fim_extra_tokens": {"prefix": 1, "middle": 2, "suffix": 2}}, "an id of its own"),
        ({"fim_extra_tokens": {"prefix": 1, "middle": EOD, "suffix": 2}}, "an id of its own"),
    ],
)
def test_what_cannot_be_is_refused(prefixes, changes, message):
    with pytest.raises(OptionError, match=message):
        config((prefixes, None), 32, **FIM | changes)


def test_ids_that_the_dataset_or_the_model_cannot_hold_are_refused(prefixes):
    tokens = {"prefix": 70_001, "middle": 70_002, "suffix": 70_003}
    with pytest.raises(OptionError, match="its tokens are uint16, which does not hold all ids of the sentinels"):
        build([None] * 3, config((prefixes[:1], None), 32, fim_rate=0.5, fim_extra_tokens=tokens))
    with pytest.raises(OptionError, match="not all sentinels, 64001, 64002, 64003, are in the model's vocabulary"):
        build([None] * 3, config((prefixes[:1], None), 32, **FIM, model_vocab_size=64_003))
