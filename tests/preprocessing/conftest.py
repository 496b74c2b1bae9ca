"""A corpus of several tasks, and the command run in this process."""

import json
import sys

import pytest
from helpers.jobs import NUM_DOCUMENTS
from helpers.tokenizer_fixtures import EOD

from megatron_bfp.commands import preprocess as command
from megatron_bfp.preprocessing import plan


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """A file of about 400 KB, cut into tasks of 20 KB."""
    for name in ("SMALL_TASK", "SMALLEST_TASK"):
        monkeypatch.setattr(plan, name, 20_000)
    path = tmp_path / "in.jsonl"
    with open(path, "w") as file:
        for number in range(NUM_DOCUMENTS):
            file.write(json.dumps({"text": f"document {number} " * (1 + number % 12)}) + "\n")
    return path


@pytest.fixture
def run(tmp_path, tokenizer_file, capsys, monkeypatch):
    """Run the command in this process, as its console script does."""

    def run(*arguments, output="out", seq_length=("--seq-length", 64)):
        arguments += ("--output-prefix", tmp_path / output, "--tokenizer-model", tokenizer_file)
        arguments += ("--eod-token", EOD, "--append-eod", *seq_length)
        monkeypatch.setattr(sys, "argv", ["preprocess_bfp", *map(str, arguments)])
        try:
            status = command.console()
        except SystemExit as exit:
            status = exit.code
        return status, capsys.readouterr().err

    return run
