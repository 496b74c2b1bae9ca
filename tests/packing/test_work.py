"""The work of a sequence: known without a look at its documents."""

import numpy as np
import pytest
from helpers.datasets import DATA
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bfp import pack


def squares(packing):
    """The work of each sequence, from its chunks."""
    return [int((packing[sequence][:, 2] ** 2).sum()) for sequence in range(len(packing))]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 40), max_size=60),
    st.integers(1, 24),
    st.one_of(st.none(), st.integers(1, 5)),
)
def test_the_work_of_a_sequence_is_that_of_its_chunks(lengths, seq_length, cap):
    packing = pack(lengths, seq_length, cap)
    assert packing.work.dtype == np.int64 and packing.work.tolist() == squares(packing)


def test_the_work_of_real_lengths_and_of_sequences_in_any_shape():
    packing = pack(np.load(DATA / "text_lengths.npy")[:4000], 2048)
    work = packing.work
    assert work.tolist() == squares(packing) and work.max() == 2048**2
    chosen = np.array([[0, len(packing) - 1], [17, 17]])
    assert np.array_equal(packing.table.work(chosen), work[chosen])
    assert packing.table.work(5) == work[5] and packing.table.work([]).shape == (0,)


def test_runs_of_equal_chunks_and_other_work_stay_apart():
    packing = pack([7, 1, 6, 2, 5, 3], 8)
    assert packing.work.tolist() == [50, 40, 34]
    assert len(packing.table.runs) == 3
    joined = packing.table.runs[:, 2] == packing.table.runs[0, 2]  # the control: by chunks alone they were one run
    assert joined.all()


@pytest.mark.parametrize("sequences", [3, -1, [0, 3], [[-1]]])
def test_a_sequence_that_is_not_there_has_no_work(sequences):
    with pytest.raises(IndexError, match=r"\[0, 3\)"):
        pack([8, 8, 3], 8).table.work(sequences)
