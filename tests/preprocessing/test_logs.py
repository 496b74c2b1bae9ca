"""What is printed and written about documents says where they are and what is wrong, and nothing of their text."""

import json
import sys

import pytest
from helpers.tokenizer_fixtures import LIBRARIES

from megatron_bfp.commands import preprocess as command
from megatron_bfp.preprocessing.progress import Amount, Meter

SECRET = "zanzibar"
TEXT = f"{SECRET} and {SECRET} again, {SECRET}.<|endoftext|> "
BAD = [
    f'{{"text": "{TEXT}"',
    f'{{"text": "{TEXT}" x}}',
    f'{{"text": ["{TEXT}"]}}',
    f'{{"text": "{TEXT}\\ud800"}}',
    f'{{"{TEXT}": "{TEXT}"}}',
    f'["{TEXT}"]',
    f"{TEXT}",
    f'"{TEXT}"',
]


@pytest.fixture
def run(tmp_path, tokenizer_arguments, capsys, monkeypatch):
    """Run the command on lines; returns its status and all that it says, also in files."""

    def run(lines, library, *options):
        path = tmp_path / "in.jsonl"
        path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
        arguments = ("--input", path, "--output-prefix", tmp_path / "out", "--append-eod", "--seq-length", 64)
        arguments += (*tokenizer_arguments[library], "--overwrite", *options)
        monkeypatch.setattr(sys, "argv", ["preprocess_bfp", *map(str, arguments)])
        status = command.console()
        said = [*capsys.readouterr()]
        said += [
            (tmp_path / name).read_text()
            for name in ("out.bad.jsonl", "out.summary.json")
            if (tmp_path / name).exists()
        ]
        return status, "\n".join(said)

    return run


@pytest.mark.parametrize("library", LIBRARIES)
def test_no_text_of_a_document_is_said(run, library):
    good = [json.dumps({"text": f"{TEXT} {number}"}) for number in range(50)]
    latin = f'{{"text": "{TEXT}'.encode() + b'\xe9"}'
    status, said = run([*good, *BAD, latin], library, "--skip-bad-documents")
    assert status == 0 and len([line for line in said.splitlines() if line.startswith('{"file"')]) == len(BAD) + 1
    assert SECRET not in said.lower()


@pytest.mark.parametrize("bad", BAD)
def test_no_text_is_in_an_error(run, bad):
    status, said = run(['{"text": "a"}', bad], "HuggingFaceTokenizer")
    assert status == 2 and "in.jsonl:2 (byte 14): " in said
    assert SECRET not in said.lower()


def test_what_was_done_before_counts_as_done_and_not_as_fast():
    meter = Meter(100)
    meter.skip(50)
    meter.add(Amount(documents=2, text_bytes=10, tokens=3, input_bytes=25))
    assert meter.line().startswith("75 %, 2 documents, ")
    meter._start -= 10  # 25 bytes in 10 seconds, and 25 are left
    assert meter.line().endswith(" after 10 s, 10 s left")
    meter.add(Amount(input_bytes=1000))  # an estimate that was too low
    assert meter.line().startswith("100 %, ")
