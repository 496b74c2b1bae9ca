"""How many of the configs that Megatron-LM and Megatron-DeepSpeed publish are accepted; and that the lines of them
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
from megatron_bfp.integrations.option_table import Source

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


def source_of(checkout, function):
    """What the file of a checkout says of a function or a class, with all its white space as single spaces."""
    module, _, name = function.partition(":")
    path = Path(checkout, *module.split("."))
    path = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
    text = path.read_text()
    node = ast.parse(text)
    for part in name.split("."):
        named = [inner for inner in ast.walk(node) if getattr(inner, "name", None) == part]
        assert named, f"{function}: there is no {part}"
        node = named[0]
    return " ".join(ast.get_source_segment(text, node).split())


@pytest.mark.parametrize(
    "checkout, rows",
    [
        pytest.param(lm.CHECKOUT, MEGATRON_LM, marks=lm.NEEDS_CHECKOUT, id="Megatron-LM"),
        pytest.param(deepspeed.CHECKOUT, MEGATRON_DEEPSPEED, marks=deepspeed.NEEDS_CHECKOUT, id="Megatron-DeepSpeed"),
    ],
)
def test_the_lines_that_the_tables_name_are_there(checkout, rows):
    lines = [shown for row in rows for shown in row.shown_by if isinstance(shown, Source)]
    assert len(lines) > 10
    missing = [line for line in lines if " ".join(line.says.split()) not in source_of(checkout, line.function)]
    assert missing == []
    assert "what no function says" not in source_of(checkout, lines[0].function)
