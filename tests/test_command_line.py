"""What command lines share: one line for an error, and its exit status."""

import pytest

from megatron_bfp import OptionError, SequenceIndexError
from megatron_bfp.command_line import Parser, run


def failing(error):
    def main():
        raise error

    return main


@pytest.mark.parametrize(
    "error, status", [(OptionError("bad"), 2), (SequenceIndexError("bad"), 2), (KeyboardInterrupt(), 130)]
)
def test_an_error_is_one_line_and_a_status(capsys, error, status):
    assert run(failing(error), "tool") == status
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_other_ranks_are_quiet_about_options_but_not_about_data(capsys):
    assert run(failing(OptionError("bad")), "tool", quiet=True) == 2
    assert capsys.readouterr().err == ""
    assert run(failing(SequenceIndexError("bad")), "tool (rank 1)", quiet=True) == 2
    assert capsys.readouterr().err == "tool (rank 1): error: bad\n"


def test_other_exceptions_keep_their_traceback():
    with pytest.raises(ZeroDivisionError):
        run(lambda: 1 / 0, "tool")


def test_a_split_that_begins_with_a_minus_is_a_value():
    parser = Parser(prog="tool")
    parser.add_argument("--split")
    assert parser.parse_args(["--split", "-1,1,0"]).split == "-1,1,0"
    with pytest.raises(OptionError, match="--split"):
        parser.parse_args(["--split"])
