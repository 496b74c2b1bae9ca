"""How many of the configs that Megatron-LM and Megatron-DeepSpeed publish are accepted; and that the functions of them
that the tables of options name are there.

MEGATRON_LM_PATH=CHECKOUT MEGATRON_DEEPSPEED_PATH=CHECKOUT bash tests/run.sh --integration
"""

import ast
from pathlib import Path

import pytest
from helpers.real_megatron import deepspeed, lm
from integration import published_configs

from megatron_bfp.integrations.megatron_deepspeed.option_table import OPTIONS as MEGATRON_DEEPSPEED
from megatron_bfp.integrations.megatron_lm.option_table import OPTIONS as MEGATRON_LM

pytestmark = pytest.mark.integration


@lm.NEEDS_CHECKOUT
def test_the_share_of_megatron_lms_configs_that_is_accepted():
    result = published_configs.count(Path(lm.CHECKOUT))
    print(published_configs.report(result))
    assert result.unread == {}
    assert len(result.accepted) + len(result.refused) >= 120
    assert result.share >= 0.94


def test_data_of_a_config_give_way_to_those_of_a_reader_by_one_rule():
    named = ["--lr", "1", "--data-path", "0.5", "a", "0.5", "b", "--split", "1,0,0"]
    assert published_configs.swapped(named) == ["--lr", "1", "--split", "1,0,0", *published_configs.SWAPPED_IN]
    for other in (["--mock-data"], ["--data-args-path=file"], ["--train-data-path", "a", "--valid-data-path", "b"]):
        assert published_configs.swapped([*other, "--lr", "1"]) == ["--lr", "1", *published_configs.SWAPPED_IN]
    kept = ["--fim-data", "--sft", "--data-cache-path", "folder"]  # the control: what samples are made of them
    assert published_configs.swapped(kept) == [*kept, *published_configs.SWAPPED_IN]


@deepspeed.NEEDS_CHECKOUT
def test_the_share_of_megatron_deepspeeds_scripts_that_is_accepted(megatron_deepspeed):
    result = published_configs.count(Path(deepspeed.CHECKOUT), megatron_deepspeed)
    print(published_configs.report(result))
    assert result.unread == {}
    assert len(result.accepted) + len(result.refused) >= 50
    assert result.share >= 0.6


def names_in(path):
    """What a file defines, with the methods of its classes."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return names


@pytest.mark.parametrize(
    "checkout, rows",
    [
        pytest.param(lm.CHECKOUT, MEGATRON_LM, marks=lm.NEEDS_CHECKOUT, id="Megatron-LM"),
        pytest.param(deepspeed.CHECKOUT, MEGATRON_DEEPSPEED, marks=deepspeed.NEEDS_CHECKOUT, id="Megatron-DeepSpeed"),
    ],
)
def test_the_functions_that_the_tables_name_are_there(checkout, rows):
    named = {shown for row in rows for shown in row.shown_by if not shown.startswith("tests/")}
    assert len(named) > 10
    for shown in named:
        module, _, name = shown.partition(":")
        path = Path(checkout, *module.split("."))
        path = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
        assert name in names_in(path), shown
