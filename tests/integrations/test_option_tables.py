"""The tables of options: what they refuse and report, that the documentation is written from them, and that the tests
that they name exist."""

import ast
import functools
import importlib.util
import re
from argparse import Namespace

import pytest
from helpers.datasets import ROOT

from megatron_bfp import OptionError
from megatron_bfp.integrations.megatron_deepspeed.option_table import OPTIONS as MEGATRON_DEEPSPEED
from megatron_bfp.integrations.megatron_lm.option_table import OPTIONS as MEGATRON_LM
from megatron_bfp.integrations.option_table import NotNeeded, Refused, Source, Untried, Works, refusals, remarks

TABLES = {"Megatron-LM": MEGATRON_LM, "Megatron-DeepSpeed": MEGATRON_DEEPSPEED}
ROWS = [pytest.param(row, id=f"{name} {row.label or row.options[0]}") for name in TABLES for row in TABLES[name]]


@functools.cache
def written():
    """``docs/write_options.py``."""
    spec = importlib.util.spec_from_file_location("write_options", ROOT / "docs/write_options.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def functions_in(path):
    return {node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("write", ["outcomes", "evidence"])
def test_the_pages_are_written_from_the_tables(write):
    page = written().PAGES[write].read_text()
    assert written().with_tables(page, write) == page, "run python docs/write_options.py"
    changed = page.replace("refused", "accepted")
    assert written().with_tables(changed, write) != changed


@pytest.mark.parametrize("row", ROWS)
def test_each_row_names_tests_that_exist_or_lines_of_megatron(row):
    lines = [shown for shown in row.shown_by if isinstance(shown, Source)]
    tests = [shown for shown in row.shown_by if not isinstance(shown, Source)]
    for test in tests:
        path, _, name = test.partition("::")
        assert path.startswith("tests/") and name in functions_in(path), test
    for line in lines:
        assert re.fullmatch(r"[\w.]+:[\w.]+", line.function), line
        assert line.says and not set("`|\n") & set(line.says), line  # it stands in a table
    assert row.shown_by
    assert tests or isinstance(row, Refused | Untried)
    assert all(re.fullmatch("--[a-z][a-z0-9-]+", option) for option in row.options)


def test_options_that_the_plugin_names_are_in_the_page():
    paths = (ROOT / "megatron_bfp/integrations").rglob("*.py")
    sources = [path.read_text() for path in paths if path.stem != "data_impl"]  # it names an abbreviation
    named = set(re.findall(r"\"(--[a-z0-9-]+)\"", "\n".join(sources)))
    assert {"--fim-data", "--use-flash-attn-triton", "--train-doc-idx-path"} <= named
    page = written().PAGES["outcomes"].read_text()
    assert [option for option in sorted(named) if not re.search(f"`{option}[ `]", page)] == []


TABLE = (
    Works(options=("--good",), shown_by=()),
    Refused(options=("--bad", "--worse"), why="it is bad", shown_by=()),
    Refused(options=("--low",), why="it is low", instead="give --high", beside="--deep", shown_by=()),
    Refused(
        options=(),
        condition=lambda args: "--size 3" if args.size == 3 else None,
        why="3 is odd",
        needs="--odd",
        shown_by=(),
    ),
    Refused(options=("--elsewhere",), why="another function knows", checked_by="it", shown_by=()),
    Untried(options=("--new",), why="nobody has a machine", shown_by=()),
    NotNeeded(options=("--old",), why="the file says it", shown_by=()),
)
NOTHING = dict.fromkeys(("good", "bad", "worse", "low", "size", "elsewhere", "new", "old"))


def test_every_refusal_is_listed_and_not_the_first_alone():
    def of_values(args):
        if args.size == 3:
            raise OptionError("a size of 3")

    args = Namespace(**NOTHING | {"good": 1, "worse": True, "bad": "x", "low": [0], "size": 3, "elsewhere": 1})
    assert [str(error) for error in refusals(TABLE, args, (of_values,))] == [
        "a size of 3",
        "--bad cannot be used with --data-impl bfp: it is bad",
        "--worse cannot be used with --data-impl bfp: it is bad",
        "--low cannot be used with --data-impl bfp and --deep: it is low; give --high",
        "--size 3 needs --odd with --data-impl bfp: 3 is odd",
    ]
    assert list(refusals(TABLE, Namespace(**NOTHING), (of_values,))) == []


def test_what_no_test_has_tried_and_what_is_ignored_is_reported():
    assert remarks(TABLE, Namespace(**NOTHING | {"new": 2, "bad": 1, "old": "x"})) == [
        "best-fit packing: --new is accepted but not tested with packed samples: nobody has a machine",
        "best-fit packing: --old is not needed: the file says it",
    ]
    assert remarks(TABLE, Namespace(**NOTHING)) == []
