"""The one type of boundaries: made of a micro-batch's rows, or of rows that were joined before."""

import pickle

import pytest

pytest.importorskip("torch")

import torch

from megatron_bfp import OptionError
from megatron_bfp.attention.boundaries import Boundaries, InvalidBoundaries, join_rows

CU_SEQLENS = torch.tensor([[0, 5, 6] + [12] * 10, [0, 12] + [12] * 11], dtype=torch.int32)


def test_rows_are_joined_with_their_boundaries():
    boundaries = Boundaries.of_rows(CU_SEQLENS)
    assert boundaries.offsets == [0, 5, 6, 12, 24]
    assert boundaries.cu_seqlens.dtype == torch.int32 and boundaries.cu_seqlens.tolist() == boundaries.offsets
    assert boundaries.max_seqlen == 12
    assert Boundaries.of_rows(torch.tensor([[0, 1]])).offsets == [0, 1]


@pytest.mark.parametrize("row", [[1, 2, 3], [0, 2, 1, 3], [0, 1, 1], [0]])
def test_boundaries_that_do_not_cover_a_row_are_refused(row):
    with pytest.raises(OptionError, match="cu_seqlens"):
        Boundaries.of_rows(torch.tensor([row], dtype=torch.int32))


def test_rows_whose_lengths_only_add_up_are_refused():
    with pytest.raises(OptionError, match="from 0 to 3, the sequence length, in every row"):
        Boundaries.of_rows(torch.tensor([[0, 2, 4, 4], [0, 2, 2, 2]], dtype=torch.int32))


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_a_single_row_that_ends_elsewhere_is_refused(wrong):
    rows = torch.tensor([[0, 2, 3, 3]] * 3, dtype=torch.int32)
    assert Boundaries.of_rows(rows).offsets[-1] == 9
    for length in (2, 4):
        rows[wrong, 2:] = length
        with pytest.raises(OptionError, match="from 0 to 3, the sequence length, in every row"):
            Boundaries.of_rows(rows)


def test_rows_that_were_joined_before_have_the_same_boundaries():
    joined = torch.tensor([0, 5, 6, 12, 12, 24], dtype=torch.int32)
    again, boundaries = Boundaries.of_joined_rows(joined, 24), Boundaries.of_rows(CU_SEQLENS)
    assert again.offsets == boundaries.offsets and again.max_seqlen == boundaries.max_seqlen
    assert again.cu_seqlens.dtype == torch.int32 and torch.equal(again.cu_seqlens, boundaries.cu_seqlens)
    with pytest.raises(OptionError, match="from 0 to 25, the positions of the micro-batch"):
        Boundaries.of_joined_rows(joined, 25)
    with pytest.raises(OptionError, match="cu_seqlens do not rise from 0"):
        Boundaries.of_joined_rows(joined.flip(0), 24)


def test_rows_of_several_lengths_are_joined():
    rows = torch.tensor([[0, 2, 3, 3], [0, 4, 5, 7]], dtype=torch.int32)
    assert join_rows(rows).tolist() == [0, 2, 3, 7, 8, 10]
    assert join_rows(rows[0]).tolist() == [0, 2, 3]
    with pytest.raises(InvalidBoundaries, match="cu_seqlens hold no position"):
        join_rows(torch.tensor([[0, 0], [0, 2]]))


def test_an_error_travels_to_other_ranks_as_it_is():
    error = pickle.loads(pickle.dumps(InvalidBoundaries("do not rise from 0")))
    assert str(error) == "cu_seqlens do not rise from 0" and error.reason == "do not rise from 0"
    assert error.on_every_rank
