"""Parquet: every kind of column of texts, in row order; bad rows are named, bad files refused."""

import io
import sys
import tracemalloc

import pytest
from helpers.datasets import DATA

from megatron_bfp import InputError
from megatron_bfp.commands import preprocess as command
from megatron_bfp.preprocessing.readers import columns
from megatron_bfp.preprocessing.readers.documents import BadDocument
from megatron_bfp.preprocessing.readers.parquet import row_batches

pyarrow = pytest.importorskip("pyarrow")
from pyarrow import parquet

TEXTS = ["one", "", "zwei é", "three\n", "one"]


def written(columns, **options):
    file = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), file, **options)
    return file.getvalue()


def read(content, *keys):
    keys = keys or ("text",)
    return [record for batch, _ in row_batches(io.BytesIO(content), "file", keys) for record in batch.records(keys)]


@pytest.mark.parametrize(
    "kind",
    [
        pyarrow.string(),
        pyarrow.large_string(),
        pyarrow.string_view(),
        pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
        pyarrow.dictionary(pyarrow.int32(), pyarrow.large_string()),
        pyarrow.binary(),
        pyarrow.large_binary(),
    ],
    ids=str,
)
@pytest.mark.parametrize("store_schema", [True, False])
def test_every_column_of_texts_is_read(kind, store_schema):
    if pyarrow.types.is_dictionary(kind):
        column = pyarrow.array(TEXTS, kind.value_type).dictionary_encode()
    else:
        column = pyarrow.array(TEXTS, kind)
    records = read(written({"id": [1] * 5, "text": column}, store_schema=store_schema))
    assert [record.texts[0] for record in records] == TEXTS
    assert [record.location.row for record in records] == [1, 2, 3, 4, 5]
    assert str(records[0].location) == "file: row 1"


@pytest.mark.parametrize("codec", ["none", "snappy", "gzip", "zstd", "brotli", "lz4"])
def test_row_groups_and_codecs(codec):
    texts = [f"document {number} " * (number % 50) for number in range(5000)]
    records = read(written({"text": texts}, row_group_size=700, compression=codec, data_page_size=1000))
    assert [record.texts[0] for record in records] == texts
    assert [record.location.row for record in records] == list(range(1, 5001))


def test_nulls_and_what_is_not_utf_8_are_bad_rows():
    records = read(written({"text": pyarrow.array([b"a", None, b"b\xff", b"c"], pyarrow.binary())}))
    assert [str(record) for record in records if isinstance(record, BadDocument)] == [
        "file: row 2: 'text' holds null, not text",
        "file: row 3: byte 2 of 'text' is not UTF-8",
    ]
    assert [record.texts[0] for record in records if not isinstance(record, BadDocument)] == ["a", "c"]


def test_a_text_that_is_too_long_is_a_bad_row(monkeypatch):
    monkeypatch.setattr(columns, "MAX_DOCUMENT_BYTES", 3)
    records = read(written({"text": ["abc", "abcd"]}))
    assert records[0].texts == ["abc"] and "row 2: 'text' holds a text longer than" in str(records[1])


def test_fields_of_structs_and_names_with_dots():
    structs = [{"text": "a", "n": {"deep": "x"}}, {"text": None, "n": {"deep": "y"}}, None]
    content = written({"meta": structs, "meta.text": ["whole"] * 3, "n": [1, 2, 3]})
    assert [record.texts[0] for record in read(content, "meta.text")] == ["whole"] * 3
    records = read(content, "meta.n.deep", "meta.text")
    assert [record.texts for record in records[:2]] == [["x", "whole"], ["y", "whole"]]
    assert records[2].reason == "'meta.n.deep' holds null, not text"


@pytest.mark.parametrize(
    "columns, key, reason",
    [
        ({"Text": ["a"], "id": [1]}, "text", "no column 'text'; its columns are 'Text', 'id'; did you mean 'Text'"),
        ({"text": [1]}, "text", "column 'text' holds int64, not text"),
        ({"text": [["a"]]}, "text", "column 'text' holds list<.*, not text"),
        ({"meta": [{"a": "b"}]}, "meta.text", "no column 'meta.text'"),
        ({"meta": [{"a": "b"}]}, "meta", "column 'meta' holds struct<.*, not text"),
    ],
)
def test_a_column_that_is_none_of_texts_is_refused(columns, key, reason):
    with pytest.raises(InputError, match=f"^file: {reason}"):
        read(written(columns), key)


