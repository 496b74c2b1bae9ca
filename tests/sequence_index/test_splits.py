"""``--split`` gives megatron-core's fractions, and only for what is a split."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bfp import OptionError
from megatron_bfp.sequence_index.key import split_fractions


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 10**6) | st.floats(0, 1e6, allow_nan=False), min_size=1, max_size=3))
def test_fractions_are_those_of_megatron_core(shares):
    config = pytest.importorskip("megatron.core.datasets.blended_megatron_dataset_config")
    if sum(shares) == 0:
        return
    split = ",".join(f"{share:.6f}" if isinstance(share, float) else str(share) for share in shares)
    if not any(float(part) for part in split.split(",")):
        return
    theirs = config.convert_split_vector_to_split_matrix(config.parse_and_normalize_split(split))
    assert split_fractions(split) == theirs


def test_spaces_and_short_forms():
    assert split_fractions("1") == [(0.0, 1.0), None, None]
    assert split_fractions(" 969, 30 ,1") == split_fractions("969,30,1")
    assert split_fractions(".5,.5") == [(0.0, 0.5), (0.5, 1.0), None]


@pytest.mark.case(26)
@pytest.mark.parametrize(
    "split",
    ["-1,1,0", "90,abc,5", "90,abc5,5", "0,0,0", "", ",", "1,,1", "1,1,1,1", "nan", "inf,1", "1e999,1", "٣,1", "1 1"],
)
def test_what_is_no_split_is_refused(split):
    with pytest.raises(OptionError, match="--split"):
        split_fractions(split)
