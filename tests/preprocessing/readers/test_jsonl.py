"""JSON Lines: good records are never lost, and a bad one is named by file, line, byte and reason."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bfp import InputError
from megatron_bfp.preprocessing.readers import jsonl
from megatron_bfp.preprocessing.readers.documents import BadDocument, Record
from megatron_bfp.preprocessing.readers.jsonl import LineBatch, line_batches

pytest.importorskip("orjson")


def records(content, *keys):
    return list(LineBatch("file", 1, 0, content).records(keys or ("text",)))


def only(content, *keys):
    (record,) = records(content, *keys)
    return record.reason if isinstance(record, BadDocument) else record.texts[0]


@pytest.mark.parametrize(
    "line, reason",
    [
        (b"", None),
        (b" \r", None),
        (b"garbage", "not JSON: Expecting value at byte 1 of the line"),
        (b'{"text": "a"', "not JSON: Expecting ',' delimiter at byte 13 of the line"),
        (b'{"text": "\xc3\xa9" x', "not JSON: Expecting ',' delimiter at byte 15 of the line"),
        (b'\xef\xbb\xbf{"text": \xff', "byte 13 of the line is not UTF-8"),
        (b"[" * 1_000_000, "not usable JSON: nested too deeply"),
        (b'{"text": "a\\ud800b"}', "character 2 of 'text' is half of a surrogate pair, not text"),
        (b'{"text": ["a"]}', "'text' holds a list, not text"),
        (b'{"text": null}', "'text' holds null, not text"),
        (b"{}", "no key 'text'; its keys are none"),
        (b'{"txt": 1, "b": 2}', "no key 'text'; its keys are 'b', 'txt'; did you mean 'txt'?"),
    ],
)
def test_what_is_no_document_is_named(line, reason):
    assert [record.reason for record in records(line)] == ([] if reason is None else [reason])


def test_places_count_lines_and_bytes():
    batch = LineBatch("file", 5, 100, b'\n{"text": "a"}\r\nx\n\xef\xbb\xbf{"text": "b"}\n')
    good, bad, last = batch.records(["text"])
    assert [(document.location.line, document.location.byte) for document in (good, bad, last)] == [
        (6, 101),
        (7, 116),
        (8, 118),
    ]
    assert str(bad) == "file:7 (byte 116): not JSON: Expecting value at byte 1 of the line"


def test_what_only_the_standard_library_parses_is_parsed():
    assert only(b'{"text": "a", "score": NaN}') == "a"
    assert only(b'{"text": "a", "other": "\\ud800"}') == "a"
    assert only(b'{"text": "a", "number": ' + b"1" * 400 + b"}") == "a"


@pytest.mark.parametrize("digits", [4300, 4301, 100_000])
@pytest.mark.parametrize("form", ["%s", "-%s", "%s.5", "%se999999", "[%s]", '{"n": %s}'])
def test_fault_B07_numbers_of_any_length_in_another_key_do_not_matter(digits, form):
    number = (form % ("1" * digits)).encode()
    assert only(b'{"n": ' + number + b', "text": "a", "score": NaN}') == "a"
    assert only(b'{"text": "a", "n": ' + number + b"}") == "a"
    reason = only(b'{"text": ' + number + b"}")
    assert reason.startswith("'text' holds a") and reason.endswith(", not text")


@pytest.mark.parametrize("depth", [900, 2_000, 20_000])
def test_fault_B07_depth_in_another_key_does_not_matter(depth):
    for opening, inside, closing in ((b"[", b'"]\\\\"', b"]"), (b'{"a":', b"1", b"}"), (b'[{"a\\"[":', b"[]", b"}]")):
        deep = opening * depth + inside + closing * depth
        assert only(b'{"deep": ' + deep + b', "text": "a", "also": [' + deep + b', {"x": 1}]}') == "a"
        assert only(b'{"text": ' + deep + b"}") in ("'text' holds a list, not text", "'text' holds a dict, not text")
        if depth > 900:
            assert only(b'{"deep": ' + deep[:-1] + b', "text": "a"}') == "not usable JSON: nested too deeply"
            assert only(b'{"text": "a", "deep": ' + deep + b"]") == "not usable JSON: nested too deeply"
    for closing in (b"}" * depth, b"]" * (depth - 1) + b"}", b"}" * (depth - 300) + b"]" * 300):
        assert only(b'{"text": "a", "x": ' + b"[" * depth + closing + b"}").startswith("not ")


@pytest.mark.parametrize(
    "value, kind",
    [("1", "an int"), ("1.5", "a float"), ("[]", "a list"), ("{}", "a dict"), ("true", "a bool"), ("null", "null")],
)
def test_fault_C10_kinds_have_their_article(value, kind):
    assert only(f'{{"text": {value}}}'.encode()) == f"'text' holds {kind}, not text"
    assert only(f'{{"text": {value}, "x": NaN}}'.encode()) == f"'text' holds {kind}, not text"
    if value != "{}":
        kind = kind.replace("an int", "a JSON int").replace("a ", "a JSON ").replace("JSON JSON", "JSON")
        assert only(value.encode()) == f"holds {kind}, not an object"


def test_keys_with_dots():
    line = b'{"a.b": "whole", "a": {"b": "inner", "c": {"d": "deep"}}, "x": "y"}'
    assert [only(line, key) for key in ("a.b", "a.c.d", "x")] == ["whole", "deep", "y"]
    assert only(line, "a.c").endswith("holds a dict, not text")
    assert only(line, "x.y").startswith("no key 'x.y'")


def test_of_many_keys_some_are_named_and_of_long_ones_none():
    many = b"{" + b", ".join(b'"%03d": 1' % number for number in range(500)) + b"}"
    assert only(many).endswith("'018', '019' and 480 more") and len(only(many)) < 300
    assert only(b'{"a": 1, "' + b"long " * 100 + b'": 1}') == "no key 'text'; its keys are 'a' and 1 more"
    assert only(b'{"' + b"text" * 100_000 + b'": 1}') == "no key 'text'; its keys are too long to be shown"


def test_several_keys_are_one_record():
    assert records(b'{"b": "2", "a": "1"}', "a", "b")[0].texts == ["1", "2"]
    assert isinstance(records(b'{"a": "1"}', "a", "b")[0], BadDocument)


def test_a_bom_is_dropped_at_the_start_of_a_line_and_kept_inside_a_text():
    line = b'\xef\xbb\xbf{"text": "\xef\xbb\xbfa"}\n'
    assert [record.texts[0] for record in records(b"\xef\xbb\xbf\n" + line * 2)] == ["\ufeffa", "\ufeffa"]


@pytest.mark.parametrize(
    "start, reason",
    [
        ('{"text": "a"}\n'.encode("utf-16"), "UTF-16"),
        ('{"text": "a"}\n'.encode("utf-16-le"), "UTF-16"),
        ('{"text": "a"}\n'.encode("utf-16-be"), "UTF-16"),
        ('{"text": "a"}\n'.encode("utf-32"), "UTF-32"),
        (b"\x1f\x8b\x08", "compressed twice, inside by gzip"),
        (b"PK\x03\x04", "zip archive"),
        (b"a" * 257 + b"ustar", "tar archive"),
        (b'[\n{"text": "a"},\n{"text": "b"}]\n', "JSON array"),
        (b'\xef\xbb\xbf\n [{"text": "a"}]', "JSON array"),
    ],
)
def test_what_is_no_json_lines_is_refused_once(start, reason):
    with pytest.raises(InputError, match=f"^file: .*{reason}"):
        list(line_batches([start], "file"))


def test_an_array_that_is_one_line_of_many_is_that_line_s_fault():
    (batch,) = line_batches([b'[1, 2]\n{"text": "a"}\n'], "file")
    bad, good = batch.records(["text"])
    assert bad.reason == "holds a JSON list, not an object" and good.texts == ["a"]


def test_a_line_without_end_is_refused(monkeypatch):
    monkeypatch.setattr(jsonl, "MAX_DOCUMENT_BYTES", 5 << 20)
    with pytest.raises(InputError, match=r"file:2 \(byte 2\): this line is longer"):
        list(line_batches([b"a\n", *[b"x" * (1 << 20)] * 10], "file"))


@settings(max_examples=100, deadline=None)
@given(
    lines=st.lists(st.binary(max_size=30).filter(lambda line: b"\n" not in line)),
    size=st.integers(1, 50),
    data=st.data(),
)
def test_batches_hold_all_lines_in_order(lines, size, data):
    content = b'{"text": ""}\n' + b"\n".join(lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=10)))
    chunks = [content[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(content)])]
    original, jsonl.BATCH_BYTES = jsonl.BATCH_BYTES, size
    try:
        batches = list(line_batches([chunk for chunk in chunks if chunk], "file"))
    finally:
        jsonl.BATCH_BYTES = original
    assert b"".join(batch.content for batch in batches) == content
    for batch in batches:
        before = content[: batch.first_byte]
        assert batch.first_line == before.count(b"\n") + 1 and (not before or before.endswith(b"\n"))


@settings(max_examples=300, deadline=None)
@given(line=st.binary(max_size=60) | st.text(max_size=60).map(lambda text: json.dumps({"text": text}).encode()))
def test_any_line_gives_texts_or_our_error(line):
    for record in records(line):
        assert isinstance(record, BadDocument) or (isinstance(record, Record) and isinstance(record.texts[0], str))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(
    document=st.dictionaries(st.sampled_from(["text", "a", "b"]), JSON, max_size=3), ascii=st.booleans(), data=st.data()
)
def test_the_fast_parser_and_the_standard_library_agree(document, ascii, data):
    line = json.dumps(document, ensure_ascii=ascii).encode("utf-8", "surrogatepass")
    if data.draw(st.booleans()):
        index = data.draw(st.integers(0, len(line) - 1))
        line = line[:index] + data.draw(st.binary(max_size=2)).replace(b"\n", b"") + line[index + 1 :]

    def slowly(_):
        raise ValueError

    records = list(LineBatch("file", 1, 0, line).records(["text"]))
    original, jsonl._fast_loads = jsonl._fast_loads, lambda: slowly
    try:
        assert list(LineBatch("file", 1, 0, line).records(["text"])) == records
    finally:
        jsonl._fast_loads = original
