"""Even sequences: as whole and about as few as best fit's, with about equally many documents, at the same cost."""

import hashlib

import numpy as np
import pytest
from helpers.datasets import DATA
from helpers.oracle import best_fit_decreasing
from helpers.packings import assert_whole, random_lengths
from hypothesis import given, settings
from hypothesis import strategies as st

import megatron_bfp
from megatron_bfp.packing import best_fit, dealing
from megatron_bfp.packing.best_fit import Run, plan_runs
from megatron_bfp.packing.bounds import lower_bound_of_remainders
from megatron_bfp.packing.dealing import Dealing, SortedChunks
from megatron_bfp.packing.even import plan_even_runs, unevenness
from megatron_bfp.packing.gaps import Gaps, TooManySequences, room_to_leave


def corpus(name):
    """Lengths with EOD: real ones, or 100,000 simulated ones of web text."""
    if name in ("text", "code"):
        return np.load(DATA / f"{name}_lengths.npy") + 1
    mean, deviation = {"web": (5.84, 0.98), "short web": (5.55, 1.15), "long web": (6.33, 1.1)}[name]
    return np.ceil(np.random.default_rng(5).lognormal(mean, deviation, 100_000)).astype(np.int64)


def remainders_of(lengths, seq_length):
    """Number of remainder chunks of each length."""
    counts = np.bincount(lengths % seq_length, minlength=seq_length)
    counts[0] = 0
    return counts


def documents_per_sequence(runs):
    """Chunks of each sequence, ascending."""
    return np.sort(np.repeat([run.chunks for run in runs], [run.num_sequences for run in runs]))


def allowed(num_sequences):
    """The most sequences for a corpus that best fit packs into ``num_sequences``."""
    return num_sequences + 1 + num_sequences // 5000


def is_even(runs, seq_length):
    """Whether the documents per sequence are within the bounds that even sequences promise."""
    documents = documents_per_sequence(runs)
    percentile = documents[-(len(documents) // 100) - 1]
    if seq_length == 2048:
        return percentile <= 20
    return documents.mean() < 8 or (percentile <= 1.5 * documents.mean() and documents[-1] <= 2.5 * documents.mean())


def assert_consecutive(runs):
    """Each sequence is in one run, none is empty."""
    assert [run.first_sequence for run in runs] == [0, *np.cumsum([run.num_sequences for run in runs]).tolist()][:-1]
    assert all(run.num_sequences > 0 and run.chunks > 0 for run in runs)


@pytest.mark.parametrize("seq_length", [2048, 8192, 32768, 131072])
@pytest.mark.parametrize(
    "name", ["text", "code", "web", *(pytest.param(name, marks=pytest.mark.slow) for name in ("short web", "long web"))]
)
def test_sequences_are_as_few_as_best_fits_and_hold_about_equally_many_documents(name, seq_length):
    remainders = remainders_of(corpus(name), seq_length)
    runs, best_fit_runs = plan_even_runs(remainders, seq_length), plan_runs(remainders, seq_length)
    assert_consecutive(runs)
    documents, best_fit_documents = documents_per_sequence(runs), documents_per_sequence(best_fit_runs)
    assert documents.sum() == remainders.sum()
    assert len(documents) <= allowed(len(best_fit_documents))
    assert is_even(runs, seq_length)
    if best_fit_documents.mean() >= 8:  # the control
        assert not is_even(best_fit_runs, seq_length)


@pytest.mark.parametrize("name, seq_length", [("text", 8192), ("code", 32768)])
def test_the_work_of_sequences_is_more_even_too(name, seq_length):
    lengths = corpus(name)
    deviations = []
    for evenly in (False, True):
        packing = megatron_bfp.pack(lengths, seq_length, even=evenly)
        work = [
            float((packing[i][:, 2].astype(float) ** 2).sum())
            for i in range(packing.census.num_full_chunks, len(packing))
        ]
        deviations.append(np.std(work) / seq_length**2)
    assert deviations[1] < 0.95 * deviations[0]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 70), max_size=80), st.integers(1, 40), st.none() | st.integers(1, 6))
def test_every_chunk_is_in_exactly_one_sequence(lengths, seq_length, cap):
    packing = megatron_bfp.pack(lengths, seq_length, cap, even=True)
    assert_whole(packing, lengths, seq_length)
    assert len(packing) <= allowed(len(megatron_bfp.pack(lengths, seq_length, cap)))
    assert cap is None or all(len(packing[i]) <= cap for i in range(len(packing)))


