"""Every bad option of every command is one line that begins with what was typed, and exit status 2."""

import argparse
import subprocess
import sys

import pytest
from helpers.commands import COMMANDS, ONE_DOOR, VERBS, call, parser_of
from helpers.datasets import ROOT

from megatron_bfp.commands.shared import tokens_per_sequence

GOOD = {
    "preprocess": ["--input", "a.jsonl", "--output-prefix", "out", "--tokenizer-model", "t.json", "--seq-length", "64"],
    "index": ["data", "--seq-length", "64"],
    "merge": ["a", "b", "--output-prefix", "out"],
    "report": ["data", "--seq-length", "64"],
    "show": ["data", "--seq-length", "64", "--sequence", "0"],
    "verify": ["data"],
    "export-huggingface": ["checkpoints", "--output", "out"],
    "run": [],
    **dict.fromkeys(("enable", "disable", "status"), []),
}
"""Arguments that parse; what they name does not exist."""


def good_arguments(command):
    verb = command.split()[-1]
    if verb in GOOD:
        return GOOD[verb]
    return GOOD["report" if "report" in command else "preprocess"] if verb not in ONE_DOOR else []


def bad_arguments(parser, good):
    """Arguments that each hold one mistake."""
    yield [*good, "--nonsense"]
    for action in parser._actions:
        for option in action.option_strings:
            if action.nargs == 0:
                if not isinstance(action, (argparse._HelpAction, argparse._VersionAction)):
                    yield [*good, f"{option}=x"]
                continue
            yield [*good, option]
            if action.type in (int, tokens_per_sequence):
                yield from ([*good, option, value] for value in ("abc", "1.5", ""))
            if action.choices:
                yield [*good, option, "nonesuch"]
        if action.required and action.option_strings:
            start = good.index(action.option_strings[0])
            yield [*good[:start], *good[start + 2 :]]
        elif action.required and good:
            yield good[sum(not word.startswith("--") for word in good[:2]) :]


def check_one_line(command, capsys, status):
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert (status, printed.out, len(lines)) == (2, "", 1), printed.err
    assert lines[0].startswith(f"{command}: error: ") and len(lines[0]) > len(command) + 15


@pytest.mark.parametrize("command", COMMANDS)
def test_a_bad_option_is_one_line_that_begins_with_what_was_typed(monkeypatch, capsys, tmp_path, command):
    monkeypatch.chdir(tmp_path)
    good = good_arguments(command)
    for arguments in bad_arguments(parser_of(monkeypatch, command), good):
        check_one_line(command, capsys, call(monkeypatch, command, *arguments))
    assert not [*tmp_path.iterdir()]


VALUES = [
    ("index data --seq-length 0", "--seq-length must be"),
    ("index data --seq-length 8 --split 1,x", "--split"),
    ("index data --seq-length 8 --split -1,1,0", "--split"),
    ("index data --seq-length 8 --max-documents-per-sequence 0", "max_documents_per_sequence"),
    ("index --seq-length 8 data", "'data' is not a number of tokens; give the paths of datasets before --seq-length"),
    ("index gone --seq-length 8", "gone.idx: no such file"),
    ("index data --seq-length 8 --seed 7", "--seed chooses documents for fill-in-the-middle: give it with --fim-rate"),
    ("index data --seq-length 8 --fim-rate 1.5", "--fim-rate 1.5: give a number above 0"),
    ("export-huggingface a --output out --max-shard-size 5XB", "--max-shard-size 5XB: give a size such as 5GB"),
    ("merge a --output-prefix out --split 9,1", "--split needs --seq-length"),
    ("merge a --output-prefix out --max-documents-per-sequence 3", "--max-documents-per-sequence needs --seq-length"),
    ("merge a --output-prefix out --even-sequences", "--even-sequences needs --seq-length"),
    ("merge a --output-prefix out --targets-only", "--targets-only needs --seq-length"),
    ("merge a --output-prefix out --fim-rate 0.5", "--fim-rate needs --seq-length"),
    ("merge a --output-prefix out --fim-rate 2", "--fim-rate 2.0: give a number above 0"),
    ("merge a --output-prefix nowhere/out", "there is no folder"),
    ("merge gone --output-prefix out", "gone.idx"),
    ("preprocess --input a.jsonl --output-prefix out --tokenizer-model t.json", "--seq-length is needed"),
    ("preprocess --input a.jsonl --output-prefix out --tokenizer-model t --seq-length 8 --workers 0", "--workers"),
    ("preprocess --input a.jsonl --output-prefix out --tokenizer-model t --seq-length 8 --seed 7", "--seed chooses"),
    ("report data --seq-length 8 --seed -1", "--seed"),
    ("report data --seq-length 8 --split 0,1", "no documents"),
    ("report data --seq-length 8 --ranks 64", "--ranks: '64' is not DxM, such as 64x4"),
    ("report data --seq-length 8 --ranks 0x4", "--ranks: '0x4' is not DxM"),
    ("report data --seq-length 8 --ranks 64x4 512x129", "--ranks: 512x129: steps of over 65,536 sequences"),
    ("report data --seq-length 8 --hidden-size 0", "--hidden-size must be"),
    ("show data --seq-length 8 --sample -1", "--sample -1"),
    ("show data --seq-length 8 --sequence 0 --seed 3", "--seed"),
    ("show data --seq-length 8 --sequence 0 --global-batch-size 4", "--global-batch-size orders samples"),
    ("show data --seq-length 8 --sample 0 --global-batch-size 0", "--global-batch-size must be"),
    ("verify data --vocab-size 8", "--vocab-size is for --tokens"),
    ("verify data --tokens", "--tokenizer-model or --vocab-size"),
    ("run train", "train: is not a training script"),
    ("run gone.py --help", "gone.py: no such training script"),
]


@pytest.mark.parametrize(("line", "reason"), VALUES)
def test_a_value_that_cannot_be_is_one_line_too(monkeypatch, capsys, tmp_path, line, reason):
    monkeypatch.chdir(tmp_path)
    verb, *arguments = line.split()
    for door in ONE_DOOR:
        status = call(monkeypatch, f"{door} {verb}", *arguments)
        assert reason in (line := capsys.readouterr().err), line
        assert status == 2 and line.startswith(f"{door} {verb}: error: ") and len(line.splitlines()) == 1
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("arguments", [[], ["nonesuch"], ["--nonsense"], ["nonesuch", "--help"], ["data.idx"]])
@pytest.mark.parametrize("door", ONE_DOOR)
def test_without_a_verb_the_verbs_are_named(monkeypatch, capsys, door, arguments):
    status = call(monkeypatch, door, *arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert status == 2 and line.startswith(f"{door}: error: ")
    assert "VERB" in line and (not arguments or arguments == ["--nonsense"] or all(verb in line for verb in VERBS))


def test_it_is_the_same_in_a_process_of_its_own():
    for words, name in (
        (["-m", "megatron_bfp", "index", "--nonsense"], "python -m megatron_bfp index"),
        (["tools/preprocess_bfp.py", "--seq-length", "x"], "preprocess_bfp.py"),
    ):
        done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith(f"{name}: error: ")
        assert len(done.stderr.splitlines()) == 1
