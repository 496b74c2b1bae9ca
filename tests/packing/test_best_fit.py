"""The plan on the histogram, and the examples in the docstrings of packing."""

import doctest

import numpy as np
import pytest
from helpers.oracle import best_fit_decreasing, best_fit_decreasing_capped

from megatron_bfp.packing import best_fit, packed
from megatron_bfp.packing.best_fit import Move, OpenRuns, Run, plan_runs


def contents(runs, remainders):
    """The lengths in each sequence of the runs, sorted."""
    lengths = np.repeat(np.arange(len(remainders))[::-1], remainders[::-1])  # of all chunks, longest first
    sequences = []
    for run in runs:
        for sequence in range(run.first_sequence, run.first_sequence + run.num_sequences):
            held, move = [], run.last_move
            while move is not None:
                start = move.start + (sequence - move.first_sequence) * move.per_sequence
                held += lengths[start : start + move.per_sequence].tolist()
                move = move.previous
            assert len(held) == run.chunks
            sequences.append(sorted(held))
    return sorted(sequences)


@pytest.mark.parametrize("cap", [None, 1, 2, 5])
def test_a_plan_holds_the_same_sequences_as_packing_one_chunk_at_a_time(cap):
    rng = np.random.default_rng(7)
    for _ in range(100):
        seq_length = int(rng.integers(2, 60))
        lengths = rng.integers(1, seq_length, rng.integers(0, 120))
        remainders = np.bincount(lengths, minlength=seq_length)
        runs = plan_runs(remainders, seq_length, cap)
        firsts = [run.first_sequence for run in runs]
        assert firsts == [0, *np.cumsum([run.num_sequences for run in runs]).tolist()][: len(runs)]
        if cap is None:
            assert contents(runs, remainders) == sorted(map(sorted, best_fit_decreasing(lengths.tolist(), seq_length)))
        else:
            oracle = best_fit_decreasing_capped(lengths.tolist(), seq_length, cap)
            assert len(contents(runs, remainders)) == len(oracle)


def test_the_best_fit_is_taken_and_new_sequences_are_opened_only_if_none_holds_the_chunk():
    open_runs = OpenRuns(seq_length=10)
    wide, narrow = Run(0, 2, 1, Move(0, 1, 0, None), 25), Run(2, 1, 1, Move(2, 1, 2, None), 49)
    open_runs.put(wide, 5)
    open_runs.put(narrow, 3)
    assert open_runs.take(3, num_chunks=1) == (narrow, 3, 1)
    assert open_runs.take(2, num_chunks=9) == (wide, 5, 2)
    three_new = Run(0, 3, 0, None, 0)  # for five chunks, two in each
    assert open_runs.take(4, num_chunks=5) == (three_new, 10, 2)


def test_with_a_cap_the_sequence_with_most_chunks_is_taken_and_full_ones_are_closed():
    open_runs = OpenRuns(seq_length=10, max_documents_per_sequence=3)
    one, two, three = (Run(chunks, 1, chunks, None, 36) for chunks in (1, 2, 3))
    for run in (one, two, three):
        open_runs.put(run, 4)
    assert open_runs.take(2, num_chunks=1) == (two, 4, 1)  # space for two chunks, but the cap leaves one
    assert open_runs.take(2, num_chunks=1) == (one, 4, 2)
    assert open_runs.runs() == [three]


@pytest.mark.parametrize("module", [best_fit, packed])
def test_the_examples_in_the_docstrings_hold(module):
    result = doctest.testmod(module, extraglobs={"pack": packed.pack})
    assert result.attempted > 0 and result.failed == 0
