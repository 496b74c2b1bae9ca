"""A file of another format stops the job, whether bad documents are skipped or not; bad lines do not."""

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import random
import sqlite3
import sys
import tarfile
import zipfile

import numpy as np
import pytest
from helpers.tokenizer_fixtures import EOD

from megatron_bfp import InputError
from megatron_bfp.commands import preprocess as command
from megatron_bfp.preprocessing.readers import file_kinds, jsonl
from megatron_bfp.preprocessing.readers.inputs import Piece, read_batches
from megatron_bfp.preprocessing.readers.jsonl import line_batches

pyarrow = pytest.importorskip("pyarrow")
pytest.importorskip("orjson")

TABLE = pyarrow.table({"text": [f"document {number}" for number in range(5000)]})
LINES = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in TABLE["text"].to_pylist())


def arrow(new):
    file = io.BytesIO()
    with new(file, TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=100)
    return file.getvalue()


def orc():
    from pyarrow import orc

    file = io.BytesIO()
    orc.write_table(TABLE, file)
    return file.getvalue()


def feather(version):
    from pyarrow import feather

    file = io.BytesIO()
    feather.write_feather(TABLE, file, version=version)
    return file.getvalue()


def archive():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as writer:
        writer.writestr("a.jsonl", LINES)
    return file.getvalue()


def tar():
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as writer:
        member = tarfile.TarInfo("a.jsonl")
        member.size = len(LINES)
        writer.addfile(member, io.BytesIO(LINES))
    return file.getvalue()


def array():
    file = io.BytesIO()
    np.save(file, np.arange(1000))
    return file.getvalue()


def database(folder):
    path = folder / "a.db"
    with sqlite3.connect(path) as connection:
        connection.execute("create table documents (text)")
        connection.executemany("insert into documents values (?)", [(text,) for text in TABLE["text"].to_pylist()])
    return path.read_bytes()


