"""BFPGPTDataset in megatron-core's blends."""

import os
from collections import Counter

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core.datasets.gpt_dataset")

from helpers.datasets import documents_of, write
from helpers.megatron_helpers import build, config
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets.blended_dataset import BlendedDataset
from test_gpt_dataset import counts

from megatron_bfp import OptionError, pack
from megatron_bfp.indexed_dataset.reader import IndexedDataset


@pytest.fixture
def corpora(tmp_path):
    """Three corpora without a token in common."""
    lengths = [[5, 12, 3, 16], [40, 2, 2], [1] * 30]
    starts = [1, 1000, 2000]
    return [write(tmp_path / f"corpus{i}", documents_of(lengths[i], first_token=starts[i])).prefix for i in range(3)]


def test_an_exhaustive_blend_keeps_the_invariant(corpora):
    blend = build([None] * 3, config((corpora, None)))[0]
    assert isinstance(blend, BlendedDataset)
    inputs, targets = counts(blend[i] for i in range(len(blend)))
    documents = [IndexedDataset(prefix) for prefix in corpora]
    documents = [d.document(i).tolist() for d in documents for i in range(d.num_documents)]
    assert inputs == Counter(token for document in documents for token in document)
    assert targets == Counter(token for document in documents for token in document[1:])


def test_with_targets_only_every_input_of_a_blend_has_a_target(corpora):
    blend = build([None] * 3, config((corpora[:2], None), targets_only=True))[0]
    samples = [blend[i] for i in range(len(blend))]
    assert all(torch.equal(sample["loss_mask"] > 0, sample["tokens"] > 0) for sample in samples)
    inputs, targets = counts(samples)
    documents = [IndexedDataset(prefix) for prefix in corpora[:2]]
    documents = [d.document(i).tolist() for d in documents for i in range(d.num_documents)]
    assert inputs == Counter(token for document in documents for token in document[:-1])
    assert targets == Counter(token for document in documents for token in document[1:])
    with pytest.raises(OptionError, match="documents 0 to 30 of 30, has no targets; take it out of the blend"):
        build([None] * 3, config((corpora, None), targets_only=True))  # the third has documents of one token


@settings(max_examples=20, deadline=None)
@given(
    corpora=st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=15).filter(any), min_size=2, max_size=4),
    weights=st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4),
    seq_length=st.integers(1, 12),
)
def test_the_invariant_holds_for_each_corpus_of_any_blend(corpora, weights, seq_length, tmp_path_factory):
    """A weighted blend is drawn until it has gone through each corpus once; of each, the first epoch is looked at."""
    folder = tmp_path_factory.mktemp("blend")
    documents = [documents_of(lengths, first_token=1 + 700 * i) for i, lengths in enumerate(corpora)]
    prefixes = [write(folder / f"corpus{i}", documents[i]).prefix for i in range(len(corpora))]
    weights = weights[: len(corpora)]
    epochs = [len(pack(lengths, seq_length)) for lengths in corpora]
    size = 2 + int(max(epoch * sum(weights) / weight for epoch, weight in zip(epochs, weights)))
    blend = build([size, 0, 0], config((prefixes, weights), seq_length))[0]
    drawn = [[], [], [], []]
    for i in range(len(blend)):
        sample = blend[i]
        drawn[sample["dataset_id"]].append(sample)
    for corpus, samples, epoch in zip(documents, drawn, epochs):
        assert len(samples) >= epoch
        inputs, targets = counts(samples[:epoch])
        assert inputs == Counter(token for document in corpus for token in document)
        assert targets == Counter(token for document in corpus for token in document[1:])


@pytest.mark.case(25)
@pytest.mark.parametrize("weights", [[0.5, 0.3, 0.2], [0.001, 0.999, 0.001], [1e-6, 1.0, 1.0]])
@pytest.mark.parametrize("size", [1, 17, 500])
def test_weighted_blends_reach_their_last_sample(corpora, weights, size):
    blend = build([size, 0, 0], config((corpora, weights)))[0]
    assert len(blend) >= size
    for i in range(len(blend)):
        sample = blend[i]
        first_token = [1, 1000, 2000][sample["dataset_id"]]
        used = sample["tokens"][sample["tokens"] > 0]
        assert first_token <= used.min() and used.max() < first_token + 1000
    drawn = Counter(int(blend[i]["dataset_id"]) for i in range(len(blend)))
    if size == 500:
        for i, weight in enumerate(weights):
            assert abs(drawn[i] / len(blend) - weight / sum(weights)) < 0.01


def test_each_corpus_of_a_blend_is_drawn_epoch_by_epoch(corpora):
    blend = build([200, 0, 0], config((corpora, [0.5, 0.3, 0.2])))[0]
    drawn = [[], [], []]
    for i in range(len(blend)):
        drawn[blend.dataset_index[i]].append(int(blend.dataset_sample_index[i]))
    assert all(samples == list(range(len(samples))) for samples in drawn)


def test_a_blend_for_each_split(corpora):
    per_split = [(corpora[:2], [0.4, 0.6]), (corpora[2:], None), None]
    train, valid, test = build([50, 4, 0], config(None, blend_per_split=per_split))
    assert len(train) >= 50 and test is None
    assert valid.sequence_index.key.name == "s8-d0-30"


@pytest.mark.case(27)
def test_an_empty_corpus_in_a_blend_is_named_with_its_split(corpora, tmp_path):
    empty = write(tmp_path / "empty", [[]]).prefix
    for blend, sizes in (
        (([*corpora, empty], None), [None] * 3),
        (([*corpora, empty], [1.0] * 4), [10, 0, 0]),
        (([empty], [1.0]), [10, 0, 0]),
    ):
        with pytest.raises(OptionError, match="empty: the train split"):
            build(sizes, config(blend))


def test_fault_D05_an_empty_corpus_is_allowed_where_validation_sets_stay_apart(corpora, tmp_path):
    empty = write(tmp_path / "empty", [[]]).prefix
    mixed, plain = ([corpora[0], empty], None), (corpora[:2], None)

    def build_with(train, valid, is_multiple):
        return build(
            [None] * 3, config(None, blend_per_split=[train, valid, None], multiple_validation_sets=is_multiple)
        )

    valid = build_with(plain, mixed, True)[1]
    assert [len(dataset) for dataset in valid] == [len(pack([5, 12, 3, 16], 8)), 0]
    for train, valid, is_multiple, split in (
        (plain, mixed, False, "valid"),
        (plain, mixed, None, "valid"),
        (mixed, plain, True, "train"),
    ):
        with pytest.raises(OptionError, match=f"empty: the {split} split"):
            build_with(train, valid, is_multiple)


@pytest.mark.case(11)
def test_a_blend_s_cache_follows_the_data(corpora, tmp_path):
    def description():
        return build([20, 0, 0], config((corpora[:2], [0.5, 0.5])))[0].unique_description

    before = description()
    assert description() == before
    write(tmp_path / "corpus0", documents_of([5, 12, 3, 15]))
    os.rename(tmp_path / "corpus0.bfp", tmp_path / "old")
    assert description() != before
