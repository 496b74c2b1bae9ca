"""The known pains of people who do this job each have a test. ``pytest -k case_07`` runs those of one."""

import ast
from pathlib import Path

import pytest
from helpers.datasets import ROOT

CASES = {
    1: "empty documents are left out, counted and reported",
    2: "lengths include the EOD",
    3: "byte offsets and merging beyond 2**31 tokens, in constant memory",
    4: "giant documents take linear time",
    5: "every document ends in EOD",
    6: "ids of vocabularies about 65,536 fit their dtype",
    7: "a run that was killed goes on where it was",
    8: "indexes are built before training, or in seconds",
    9: "opening does not depend on the number of documents",
    10: "racing builders leave one whole index",
    11: "an index of other data is refused",
    12: "a file that is cut off is an error at open",
    13: "more than 2**31 and 2**32 documents and tokens, and megatron-core's limit of corpora",
    14: "any sequence length, not only powers of two",
    15: "packing is global and loses nothing",
    16: "the number of documents in a sequence can be limited",
    17: "no kernel ignores the boundaries",
    18: "reading is linear in the sequence length",
    19: "no document's end is trained to predict the next document",
    20: "masks go by position: pad may equal EOD",
    21: "two reads are equal and share no memory",
    22: "boundaries are strictly increasing",
    23: "boundaries come from the index, not from EOD",
    24: "padding is a segment of its own",
    25: "blends with extreme weights reach their last sample",
    26: "splits that are none are refused",
    27: "a split without documents is empty, and an error in a blend",
    28: "the order depends on the seed alone",
    29: "where nodes share no file system, indexes can be built beforehand",
    30: "a sample that is not there is an IndexError",
}


def marked_cases():
    """The numbers of all ``case`` markers in the source of the other tests."""
    numbers = set()
    for path in set((ROOT / "tests").rglob("test_*.py")) - {Path(__file__)}:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.case":
                numbers.update(argument.value for argument in node.args)
    return numbers


def test_every_case_has_a_test():
    assert marked_cases() == set(CASES)


@pytest.mark.case(7)
def test_a_case_is_found_by_its_name(request):
    assert "case_07" in request.node.listextrakeywords()
