"""Fill-in-the-middle: every sample can be turned back into the documents, and nothing is cut for it."""

from collections import Counter

import numpy as np
import pytest
from helpers.datasets import documents_of, write
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bfp import OptionError
from megatron_bfp.packing.census import take_census
from megatron_bfp.packing.chunks import ChunkSpan
from megatron_bfp.packing.packed import pack
from megatron_bfp.samples.fill_in_the_middle import (
    VECTORISED,
    FimDocuments,
    FimEpoch,
    FimForm,
    FimLengths,
    FimTokens,
    RearrangedSpan,
)
from megatron_bfp.samples.sample import build_sample
from megatron_bfp.sequence_index.split import PackedSplit
from megatron_bfp.sequence_index.verify import verify

EOD, PREFIX, MIDDLE, SUFFIX = 60_000, 60_001, 60_002, 60_003
TOKENS = FimTokens(PREFIX, MIDDLE, SUFFIX, EOD)
SEED = 7


def with_eod(lengths):
    """Documents of these lengths, of which every third has no EOD. All other tokens differ."""
    documents = documents_of(lengths)
    return [[*document[:-1], EOD] if document and i % 3 else document for i, document in enumerate(documents)]


def original(shown):
    """The document that a rearranged one was made of, and its form."""
    assert [shown.count(token) for token in (PREFIX, SUFFIX, MIDDLE)] == [1, 1, 1] and shown[0] == PREFIX
    suffix, middle = shown.index(SUFFIX), shown.index(MIDDLE)
    end = [EOD] if shown[-1] == EOD else []
    rest = shown[middle + 1 : len(shown) - len(end)]
    if suffix > 1:
        return [*shown[1:suffix], *rest, *shown[suffix + 1 : middle], *end]
    # after an empty prefix both forms look alike, up to what is in the rest
    return [*rest, *shown[suffix + 1 : middle], *end]


def rearranged(epoch, document, tokens):
    """The tokens of a document as an epoch shows them."""
    shown = np.zeros(len(tokens) + 3, dtype=tokens.dtype)
    epoch.write(document, tokens, shown)
    return shown


def chunks_of(sample, targets_only):
    """Each chunk of a sample as a list: its inputs, and with targets only its last target."""
    boundaries = [b for b in sample.cu_seqlens.tolist()]
    for start, end in zip(boundaries, boundaries[1:]):
        if start < end and (sample.tokens[start:end].any() or sample.loss_mask[start:end].any()):
            last = [sample.labels[end - 1].item()] if targets_only else []
            yield [*sample.tokens[start:end].tolist(), *last]


def samples_of(dataset, seq_length, epochs, rate=0.5, **options):
    """The samples of some epochs, and the split."""
    spm_rate, seed = options.pop("spm_rate", 0.5), options.pop("seed", SEED)
    split = PackedSplit.open(dataset, seq_length, None, fim=FimDocuments(rate, seed), **options)
    form = FimForm(TOKENS, spm_rate)
    samples = []
    for number in range(epochs * len(split)):
        spans = split.chunk_spans(number, seed)
        samples.append(build_sample(dataset, spans, seq_length, fim=split.fim_epoch(number, form)))
    return samples, split


