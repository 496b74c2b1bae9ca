"""Weights that no blend can have are refused before a corpus is opened."""

import math

import pytest

from megatron_bfp import OptionError
from megatron_bfp.samples.blends import check_weights

WRONG = [0.0, -1.0, -0.0, math.nan, math.inf, -math.inf, 1e-320]


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_fault_B04_a_weight_that_is_no_share_is_named_with_its_corpus(wrong, which):
    weights = [1e10, 2e10, 1e10]
    check_weights(["a", "b", "c"], weights)
    weights[which] = wrong
    with pytest.raises(OptionError, match=rf"weight of {wrong} for {'abc'[which]}"):
        check_weights(["a", "b", "c"], weights)


@pytest.mark.parametrize("weights", [(1.0,), (1e-300, 1e-300), (1e-12, 1.0), (70, 30)])
def test_fault_B04_any_others_are_fine(weights):
    check_weights("ab"[: len(weights)], weights)


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("per_split", [False, True])
def test_fault_B04_a_config_of_packed_samples_checks_its_blends(wrong, per_split):
    pytest.importorskip("megatron.core.datasets.gpt_dataset")
    from helpers.megatron_helpers import config

    blend = (["nowhere/a", "nowhere/b"], [0.5, wrong])
    with pytest.raises(OptionError, match="for nowhere/b"):
        config(None, blend_per_split=[None, blend, None]) if per_split else config(blend)
    config((blend[0], [0.5, 0.5]))


@pytest.mark.parametrize("wrong", ["0", "-1", "nan", "inf"])
def test_fault_B04_the_trainer_s_data_path_is_checked_alike(wrong):
    from trainer.arguments import blend

    with pytest.raises(OptionError, match="a weight above 0"):
        blend(["0.5", "nowhere/a", wrong, "nowhere/b"])
