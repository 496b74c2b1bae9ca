"""WARC: records of plain text are documents, others are counted, and a file that is cut off is an error."""

import gzip
import json

import pytest
from helpers.datasets import DATA
from helpers.jobs import dataset_bytes

from megatron_bfp.commands import preprocess as command
from megatron_bfp.errors import InputError
from megatron_bfp.preprocessing.readers.documents import BadDocument
from megatron_bfp.preprocessing.readers.inputs import Piece, read_batches


def record(kind, content_type, body):
    head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Record-ID: <urn:uuid:{len(body)}>\r\nWARC-Date: 2024-01-01T00:00:00Z"
    head += f"\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body + b"\r\n\r\n"


def response(content_type, body, *headers):
    lines = ["HTTP/1.1 200 OK", f"Content-Type: {content_type}", *headers]
    return record("response", "application/http; msgtype=response", "\r\n".join(lines).encode() + b"\r\n\r\n" + body)


RECORDS = [
    record("warcinfo", "application/warc-fields", b"software: a test"),
    record("conversion", "text/plain", "the river é\n".encode()),
    record("request", "application/http; msgtype=request", b"GET / HTTP/1.1\r\n\r\n"),
    response("text/html", b"<p>not extracted</p>"),
    response("text/plain; charset=latin-1", "schön".encode("latin-1")),
    response("text/plain", gzip.compress(b"decoded"), "Content-Encoding: gzip"),
    record("resource", "text/plain", b"a resource"),
    record("resource", "image/png", bytes(900)),
    record("metadata", "text/plain", b"of a crawler"),
]
TEXTS = {2: "the river é\n", 5: "schön", 6: "decoded", 7: "a resource"}


def read(path):
    batches = [batch for batch, _ in read_batches(Piece(str(path), 1000), ["text"])]
    records = [record for batch in batches for record in batch.records(["text"])]
    return records, sum(batch.num_left_out for batch in batches)


@pytest.mark.parametrize("compression", ["none", "members", "one"])
def test_plain_text_is_read_and_the_rest_counted(tmp_path, compression):
    parts = [gzip.compress(part) for part in RECORDS] if compression == "members" else RECORDS
    content = b"".join(parts)
    (tmp_path / "a.warc").write_bytes(gzip.compress(content) if compression == "one" else content)
    records, num_left_out = read(tmp_path / "a.warc")
    assert {record.location.row: record.texts[0] for record in records} == TEXTS
    assert num_left_out == 2  # HTML and an image; no record without a document


def test_what_is_not_in_its_encoding_is_a_bad_document(tmp_path):
    content = response("text/plain; charset=ascii", b"\xff") + record("conversion", "text/plain", b"\xff")
    (tmp_path / "a.warc").write_bytes(content)
    records, _ = read(tmp_path / "a.warc")
    assert all(isinstance(record, BadDocument) for record in records)
    assert [record.reason for record in records] == [
        "is not text in ascii, the encoding that it names",
        "byte 1 of the document is not UTF-8",
    ]


def test_a_file_that_is_cut_off_is_an_error(tmp_path):
    content = b"".join(RECORDS[:4])
    ends = {0, *(len(b"".join(RECORDS[:number])) for number in range(1, 5))}
    for size in range(7, len(content), 3):
        if not any(end - 4 <= size <= end for end in ends):  # the line feeds behind a record may be missing
            (tmp_path / "a.warc").write_bytes(content[:size])
            with pytest.raises(InputError, match="a.warc: (row \\d+: this WARC record is cut off|damaged WARC)"):
                read(tmp_path / "a.warc")


def test_a_dataset_of_it_is_that_of_its_texts(tmp_path, capsys):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.warc.gz").write_bytes(b"".join(map(gzip.compress, RECORDS)))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS.values()))
    common = ["--tokenizer-model", str(DATA / "bos_tokenizer.json"), "--seq-length", "16", "--output-prefix"]
    command.main(["--input", str(tmp_path / "a.jsonl"), *common, str(tmp_path / "lines")])
    assert "WARC" not in capsys.readouterr().out
    command.main(["--input", str(tmp_path / "data"), *common, str(tmp_path / "out")])
    assert "2 WARC records that are not plain text left out" in " ".join(capsys.readouterr().out.split())
    assert json.loads((tmp_path / "out.summary.json").read_text())["records_without_text"] == 2
    assert dataset_bytes(tmp_path) == dataset_bytes(tmp_path, "lines")
