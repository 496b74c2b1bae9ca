"""Hostile input: good records are never lost, and a bad one is an error that names file, line and reason."""

import pytest
from conftest import DATA
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bfp import InputError
from megatron_bfp.preprocessing import jsonl
from megatron_bfp.preprocessing.jsonl import LineBatch, read_batches, texts

NASTY = DATA / "nasty"


def read(path, key="text"):
    return [text for batch in read_batches(str(path)) for text in texts(batch, key)]


@pytest.mark.parametrize(
    "name, documents",
    [
        ("00_good.jsonl", 8),
        ("02_whitespace_only.jsonl", 4),
        ("12_bom.jsonl", 2),
        ("14_crlf.jsonl", 8),
        ("26_line_separators.jsonl", 3),
        ("30_special_tokens_in_text.jsonl", 5),
        ("36_no_trailing_newline.jsonl", 8),
        ("38_empty_file.jsonl", 0),
        ("58 name with spaces é.jsonl", 2),
    ],
)
def test_what_can_be_read_is_read_whole(name, documents):
    assert len(read(NASTY / name)) == documents


@pytest.mark.parametrize(
    "name, place, reason",
    [
        ("04_missing_key.jsonl", ":2:", "no key 'text'; its keys are 'content'"),
        ("06_not_an_object.jsonl", ":2:", "str, not an object"),
        ("08_two_objects_one_line.jsonl", ":2:", "Extra data"),
        ("10_json_array.json", ":", "not JSON Lines"),
        ("16_utf16le_bom.jsonl", ":", "UTF-16"),
        ("18_latin1.jsonl", ":2:", "byte 14 is not UTF-8"),
        ("20_truncated_utf8.jsonl", ":2:", "byte 17 is not UTF-8"),
        ("22_nul_bytes.jsonl", ":3:", "not JSON"),
        ("24_control_chars.jsonl", ":2:", "not JSON"),
        ("32_nested_text_key.jsonl", ":1:", "its keys are 'data'"),
        ("34_extra_keys_unicode_key.jsonl", ":2:", "did you mean"),
        ("40_all_invalid.jsonl", ":2:", "NoneType, not text"),
        ("42_gz_multistream.jsonl.gz", ":", "gzip"),
        ("44_gz_named_jsonl.jsonl", ":", "gzip"),
        ("46_zst.jsonl.zst", ":", "zstd"),
        ("50_xz.jsonl.xz", ":", "xz"),
        ("52_text.parquet", ":", "Parquet"),
    ],
)
def test_what_cannot_be_read_is_named(name, place, reason):
    with pytest.raises(InputError) as error:
        read(NASTY / name)
    assert str(error.value).startswith(f"{NASTY / name}{place} ")
    assert reason in str(error.value) and "\n" not in str(error.value)


def test_a_lone_surrogate_is_no_text():
    with pytest.raises(InputError, match="file:7: character 2 of 'text' is half of a surrogate pair"):
        texts(LineBatch("file", 7, [b'{"text": "a\\ud800b"}']), "text")


def test_deep_nesting_is_an_error_of_its_line():
    with pytest.raises(InputError, match="file:1: "):
        texts(LineBatch("file", 1, [b"[" * 1_000_000]), "text")


def test_a_bom_is_dropped_at_the_start_of_a_line_and_kept_inside_a_text():
    line = b'\xef\xbb\xbf{"text": "\xef\xbb\xbfa"}\n'
    assert texts(LineBatch("file", 1, [b"\xef\xbb\xbf\n", line, line]), "text") == ["\ufeffa", "\ufeffa"]


def test_a_missing_file_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read(tmp_path / "none.jsonl")


@settings(max_examples=100, deadline=None)
@given(lines=st.lists(st.binary(max_size=30).filter(lambda line: b"\n" not in line)), size=st.integers(1, 50))
def test_batches_hold_all_lines_in_order(lines, size, tmp_path_factory):
    path = tmp_path_factory.mktemp("batches") / "lines"
    content = b'{"text": ""}\n' + b"\n".join(lines)
    path.write_bytes(content)
    original, jsonl.BATCH_BYTES = jsonl.BATCH_BYTES, size
    try:
        batches = list(read_batches(str(path)))
    finally:
        jsonl.BATCH_BYTES = original
    assert b"".join(line for batch in batches for line in batch.lines) == content
    line_number = 1
    for batch in batches:
        assert batch.first_line == line_number
        line_number += len(batch.lines)


@settings(max_examples=300, deadline=None)
@given(line=st.binary(max_size=60))
def test_any_line_gives_texts_or_our_error(line):
    try:
        assert all(isinstance(text, str) for text in texts(LineBatch("file", 1, [line]), "text"))
    except InputError as error:
        assert str(error).startswith("file:1: ")
