"""Every hostile file, run through the command with each tokenizer library, with and without --skip-bad-documents."""

import json
import sys
from typing import NamedTuple

import numpy as np
import pytest
from helpers.datasets import DATA
from helpers.tokenizer_fixtures import EOD, LIBRARIES

from megatron_bfp.commands import preprocess as command
from megatron_bfp.indexed_dataset.reader import IndexedDataset
from megatron_bfp.tokenizers.registry import TiktokenOptions, load_tokenizer

NASTY = DATA / "nasty"


class Expected(NamedTuple):
    documents: int
    bad: tuple = ()
    """Of JSON Lines: line, byte, and a part of the reason."""
    error: str = ""
    """Part of the error that --skip-bad-documents cannot mend."""
    options: tuple = ()


EXPECTED = {
    "00_good.jsonl": Expected(8),
    "02_whitespace_only.jsonl": Expected(3),
    "04_missing_key.jsonl": Expected(2, ((2, 469, "no key 'text'; its keys are 'content'"),)),
    "06_not_an_object.jsonl": Expected(
        2,
        (
            (2, 469, "holds a JSON str, not an object"),
            (3, 485, "holds a JSON list, not an object"),
            (4, 493, "holds null, not an object"),
            (5, 498, "holds a JSON int, not an object"),
        ),
    ),
    "08_two_objects_one_line.jsonl": Expected(
        2, ((2, 469, "Extra data at byte 469 of the line"), (3, 1517, "Extra data at byte 470 of the line"))
    ),
    "10_json_array.json": Expected(0, error="is a JSON array, not JSON Lines"),
    "12_bom.jsonl": Expected(2),
    "14_crlf.jsonl": Expected(8),
    "16_utf16le_bom.jsonl": Expected(0, error="is UTF-16"),
    "18_latin1.jsonl": Expected(2, ((2, 469, "byte 14 of the line is not UTF-8"),)),
    "20_truncated_utf8.jsonl": Expected(2, ((2, 469, "byte 17 of the line is not UTF-8"),)),
    "22_nul_bytes.jsonl": Expected(3, ((3, 500, "not JSON: Invalid control character at byte 15 of the line"),)),
    "24_control_chars.jsonl": Expected(3, ((2, 469, "not JSON: Invalid control character at byte 19 of the line"),)),
    "26_line_separators.jsonl": Expected(3),
    "30_special_tokens_in_text.jsonl": Expected(5),
    "32_nested_text_key.jsonl": Expected(1, ((1, 0, "no key 'text'; its keys are 'data'"),)),
    "34_extra_keys_unicode_key.jsonl": Expected(2, ((2, 61, "did you mean 'T"),)),
    "36_no_trailing_newline.jsonl": Expected(8),
    "38_empty_file.jsonl": Expected(0, error="0 documents with text under 'text' (0 empty ones, 0 bad ones)"),
    "40_all_invalid.jsonl": Expected(
        0, ((2, 13, "holds null, not text"),), error="0 documents with text under 'text' (1 empty ones, 2 bad ones)"
    ),
    "42_gz_multistream.jsonl.gz": Expected(8),
    "44_gz_named_jsonl.jsonl": Expected(8),
    "46_zst.jsonl.zst": Expected(8),
    "48_zst_no_content_size.jsonl.zst": Expected(8),
    "50_xz.jsonl.xz": Expected(8),
    "52_text.parquet": Expected(8),
    "54_dict_large_string.parquet": Expected(8),
    "56_zero_rows.parquet": Expected(0, error="0 documents"),
    "58 name with spaces é.jsonl": Expected(2),
}


@pytest.fixture
def run(tmp_path, tokenizer_arguments, capsys, monkeypatch):
    """Run the command as its console script does, on one file with one library."""

    def run(path, library, *options):
        arguments = ("--input", path, "--output-prefix", tmp_path / "out", "--append-eod", "--seq-length", 64)
        arguments += (*tokenizer_arguments[library], *options)
        monkeypatch.setattr(sys, "argv", ["preprocess_bfp", *map(str, arguments)])
        status = command.console()
        return status, capsys.readouterr().err

    return run


def load(library, arguments):
    path = arguments[3]
    if library == "TikTokenizer":
        return load_tokenizer(library, path, tiktoken=TiktokenOptions("gpt2", special_tokens=(EOD, "<|pad|>")))
    return load_tokenizer(library, path, EOD if library == "HuggingFaceTokenizer" else None)


def test_the_table_has_every_file():
    assert sorted(EXPECTED) == sorted(path.name for path in NASTY.iterdir())


@pytest.mark.case(2)
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", EXPECTED)
def test_a_hostile_file_gives_what_it_should(run, tmp_path, tokenizer_arguments, name, library):
    expected = EXPECTED[name]
    status, err = run(NASTY / name, library)
    if expected.bad or expected.error:
        line = f":{expected.bad[0][0]} (byte {expected.bad[0][1]}): " if expected.bad else ": "
        assert status == 2 and len(err.splitlines()) == 1 and "Traceback" not in err
        assert f"{NASTY / name}{line}" in err
        assert (expected.bad[0][2] if expected.bad else expected.error) in err
        assert list(tmp_path.iterdir()) == []
    else:
        assert status == 0 and err == ""
        check(tmp_path, expected, load(library, tokenizer_arguments[library]))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", EXPECTED)