RANDOM = random.Random(1)
KINDS = {
    "orc": (lambda _: orc(), "an ORC file"),
    "feather 1": (lambda _: feather(1), "a Feather file"),
    "lz4": (lambda _: b"\x04\x22\x4d\x18\x64\x40\xa7" + LINES, "lz4"),
    "lz4 legacy": (lambda _: b"\x02\x21\x4c\x18" + os.urandom(9), "lz4"),
    "lzma": (lambda _: lzma.compress(LINES, lzma.FORMAT_ALONE), "compressed by lzma"),
    "encrypted parquet": (lambda _: b"PARE" + os.urandom(5000) + b"PARE", "encrypted Parquet"),
    "zip": (lambda _: archive(), "a zip archive"),
    "empty zip": (lambda _: b"PK\x05\x06" + bytes(18), "a zip archive"),
    "7z": (lambda _: b"7z\xbc\xaf\x27\x1c" + os.urandom(500), "a 7z archive"),
    "rar": (lambda _: b"Rar!\x1a\x07\x01\x00" + os.urandom(500), "a RAR archive"),
    "tar": (lambda _: tar(), "a tar archive"),
    "sqlite": (database, "an SQLite database"),
    "pickle": (lambda _: pickle.dumps(TABLE["text"].to_pylist()), "a Python pickle"),
    "npy": (lambda _: array(), "a numpy array"),
    "avro": (lambda _: b"Obj\x01" + os.urandom(500), "an Avro file"),
    "pdf": (lambda _: b"%PDF-1.7\n%\xe2\xe3\n" + LINES.replace(b"{", b"("), "a PDF"),
    "hdf5": (lambda _: b"\x89HDF\r\n\x1a\n" + bytes(90), "an HDF5 file"),
    "snappy": (lambda _: b"\xff\x06\x00\x00sNaPpY" + os.urandom(90), "compressed by snappy"),
    "xml": (lambda _: b'<?xml version="1.0"?>\n<a/>\n', "XML"),
    "html": (lambda _: b"<!DOCTYPE html>\n<html>\n", "HTML"),
    "git lfs": (lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 9\n", "git lfs pull"),
    "idx": (lambda _: b"MMIDIDX\x00\x00" + bytes(50), "megatron-bfp index"),
    "random": (lambda _: b"\xa7\x00" + RANDOM.randbytes(5000), "neither text nor"),
    "random, begins as an object": (lambda _: b"{" + RANDOM.randbytes(9000), "none of the first"),
    "zeros": (lambda _: bytes(4096), "only NUL bytes"),
    "json, no objects": (lambda _: b'"a"\n' * 20, "none of the first 20 lines is a JSON object"),
    "csv": (lambda _: b"id,text\n" + b"1,a text\n" * 20, "none of the first 21 lines is a JSON object"),
    "latin 1": (lambda _: '{"text": "é"}\n'.encode("latin-1") * 10, "is not UTF-8; none of the first 10 lines"),
    "pretty": (lambda _: json.dumps({"text": "a", "b": [1]}, indent=2).encode(), "spans several lines"),
    "pretty, several": (lambda _: b"\n".join([b'{\n "text": "a"\n}'] * 3), "spans several lines"),
    "pretty, compact start": (lambda _: b'{"text": "a",\n "b": 1}\n', "spans several lines"),
    "pretty and large": (lambda _: b'{\n"text": "' + b"a" * (1 << 21) + b'"\n}\n', "spans several lines"),
    "without line feeds": (lambda _: b'{"text": "a"}{"text": "b"}', "several objects are on one line"),
    "array": (lambda _: b'[\n{"text": "a"},\n{"text": "b"}\n]\n', "a JSON array"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_fault_A11_a_file_of_another_kind_is_named(tmp_path, kind):
    make, reason = KINDS[kind]
    content = make(tmp_path)
    path = tmp_path / "a.jsonl"
    for compress in (bytes, gzip.compress, bz2.compress):
        path.write_bytes(compress(content))
        with pytest.raises(InputError) as error:
            list(read_batches(Piece(str(path), len(content)), ["text"]))
        assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)
        assert reason in str(error.value)


@pytest.mark.parametrize("kind", [pyarrow.ipc.new_stream, pyarrow.ipc.new_file])
def test_arrow_is_not_read_from_a_compressed_file(tmp_path, kind):
    (tmp_path / "a.arrow.gz").write_bytes(gzip.compress(arrow(kind)))
    with pytest.raises(InputError, match="a.arrow.gz: is Arrow, which is read from files that are not compressed"):
        list(read_batches(Piece(str(tmp_path / "a.arrow.gz"), 1000), ["text"]))


@pytest.mark.parametrize("name", [None, "zip", "lzma", "random", "csv", "pretty"])
@pytest.mark.parametrize("is_skipping", [False, True])
def test_fault_A11_it_stops_the_job_whether_bad_documents_are_skipped_or_not(
    tmp_path, tokenizer_file, monkeypatch, capsys, name, is_skipping
):
    pytest.importorskip("tokenizers")
    (tmp_path / "good.jsonl").write_bytes(LINES + b"bad\n" * is_skipping)
    paths = [str(tmp_path / "good.jsonl")]
    if name is not None:
        make, reason = KINDS[name]
        (tmp_path / "other.jsonl").write_bytes(make(tmp_path))
        paths.append(str(tmp_path / "other.jsonl"))
    arguments = ["--input", *paths, "--output-prefix", str(tmp_path / "out"), "--tokenizer-model", tokenizer_file]
    arguments += ["--eod-token", EOD, "--append-eod", "--seq-length", "64", *["--skip-bad-documents"] * is_skipping]
    monkeypatch.setattr(sys, "argv", ["preprocess_bfp", *arguments])
    status, err = command.console(), capsys.readouterr().err
    if name is None:
        assert status == 0 and err == ""
        return
    assert status == 2 and reason in err and "other.jsonl" in err and len(err.splitlines()) == 1
    assert not list(tmp_path.glob("out_*"))


GOOD = {
    "one line": b'{"text": "a"}',
    "bad lines before a good one": b"bad\n\x00\xff\n[1]\n" * 30 + b'{"text": "a"}\n',
    "few bad lines": b"bad\n" * 9,
    "a few lines of objects that are cut": b'{"text": "a\n' * 9,
    "other keys": b'{"other": 1}\n' * 50,
    "ORCA": b'ORCA\n{"text": "a"}\n',
    "blank": b"\n \n\r\n",
    "nothing": b"",
    "byte order mark": b'\xef\xbb\xbf{"text": "a"}\n',
    "numbers": b'{"text": "a", "n": ' + b"1" * 5000 + b"}\n",
    "one long line": b'{"text": "' + b"a,{" * (1 << 20) + b'"}\n',
    "few bad lines before a long one": b"bad\n" * 9 + b'{"text": "' + b"a" * (1 << 22) + b'"}\n',
    "a long line that is cut behind a comma": b'{"text": "a",' + b'"k":1,' * (1 << 19) + b'"l": 2}\n',
    "two objects on the first of many lines": b'{"text": "a"}{}\n' + b'{"text": "a"}\n',
    "an object over lines before good ones": b'{\n"text": "a"\n}\n{"text": "b"}\n',
}


@pytest.mark.parametrize("name", GOOD)
def test_fault_A11_bad_lines_are_not_a_file_of_another_kind(name):
    content = GOOD[name]
    chunks = [content[begin : begin + 1000] for begin in range(0, len(content), 1000)]
    assert b"".join(batch.content for batch in line_batches(chunks, "file")) == content


def test_fault_A11_the_start_decides_and_not_the_first_piece(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"bad\n" * 100 + LINES)
    batches = list(read_batches(Piece(str(path), 400, 0, 400), ["text"]))
    assert sum(batch.num_lines for batch, _ in batches) == 100


def test_fault_A11_lines_beyond_the_start_do_not_count():
    content = b"x" * 99 + b"\n"
    content = content * (jsonl.BATCH_BYTES // 100 + 1) + LINES
    with pytest.raises(InputError, match="none of the first"):
        list(line_batches([content[: jsonl.BATCH_BYTES + 10], content[jsonl.BATCH_BYTES + 10 :]], "file"))


@pytest.mark.parametrize("number", [file_kinds.FEW_LINES - 1, file_kinds.FEW_LINES])
def test_fault_A11_how_many_bad_lines_make_a_file_bad(number):
    content = b"\n\n" + b"bad line\n" * number
    if number < file_kinds.FEW_LINES:
        assert list(line_batches([content], "file"))
    else:
        match = r"^file:3 \(byte 2\): not JSON: .*; none of the first 10 lines is a JSON object"
        with pytest.raises(InputError, match=match):
            list(line_batches([content], "file"))


@pytest.mark.parametrize("kind", ["pretty", "pretty, several", "pretty and large"])
def test_fault_B13_objects_over_lines_are_told_to_be_one_a_line(tmp_path, kind):
    path = tmp_path / "a.json"
    path.write_bytes(KINDS[kind][0](tmp_path))
    with pytest.raises(InputError, match="spans several lines, so it is not JSON Lines: write one object a line"):
        list(read_batches(Piece(str(path), 9), ["text"]))
