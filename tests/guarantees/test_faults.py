"""The faults that people showed each have a test. ``pytest -k fault_A06`` runs those of one.

A test of fault A6 has ``fault_A06`` in its name. ``fault_D01`` and the like stand for changes of the code that no test
noticed.
"""

import ast
import re

from helpers.datasets import ROOT

FAULTS = {
    "A01": "boundaries reach attention whatever schedule calls the model, or the first forward pass stops the run",
    "A02": "multi-token prediction rolls its labels inside documents, for any number of rows",
    "A03": "each corpus of a blend has an order of its own",
    "A04": "layers that cannot take boundaries are refused, not given an attribute that nobody reads",
    "A05": "a data path of several lines is read whole",
    "A06": "BOS is written where Megatron's own tool writes it",
    "A07": "two values of --data-impl are refused",
    "A08": "old spellings of refused options are refused too",
    "A09": "folders are read whole, and what is left out is printed",
    "A10": "a file is read once, however often it is named",
    "A11": "a file that is no text stops the run even where bad documents are skipped",
    "A12": "a run resumes only with the options that decide its data",
    "A13": "ids outside the vocabulary are named before the first step",
    "A14": "what is printed of positions is true",
    "A15": "every tool looks for the index that the run will use",
    "A16": "attention dropout differs between tensor-parallel ranks",
    "A17": "an import hook waits until its module was executed",
    "A18": "a split without targets has no perplexity",
    "B01": "an evaluation with another micro-batch size runs through pipelines",
    "B02": "the local transformer implementation trains without a layer spec",
    "B03": "an empty split of Megatron-LM is None",
    "B04": "blends that Megatron cannot take are refused in one line",
    "B05": "a broken link and a column named twice are errors of one line",
    "B06": "a column without any value holds bad documents",
    "B07": "an integer of any length in another key does not matter",
    "B08": "a repaired file is done again, alone",
    "B09": "sequence lengths have a limit that memory can hold",
    "B10": "a refused memory map names the file and the option that reads without",
    "B11": "graphs that capture attention are refused at the start",
    "B12": "commands in messages and to remote shells are quoted",
    "B13": "zstd with a dictionary and pretty-printed JSON are called what they are",
    "B14": "the linter of shell scripts is pinned and always runs",
    "B15": "a refusal is one line on one rank, by every way in",
    "B16": "messages begin with what was typed",
    "B17": "a tokenizer's panic has a name, and a living build survives a cleaner",
    "B18": "rotary positions in Megatron-DeepSpeed are right",
    "C01": "every extra resolves from the plain index under constraints.txt",
    "C02": "a crash ends all processes",
    "C03": "a folder that cannot be saved to is found at the start",
    "C04": "a closed pipe ends a command quietly",
    "C05": "the trainer runs without a launcher",
    "C06": "the plan shows what the command trains",
    "C07": "output fits 80 columns, headline first",
    "C08": "what is not installed is named with its pip command",
    "C09": "an EOD that is not appended is said",
    "C10": "small things are as a person would want them",
    "C11": "the trainer's help and log serve a reader",
    "C12": "what the documentation speaks of as installed is in the wheel",
    "C13": "the documentation's snippets run as they stand",
}
"""Fault -> what is right."""


LEFT_OUT = ("pytest.mark.slow", "pytest.mark.integration")
"""Marks of tests that do not run every time."""


def is_left_out(nodes):
    """Whether decorators, or what a module is marked with, leave a test out."""
    return any(mark in ast.unparse(node) for node in nodes for mark in LEFT_OUT)


def names_of_quick_tests():
    """The test functions of the other modules that run every time."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        tree = ast.parse(path.read_text())
        marks = [node.value for node in tree.body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node)]
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                if not is_left_out([*marks, *node.decorator_list]):
                    yield node.name


def test_every_fault_has_a_quick_test():
    tested = {number for name in names_of_quick_tests() for number in re.findall(r"fault_([A-C]\d\d)(?!\d)", name)}
    assert tested == set(FAULTS)