def test_with_skip_bad_documents_nothing_else_is_lost(run, tmp_path, tokenizer_arguments, name, library):
    expected = EXPECTED[name]
    status, err = run(NASTY / name, library, "--skip-bad-documents")
    if expected.error:
        assert status == 2 and len(err.splitlines()) == 1 and "Traceback" not in err
        assert str(NASTY / name) in err and expected.error in err
        assert list(tmp_path.iterdir()) == []
        return
    assert status == 0 and err == ""
    check(tmp_path, expected, load(library, tokenizer_arguments[library]))
    listed = [json.loads(line) for line in open(tmp_path / "out.bad.jsonl")] if expected.bad else []
    assert (tmp_path / "out.bad.jsonl").exists() == bool(expected.bad)
    assert [(entry["file"], entry["line"], entry["byte"]) for entry in listed] == [
        (str(NASTY / name), line, byte) for line, byte, _ in expected.bad
    ]
    assert all(reason in entry["reason"] for entry, (_, _, reason) in zip(listed, expected.bad, strict=True))


def check(folder, expected, tokenizer):
    """The dataset has as many documents as expected, each with one EOD at its end and text before it."""
    dataset = IndexedDataset(str(folder / "out_text_document"))
    documents = [dataset.document(number).astype(np.int64) for number in range(dataset.num_documents)]
    assert len(documents) == expected.documents
    for document in documents:
        assert len(document) > 1 and np.flatnonzero(document == tokenizer.eod).tolist() == [len(document) - 1]


@pytest.mark.parametrize("library", LIBRARIES)
def test_special_texts_come_back_as_they_were(run, tmp_path, tokenizer_arguments, library):
    path = NASTY / "30_special_tokens_in_text.jsonl"
    assert run(path, library)[0] == 0
    tokenizer = load(library, tokenizer_arguments[library])
    dataset = IndexedDataset(str(tmp_path / "out_text_document"))
    texts = [json.loads(line)["text"] for line in open(path, encoding="utf-8")]
    for number, text in enumerate(texts):
        decoded = tokenizer.decode(dataset.document(number)[:-1])
        if library == "SentencePieceTokenizer":  # it adds a space, and writes spaces as U+2581, which so is one to it
            decoded, text = decoded.removeprefix(" "), text.replace("\u2581", " ")
        assert decoded == text


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_container_of_the_same_documents_gives_the_same_bytes(run, tmp_path, library):
    contents = set()
    for name, expected in EXPECTED.items():
        if expected.documents == 8:
            assert run(NASTY / name, library, "--overwrite")[0] == 0
            contents.add(tuple((tmp_path / f"out_text_document.{kind}").read_bytes() for kind in ("bin", "idx")))
    assert len(contents) == 1


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_dotted_key_goes_into_objects(run, tmp_path, library):
    assert run(NASTY / "32_nested_text_key.jsonl", library, "--json-keys", "data.text")[0] == 0
    assert IndexedDataset(str(tmp_path / "out_data.text_document")).num_documents == 2


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_lone_surrogate_is_a_bad_document(run, tmp_path, library):
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "a"}\n{"text": "a\\ud800b"}\n{"text": "\\ud83d\\ude00"}\n')
    status, err = run(path, library)
    assert status == 2 and f"{path}:2 (byte 14): character 2 of 'text' is half of a surrogate pair" in err
    assert run(path, library, "--skip-bad-documents")[0] == 0
    assert IndexedDataset(str(tmp_path / "out_text_document")).num_documents == 2


@pytest.mark.case(4)
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    "text",
    ["a" * 2_000_000, "x" + " " * 2_000_000 + "x", "one, two and three: four\n" * 40_000],
    ids=["letters", "spaces", "words"],
)
def test_large_documents(run, tmp_path, tokenizer_arguments, library, text):
    check_large_document(run, tmp_path, tokenizer_arguments, library, text)


@pytest.mark.case(4)
@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_document_of_20_mb(run, tmp_path, tokenizer_arguments, library):
    check_large_document(run, tmp_path, tokenizer_arguments, library, "one, two and three: four\n" * 800_000)


def check_large_document(run, tmp_path, tokenizer_arguments, library, text):
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps({"text": text}) + "\n" + '{"text": "after"}\n')
    assert run(path, library)[0] == 0
    dataset = IndexedDataset(str(tmp_path / "out_text_document"))
    tokenizer = load(library, tokenizer_arguments[library])
    assert dataset.num_documents == 2
    decoded = tokenizer.decode(dataset.document(0)[:-1])
    assert decoded.removeprefix(" ") == text
