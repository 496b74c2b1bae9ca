"""``--data-impl`` on a command line, and which hooks its values ask for."""

import argparse

import pytest

from megatron_bfp import OptionError
from megatron_bfp.integrations import activation
from megatron_bfp.integrations.data_impl import data_impl, data_impls, without_data_impl
from megatron_bfp.integrations.megatron_deepspeed import changes as megatron_deepspeed
from megatron_bfp.integrations.megatron_deepspeed import options as of_megatron_deepspeed
from megatron_bfp.integrations.megatron_lm import changes as megatron_lm


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ([], None),
        (["--data-path", "bfp"], None),
        (["--data-impl"], None),
        (["--data-impl", "bfp"], "bfp"),
        (["--data-impl=bfp"], "bfp"),
        (["--data-impl", "mmap", "--x", "--data-impl=bfp"], "bfp"),
        (["--data-impl=bfp", "--data-impl", "mmap"], "mmap"),
        (["--data-imp", "bfp"], "bfp"),
        (["--data-i=bfp"], "bfp"),
        (["--data-", "bfp", "--data-implx", "bfp", "data-impl=bfp"], None),
    ],
)
def test_the_flag_is_read_as_argparse_reads_it(arguments, expected):
    assert data_impl(["script.py", *arguments]) == expected


@pytest.mark.parametrize(
    "arguments, kept",
    [
        (["--data-impl", "mmap", "--seed", "1"], ["--seed", "1"]),
        (["--seed", "1", "--data-impl=mmap", "--data-i", "mmap"], ["--seed", "1"]),
        (["--data-impl", "--data-impl", "x"], ["x"]),
        (["--data-impl"], []),
    ],
)
def test_the_flag_is_taken_off_with_its_value(arguments, kept):
    assert without_data_impl(arguments) == kept


BOTH = [
    ["--data-impl", "bfp", "--data-impl", "mmap"],
    ["--data-impl=mmap", "--seed", "1", "--data-impl=bfp"],
    ["--data-imp", "bfp", "--data-impl=infer"],
    ["--data-impl", "bfp", "--data-i=mmap", "--data-impl", "bfp"],
]


@pytest.mark.parametrize("arguments", BOTH, ids=" ".join)
def test_fault_A07_two_values_of_data_impl_are_refused_where_megatron_lm_reads_its_options(arguments):
    values = data_impls(arguments)
    waiting = activation._hooks_for(values)
    with pytest.raises(OptionError) as refused:
        waiting["megatron.training.arguments"](None)
    assert all(f"--data-impl {value}" in str(refused.value) for value in values)
    assert {name: waiting[name] for name in megatron_deepspeed.HOOKS} == megatron_deepspeed.HOOKS


@pytest.mark.parametrize("arguments", [*BOTH, ["--data-impl", "bfp"]], ids=" ".join)
def test_fault_A07_in_megatron_deepspeed_packing_wins_wherever_it_stands(arguments, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", *arguments])
    args = argparse.Namespace(data_impl=data_impl(arguments))
    of_megatron_deepspeed.prefer_packing(args)
    assert args.data_impl == "bfp"
    is_said = "--data-impl bfp is used, not --data-impl " in capsys.readouterr().out
    assert is_said == (len(set(data_impls(arguments))) > 1)


def test_fault_A07_one_value_twice_is_one_value():
    assert activation._hooks_for(["bfp", "bfp"]).keys() == (megatron_lm.HOOKS | megatron_deepspeed.HOOKS).keys()
    assert activation._hooks_for(["mmap", "mmap"]) == megatron_lm.HOOKS_FOR_MMAP
    assert activation._hooks_for(["infer", "mmap"]) == megatron_lm.HOOKS_FOR_MMAP  # not ours to refuse
    assert activation._hooks_for(["infer"]) == activation._hooks_for([]) == {}
