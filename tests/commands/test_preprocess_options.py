"""``megatron-bfp-preprocess`` warns of options that are given and have no effect."""

import json

import pytest
from helpers.datasets import DATA, write

pytest.importorskip("tokenizers")

from megatron_bfp import OptionError
from megatron_bfp.commands import preprocess as command
from megatron_bfp.commands import preprocess_options

FAULT = ["--tokenizer-model", str(DATA / "bos_tokenizer.json")]


@pytest.fixture
def warnings(tmp_path, capsys):
    """The warnings of a call with one document, or with another source of documents."""

    def run(*options, source=None):
        (tmp_path / "a.jsonl").write_text(json.dumps({"text": "the river"}) + "\n")
        source = source or ["--input", str(tmp_path / "a.jsonl"), "--output-prefix", str(tmp_path / "out"), *FAULT]
        command.main([*source, "--overwrite", *options])
        lines = capsys.readouterr().err.splitlines()
        return [line.partition("warning: ")[2] for line in lines if "warning: " in line]

    return run


INDEX = ("--seq-length", "16")


@pytest.mark.parametrize(
    "options, expected",
    [
        (["--eod-token", "<eod>"], "--eod-token <eod>: no document ends in it, because --append-eod is not given"),
        (["--eod-token", "<eod>", "--append-eod"], None),
        ([], None),
        (["--bos-token", "<eod>"], "--bos-token <eod>: no document begins with it, because --append-bos is not given"),
        (["--bos-token", "<bos>"], None),
        (["--bos-token", "<bos>", "--no-append-bos"], "--bos-token <bos>: no document begins with it"),
        (["--vocab-size", "9"], "--vocab-size has no effect here: it is for --tokenizer-type TikTokenizer"),
        (
            ["--tiktoken-pattern", "v1"],
            "--tiktoken-pattern has no effect here: it is for --tokenizer-type TikTokenizer",
        ),
        (["--ray-address", "x"], "--ray-address has no effect here: it is for --executor ray"),
    ],
)
def test_fault_C09_an_option_that_changes_nothing_is_said(warnings, options, expected):
    lines = warnings(*INDEX, *options)
    assert len(lines) == (expected is not None)
    assert expected is None or lines[0].startswith(expected)


def test_an_eod_that_the_tokenizer_appends_itself_is_no_cause_for_a_warning(warnings, tmp_path):
    import tokenizers

    library = tokenizers.Tokenizer.from_file(str(DATA / "bos_tokenizer.json"))
    library.post_processor = tokenizers.processors.TemplateProcessing(single="$A <eod>", special_tokens=[("<eod>", 0)])
    library.save(str(tmp_path / "tokenizer.json"))
    assert warnings(*INDEX, "--eod-token", "<eod>", "--tokenizer-model", str(tmp_path / "tokenizer.json")) == []


def test_options_of_documents_beside_datasets_that_exist(warnings, tmp_path):
    dataset = write(tmp_path / "data", [[1, 2], [3]])
    lines = warnings(*INDEX, "--append-eod", "--workers", "2", source=["--indexed", dataset.prefix])
    assert [line.split()[0] for line in lines] == ["--append-eod", "--workers"] and lines[0].endswith("is for --input")
    merged = ["--merge", dataset.prefix, dataset.prefix, "--output-prefix", str(tmp_path / "merged")]
    assert warnings(*INDEX, "--split", "9,1,0", source=merged) == []
    lines = warnings(*INDEX, "--output-prefix", "x", source=["--indexed", dataset.prefix])
    assert lines == ["--output-prefix has no effect here: it is for --input and --merge"]


def test_options_of_the_index_beside_a_part_that_gets_none(warnings):
    part = ("--shard-index", "0", "--shard-count", "1")
    (line,) = warnings(*part, "--split", "9,1,0")
    assert line.startswith("--split has no effect here: it is for --seq-length")
    for option, *value in (["--even-sequences"], ["--targets-only"], ["--fim-rate", "0.5"]):
        (line,) = warnings(*part, option, *value)
        assert line.startswith(f"{option} has no effect here: it is for --seq-length")


def test_options_of_megatron_s_form_beside_a_tiktoken_file(warnings, tiktoken_file):
    common = ("--tokenizer-type", "TikTokenizer", "--tokenizer-model", tiktoken_file, "--tiktoken-pattern", "gpt2")
    (line,) = warnings(*INDEX, *common, "--vocab-size", "300")
    assert "--vocab-size have no effect" in line and "is not of Megatron's form" in line
    assert warnings(*INDEX, *common, "--tiktoken-special-tokens", "<a>") == []


@pytest.mark.parametrize("index, count, is_a_part", [(0, 1, True), (2, 3, True), (3, 3, False), (-1, 3, False)])
def test_parts_are_counted_from_0(index, count, is_a_part, tmp_path):
    words = ["--input", "a.jsonl", "--output-prefix", str(tmp_path / "out"), *FAULT]
    words += [f"--shard-index={index}", f"--shard-count={count}"]
    if is_a_part:
        assert preprocess_options.parse(words).shard_index == index
    else:
        with pytest.raises(OptionError, match=f"--shard-index {index}: is not from 0 to {count - 1}"):
            preprocess_options.parse(words)