@settings(max_examples=80, deadline=None)
@given(
    data=st.data(),
    seq_length=st.integers(1, 24),
    rate=st.sampled_from([0.25, 0.5, 1]),
    targets_only=st.booleans(),
    even=st.booleans(),
)
def test_three_epochs_are_turned_back_into_the_documents(data, seq_length, rate, targets_only, even, tmp_path_factory):
    lengths = data.draw(
        st.lists(st.sampled_from([0, 1, 2, seq_length - 3, seq_length, seq_length + 1]) | st.integers(0, 60))
    )
    documents = with_eod([max(0, length) for length in lengths])
    dataset = write(tmp_path_factory.mktemp("data") / "data", documents)
    samples, split = samples_of(dataset, seq_length, 3, rate, targets_only=targets_only, even_sequences=even)
    verify(split.index.path, dataset)
    expected = Counter(tuple(document[: len(document)]) for document in documents if len(document) > targets_only)
    for epoch in range(3):
        whole, parts = Counter(), []
        for sample in samples[epoch * len(split) : (epoch + 1) * len(split)]:
            assert not targets_only or np.array_equal(sample.loss_mask > 0, sample.tokens > 0)
            for chunk in chunks_of(sample, targets_only):
                if PREFIX in chunk:
                    whole[tuple(original(chunk))] += 1
                else:
                    parts.append(chunk)
        rearranged = sum(whole.values())
        assert rearranged == split.index.counts["fim_documents"]
        assert whole - expected == Counter()  # those that were rearranged are whole documents
        plain = Counter(token for part in parts for token in (part[:-1] if targets_only else part))
        left = expected - whole
        assert plain == Counter(
            token for document, times in left.items() for token in document[: len(document) - targets_only] * times
        )
        labels = Counter()
        for sample in samples[epoch * len(split) : (epoch + 1) * len(split)]:
            labels.update(sample.labels[sample.loss_mask > 0].tolist())
        targets = Counter(token for document, times in left.items() for token in document[1:] * times)
        sentinels = {SUFFIX: rearranged, MIDDLE: rearranged}
        targets += Counter(token for document, times in whole.items() for token in document * times) + Counter(
            sentinels
        )
        assert labels == +targets


def test_the_two_forms_in_full():
    tokens = np.array([1, 2, 3, 4, 5, 6, EOD], dtype=np.uint16)
    seen = set()
    for epoch in range(300):
        psm, spm = (rearranged(FimEpoch(FimForm(TOKENS, rate), SEED, epoch), 3, tokens).tolist() for rate in (0, 1))
        first = psm.index(SUFFIX) - 1
        suffix = psm.index(MIDDLE) - first - 2
        text, second = [1, 2, 3, 4, 5, 6], 6 - suffix
        assert psm == [PREFIX, *text[:first], SUFFIX, *text[second:], MIDDLE, *text[first:second], EOD]
        assert spm == [PREFIX, SUFFIX, *text[second:], MIDDLE, *text[:second], EOD]
        parts = {"prefix": text[:first], "suffix": text[second:], "middle": text[first:second]}
        for shown, rate in ((psm, 0), (spm, 1)):
            split = FimEpoch(FimForm(TOKENS, rate), SEED, epoch).parts(3, tokens)
            assert {name: shown[begin:end] for name, begin, end in split} == parts and len(split) == 3
        seen.add((first, second))
    assert seen == {(a, b) for b in range(7) for a in range(b + 1)}  # every split occurs