@pytest.mark.parametrize("cap", [None, 2, 8])
def test_lengths_that_are_hard_in_different_ways(cap):
    rng = np.random.default_rng(17)
    for _ in range(60):
        seq_length = int(rng.integers(1, 400))
        lengths = random_lengths(rng, seq_length)
        packing = megatron_bfp.pack(lengths, seq_length, cap, even=True)
        assert_whole(packing, lengths, seq_length)
        assert len(packing) <= allowed(len(megatron_bfp.pack(lengths, seq_length, cap)))
        assert cap is None or max((len(packing[i]) for i in range(len(packing))), default=0) <= cap


@pytest.mark.parametrize(
    "lengths, num_sequences",
    [
        ([], 0),
        ([0, 0], 0),
        ([3], 1),
        ([8] * 3, 3),
        ([4] * 1001, 501),
        ([3] * 1000, 500),
        ([5] * 1000, 1000),
        ([1] * 10_000, 1250),
        ([7] * 1000 + [1] * 1000, 1000),
        ([7] * 1000 + [1] * 8, 1000),
        ([5] * 500 + [1] * 5000, 938),
    ],
)
def test_odd_corpora(lengths, num_sequences):
    packing = megatron_bfp.pack(lengths, 8, even=True)
    assert len(packing) == num_sequences
    assert_whole(packing, lengths, 8)


def test_a_few_empty_sequences_among_full_ones_do_not_take_a_round_for_each_chunk():
    remainders = np.bincount([120_000] * 1000 + [10] * 11_000, minlength=131_072)
    chunks = SortedChunks(remainders)
    dealt = Dealing(chunks, 131_072, 1001, None)
    dealt.deal(chunks.number)
    assert dealt.next_chunk == chunks.number and len(dealt._rounds) < 100


def test_much_space_is_shared_evenly_too():
    """Half of each sequence is taken by one chunk, and tiny ones could all go into a few of the other halves."""
    lengths = np.concatenate([np.full(500, 513), np.random.default_rng(2).integers(1, 9, 20_000)])
    remainders = np.bincount(lengths, minlength=1024)
    documents = documents_per_sequence(plan_even_runs(remainders, 1024))
    assert len(documents) == 500 and documents[-1] <= 1.25 * documents.mean()
    assert documents_per_sequence(plan_runs(remainders, 1024))[-1] > 2.5 * documents.mean()  # the control


@pytest.mark.parametrize("cap", [24, 40, 100])
def test_a_cap_is_kept_without_the_padding_that_it_costs_best_fit(cap):
    remainders = remainders_of(corpus("text"), 8192)
    runs, without_cap = plan_even_runs(remainders, 8192, cap), plan_runs(remainders, 8192)
    assert documents_per_sequence(runs)[-1] <= cap
    needed = len(documents_per_sequence(without_cap))
    assert len(documents_per_sequence(runs)) <= 1.01 * needed
    assert len(documents_per_sequence(plan_runs(remainders, 8192, cap))) > 1.02 * needed  # the control


def test_a_plan_does_not_depend_on_the_order_or_dtype_of_documents():
    lengths = corpus("code")
    packing = megatron_bfp.pack(lengths, 8192, even=True)
    for other in (np.random.default_rng(3).permutation(lengths), np.sort(lengths), lengths.astype(np.uint64)):
        same = megatron_bfp.pack(other, 8192, even=True)
        assert np.array_equal(packing.table.runs, same.table.runs)
        assert np.array_equal(lengths[packing.table.document_ids] % 8192, other[same.table.document_ids] % 8192)


def test_a_plan_is_the_same_on_every_machine():
    packing = megatron_bfp.pack(corpus("code"), 8192, even=True)
    document_ids = packing.table.document_ids.astype("<u4").tobytes()
    assert hashlib.sha256(document_ids).hexdigest()[:32] == "1f5e734a9c128ddfe2d85ab1584684ed"


def test_without_even_nothing_changes():
    lengths = corpus("code")
    packing, default = megatron_bfp.pack(lengths, 8192, even=False), megatron_bfp.pack(lengths, 8192)
    assert np.array_equal(packing.table.document_ids, default.table.document_ids)
    oracle = sorted(sorted(sequence) for sequence in best_fit_decreasing(lengths.tolist(), 8192))
    assert sorted(sorted(packing[i][:, 2].tolist()) for i in range(len(packing))) == oracle
    evenly = megatron_bfp.pack(lengths, 8192, even=True)  # the control
    assert sorted(sorted(evenly[i][:, 2].tolist()) for i in range(len(evenly))) != oracle


def test_the_longest_document_of_a_sequence_comes_first():
    packing = megatron_bfp.pack(corpus("web"), 8192, even=True)
    for i in range(0, len(packing), 50):
        assert np.all(np.diff(packing[i][:, 2]) <= 0)


