"""Each option of Megatron's own preprocess_data.py is honoured, accepted with a line, or refused by name."""

import json
import os
import re
from pathlib import Path

import pytest
from helpers.datasets import DATA

pytest.importorskip("tokenizers")

from megatron_bfp import OptionError
from megatron_bfp.commands import preprocess as command
from megatron_bfp.commands.preprocess_options import old_parser
from megatron_bfp.preprocessing.megatron_options import REFUSED, WITHOUT_EFFECT

HONOURED = {
    *("--input", "--json-keys", "--append-eod", "--output-prefix", "--workers", "--seq-length", "--dataset-impl"),
    *("--tokenizer-type", "--tokenizer-model", "--vocab-file", "--merge-file", "--vocab-size"),
}
OF_CHECKOUTS = {
    *HONOURED,
    *("--split-sentences", "--keep-newlines", "--lang", "--partitions", "--log-interval", "--keep-sequential-samples"),
    *("--find-optimal-num-workers", "--workers-to-check", "--max-documents", "--trust-remote-code"),
}
"""The options of both tools, as they were when this was written."""


def refuse_others(names):
    ours = {option for action in old_parser()._actions for option in action.option_strings}
    assert names <= HONOURED | set(WITHOUT_EFFECT) | set(REFUSED)
    assert names <= ours


def test_every_option_of_the_tools_is_known():
    refuse_others(OF_CHECKOUTS)
    with pytest.raises(AssertionError):
        refuse_others({"--another"})


@pytest.mark.integration
@pytest.mark.parametrize("variable", ["MEGATRON_LM_PATH", "MEGATRON_DEEPSPEED_PATH"])
def test_every_option_of_a_checkout_s_tool_is_known(variable):
    if not os.environ.get(variable):
        pytest.skip(f"{variable} does not name a checkout")
    source = (Path(os.environ[variable]) / "tools" / "preprocess_data.py").read_text()
    options = set(re.findall(r"add_argument\(\s*['\"](--[a-z0-9-]+)['\"]", source))
    assert len(options) >= 14 and len(options) == source.count("add_argument(")
    refuse_others(options)


@pytest.fixture
def call(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "the river"}) + "\n")
    given = ["--input", str(tmp_path / "a.jsonl"), "--output-prefix", str(tmp_path / "out"), "--seq-length", "16"]

    def call(*options):
        command.main([*given, "--overwrite", "--tokenizer-model", str(DATA / "bos_tokenizer.json"), *options])
        return [line for line in capsys.readouterr().err.splitlines() if "no effect" in line]

    return call


def test_what_means_nothing_is_said_and_the_dataset_is_the_same(call, tmp_path):
    assert call() == []
    before = (tmp_path / "out_text_document.bin").read_bytes()
    options = [[name] if option.metavar is None else [name, "4"] for name, option in WITHOUT_EFFECT.items()]
    lines = call(*(word for words in options for word in words), "--dataset-impl", "mmap")
    assert [line.partition("warning: ")[2].split(" has no effect here: ")[0] for line in lines] == list(WITHOUT_EFFECT)
    assert (tmp_path / "out_text_document.bin").read_bytes() == before


@pytest.mark.parametrize("options", [[name] for name in REFUSED] + [["--dataset-impl", "lazy"]])
def test_what_cannot_be_honoured_is_refused_by_name(call, tmp_path, options):
    with pytest.raises(OptionError, match=" ".join(options) + ": "):
        call(*options)
    assert not (tmp_path / "out_text_document.bin").exists()