def chosen_in_sequences(fim, number, count):
    """Whether each of the first documents, of 10 tokens each, is rearranged in sequences of ``count`` documents."""
    are_rearranged = []
    for first in range(0, number, count):
        documents = np.arange(first, min(first + count, number))
        spans = [(10 * document, 10 * document + 10) for document in documents.tolist()]
        chunks = [ChunkSpan(start // 10, start, end, end) for start, end in spans]
        rearranged = fim.rearrange(chunks, documents, spans, longest=10, targets_only=False)
        are_rearranged += [type(chunk) is RearrangedSpan for chunk in chunks]
        assert rearranged == sum(are_rearranged[first:])
    return are_rearranged


def test_the_share_of_rearranged_documents_and_of_spm_is_that_asked_for():
    """Within four standard deviations, of numbers next to each other, which a bad hash would not mix."""
    number = 200_000
    for rate in (0.1, 0.5, 0.9):
        for seed in (0, 1234):
            chosen = FimDocuments(rate, seed).are_chosen(np.arange(number))
            deviation = (number * rate * (1 - rate)) ** 0.5
            assert abs(chosen.sum() - number * rate) < 4 * deviation
            pairs = (chosen[1:] & chosen[:-1]).sum()
            assert abs(pairs - number * rate**2) < 5 * (number * rate**2) ** 0.5
            for count in (1, VECTORISED - 1, VECTORISED, 40):  # in a sequence: by Python or by numpy
                assert chosen_in_sequences(FimDocuments(rate, seed), 120, count) == chosen[:120].tolist()
    both = FimDocuments(0.5, 1).are_chosen(np.arange(number)) & FimDocuments(0.5, 2).are_chosen(np.arange(number))
    assert abs(both.sum() - number / 4) < 4 * (number * 3 / 16) ** 0.5  # another seed chooses others
    assert FimDocuments(1, 3).are_chosen(np.arange(1000)).all()
    tokens = np.arange(1, 40, dtype=np.uint16)
    form = FimForm(TOKENS, 0.3)
    spm = sum(rearranged(FimEpoch(form, SEED, 0), document, tokens)[1] == SUFFIX for document in range(3000))
    empty_prefix = 3000 * 0.7 / 40  # of PSM, about: these look like SPM
    assert abs(spm - 900 - empty_prefix * 2) < 5 * (3000 * 0.21) ** 0.5 + empty_prefix


def test_splits_differ_between_epochs_and_documents_do_not(write_dataset):
    dataset = write_dataset(with_eod([30] * 40))
    samples, split = samples_of(dataset, 33, 2)
    shown = [
        {tuple(sorted(chunk)): chunk for sample in part for chunk in chunks_of(sample, False) if PREFIX in chunk}
        for part in (samples[: len(split)], samples[len(split) :])
    ]
    assert shown[0].keys() == shown[1].keys() and 10 < len(shown[0]) < 30
    assert sum(shown[0][name] == shown[1][name] for name in shown[0]) < 4
    again, _ = samples_of(dataset, 33, 2)
    for one, other in zip(samples, again, strict=True):  # as in a run that is resumed, or on other ranks
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 60), max_size=40), st.integers(1, 30), st.booleans())
def test_sequences_are_as_many_as_best_fit_makes_of_the_longer_documents(lengths, seq_length, targets_only):
    lengths = np.array(lengths, dtype=np.int32)
    longest = seq_length - 3 + targets_only
    fim = FimDocuments(0.5, SEED)
    chosen = np.array([bool(fim.are_chosen(np.array([i]))[0]) for i in range(len(lengths))], dtype=bool)
    expected = [
        length + 3 if is_chosen and 2 <= length <= longest else length
        for length, is_chosen in zip(lengths.tolist(), chosen)
    ]
    longer = FimLengths(lengths, fim, longest, 0)
    assert longer[0 : len(lengths)].tolist() == expected and longer[5:9].tolist() == expected[5:9]
    packing = pack(expected, seq_length, targets_only=targets_only)
    for i in range(len(packing)):
        for document, _, length in packing[i].tolist():
            if expected[document] != lengths[document]:
                assert length == expected[document] - targets_only  # none of them is cut
    assert take_census(longer, seq_length).num_tokens == sum(expected)


def test_impossible_values_are_refused():
    for rate in (0, -0.5, 1.5, float("nan"), 0.1234567):
        with pytest.raises(OptionError, match="--fim-rate"):
            FimDocuments(rate, 1)
    with pytest.raises(OptionError, match="--fim-spm-rate"):
        FimForm(TOKENS, 1.1)
    with pytest.raises(OptionError, match="--seed"):
        FimDocuments(0.5, -1)


def test_a_sample_without_a_form_is_refused(write_dataset):
    dataset = write_dataset(with_eod([10] * 20))
    split = PackedSplit.open(dataset, 13, None, fim=FimDocuments(1, SEED))
    with pytest.raises(ValueError, match="say how they are shown"):
        build_sample(dataset, split.chunk_spans(0, SEED), 13)