@pytest.mark.parametrize("seq_length", [2048, 8192])
def test_the_cost_does_not_grow_with_the_number_of_documents(seq_length, monkeypatch):
    """Counts moves, in numpy and in Python, of all plans that are tried."""
    counted = []
    monkeypatch.setattr(
        best_fit, "_fill", lambda *arguments, fill=best_fit._fill: counted.append(1) or fill(*arguments)
    )
    deal = Dealing.deal
    monkeypatch.setattr(Dealing, "deal", lambda self, end: (deal(self, end), counted.extend([1] * self.num_moves)))
    moves = []
    for times in (1, 100):
        counted.clear()
        runs = plan_even_runs(remainders_of(corpus("web"), seq_length) * times, seq_length)
        moves.append(len(counted))
    assert documents_per_sequence(runs).sum() >= 100 * 90_000
    assert moves[1] < 3 * moves[0]
    assert len(runs) < 3 * seq_length


def test_the_example_of_dealing():
    chunks = SortedChunks(np.bincount([6, 5, 4, 3, 3, 2, 1, 1], minlength=10))
    dealt = Dealing(chunks, 10, 3, None)
    for num_chunks, spaces in ((3, [4, 5, 6]), (6, [2, 2, 3]), (7, [2, 2, 2]), (8, [2, 2, 1])):
        dealt.deal(num_chunks)
        by_sequence = {run.first_sequence + i: space for run, space in dealt.runs() for i in range(run.num_sequences)}
        assert [by_sequence[sequence] for sequence in range(3)] == spaces


def test_dealing_stops_at_a_chunk_that_fits_nowhere():
    chunks = SortedChunks(np.bincount([6, 6, 6], minlength=10))
    dealt = Dealing(chunks, 10, 2, None)
    dealt.deal(3)
    assert dealt.next_chunk == 2


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 39), min_size=1, max_size=120), st.integers(1, 12), st.none() | st.integers(1, 9))
def test_dealing_gives_each_chunk_once_and_keeps_spaces_close_together(lengths, num_sequences, cap):
    chunks = SortedChunks(np.bincount(lengths, minlength=4000))
    dealt = Dealing(chunks, 4000, num_sequences, cap)
    dealt.deal(len(lengths))
    runs = [run for run, _ in dealt.runs()]
    assert sum(run.num_sequences for run in runs) == num_sequences
    assert sum(run.num_sequences * run.chunks for run in runs) == dealt.next_chunk
    if cap is None:
        spaces = [space for _, space in dealt.runs()]
        assert dealt.next_chunk == len(lengths)
        assert max(spaces) - min(spaces) <= 2 * max(lengths) * max(
            1, len(lengths) // num_sequences // dealing.BUNDLES_LEFT
        )
    else:
        assert dealt.next_chunk == min(len(lengths), cap * num_sequences)
        assert max(run.chunks for run in runs) <= cap


def test_a_gap_is_filled_exactly_or_left_with_room():
    gaps = Gaps(seq_length=20, cap=None, num_sequences=4, most_sequences=4)
    for sequence, space in enumerate((5, 6, 9, 12)):
        gaps.put(Run(sequence, 1, 1, None, 0), space)
    gaps.room = {6: 4, 5: 4, 8: 0, 13: 0}
    assert gaps.take(6, 1) == (Run(1, 1, 1, None, 0), 6, 1)  # exactly
    assert gaps.take(6, 1) == (Run(3, 1, 1, None, 0), 12, 2)  # 9 would leave 3
    assert gaps.take(8, 1) == (Run(2, 1, 1, None, 0), 9, 1)  # best fit
    with pytest.raises(TooManySequences):
        gaps.take(13, 1)


def test_room_is_left_for_a_later_chunk():
    chunks = SortedChunks(np.bincount([9, 7, 6, 4, 4, 2, 2, 1], minlength=10))
    assert room_to_leave(chunks, 1, 5) == {7: 4, 6: 4, 4: 2, 2: 0, 1: 0}  # 2, 2 and 1 come after a 4


def test_unevenness_is_five_times_the_percentile_or_three_times_the_largest():
    assert unevenness([Run(0, 99, 10, None, 0), Run(99, 1, 12, None, 0)]) == 50
    assert unevenness([Run(0, 99, 10, None, 0), Run(99, 1, 20, None, 0)]) == 60
    assert unevenness([Run(0, 98, 10, None, 0), Run(98, 2, 12, None, 0)]) == 60


def test_the_bound_of_remainders_leaves_out_full_chunks():
    census = megatron_bfp.pack([20, 5, 5], 8).census
    assert lower_bound_of_remainders(census.remainders, 8) == 3


@pytest.mark.parametrize("value", [1, "yes", None])
def test_a_bad_even_is_named(value):
    with pytest.raises(megatron_bfp.OptionError, match="even must be True or False"):
        megatron_bfp.pack([3], 8, even=value)
    assert len(megatron_bfp.pack([3], 8, even=np.True_)) == 1