def test_fault_B05_a_column_that_is_there_twice_is_refused():
    content = (DATA / "column_twice.parquet").read_bytes()
    with pytest.raises(InputError, match="^file: has 2 columns named 'text'; .* with only one of them$"):
        read(content)
    struct = pyarrow.StructArray.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["t", "t"])
    with pytest.raises(InputError, match="^file: has 2 columns named 't'"):
        read(written({"meta": struct}), "meta.t")
    twice = pyarrow.table([pyarrow.array(["a"]), pyarrow.array([1]), struct], names=["text", "meta", "meta"])
    file = io.BytesIO()
    parquet.write_table(twice, file)
    with pytest.raises(InputError, match="^file: has 2 columns named 'meta'"):
        read(file.getvalue(), "meta.t")
    assert [record.texts for record in read(file.getvalue())] == [["a"]]  # others may be


@pytest.mark.parametrize("is_skipping", [False, True])
def test_fault_B05_it_is_one_line_and_status_2(tmp_path, tokenizer_file, capsys, monkeypatch, is_skipping):
    arguments = ["--input", str(DATA / "column_twice.parquet"), "--output-prefix", str(tmp_path / "out")]
    arguments += ["--tokenizer-model", tokenizer_file, "--seq-length", "64", *["--skip-bad-documents"] * is_skipping]
    monkeypatch.setattr(sys, "argv", ["megatron-bfp-preprocess", *arguments])
    assert command.console() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("megatron-bfp-preprocess: error: ") and "column_twice.parquet: has 2 columns" in line


def test_fault_B06_a_column_without_a_type_holds_bad_documents():
    assert [str(record) for record in read(written({"text": pyarrow.nulls(2), "id": [1, 2]}))] == [
        "file: row 1: 'text' holds null, not text",
        "file: row 2: 'text' holds null, not text",
    ]
    records = read(written({"text": ["a", "b"], "meta": pyarrow.nulls(2)}), "text", "meta.deep.text")
    assert [record.reason for record in records] == ["'meta.deep.text' holds null, not text"] * 2
    structs = written({"meta": [{"text": None, "other": {"a": 1}}, None]})
    assert [record.reason for record in read(structs, "meta.text")] == ["'meta.text' holds null, not text"] * 2
    assert [record.reason for record in read(structs, "meta.text.deep")] == [
        "'meta.text.deep' holds null, not text"
    ] * 2
    for kind in (pyarrow.string(), pyarrow.null()):  # the same of both
        content = written({"text": pyarrow.array([None] * 3, kind)})
        assert [record.location.row for record in read(content)] == [1, 2, 3]
    with pytest.raises(InputError, match="no column 'meta.none'"):
        read(structs, "meta.none")


def test_a_damaged_file_is_refused():
    content = written({"text": [f"document {number}" for number in range(5000)]}, compression="zstd")
    for damaged in (content[:-9], content[: len(content) // 2], b"PAR1", content[:5000] + bytes(500) + content[5500:]):
        with pytest.raises(InputError, match="^file: damaged or unusual Parquet, from row ") as error:
            read(damaged)
        assert "\n" not in str(error.value)


def test_memory_does_not_grow_with_the_file():
    """64 MB in one row group."""
    texts = [f"{number} " * 100_000 for number in range(100, 260)]
    content = written(
        {"text": texts}, compression="zstd", use_dictionary=False, data_page_size=1 << 20, write_batch_size=1
    )
    before = pyarrow.total_allocated_bytes()
    peak = 0
    tracemalloc.start()
    try:
        for batch, _ in row_batches(io.BytesIO(content), "file", ["text"]):
            peak = max(peak, pyarrow.total_allocated_bytes() - before)
            del batch
        peak += tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 24 << 20


def test_rows_are_counted_from_the_first_of_the_file_whatever_groups_are_read():
    content = written({"text": [f"{number}" for number in range(7)]}, row_group_size=2)
    for first, end, expected in ((0, None, range(7)), (1, 3, range(2, 6)), (3, None, [6]), (2, 2, [])):
        batches = list(row_batches(io.BytesIO(content), "file", ("text",), first, end))
        records = [record for batch, _ in batches for record in batch.records(("text",))]
        assert [(record.location.row - 1, record.texts[0]) for record in records] == [(n, f"{n}") for n in expected]
        assert [share for _, share in batches][-1:] == [1.0] * bool(records)
