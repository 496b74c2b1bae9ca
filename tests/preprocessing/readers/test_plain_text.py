"""Plain text: a document for each file, paragraph or line, the same in any pieces and from a pipe."""

import gzip
import os
import threading

import pytest

pytest.importorskip("orjson")

from megatron_bfp.errors import InputError
from megatron_bfp.preprocessing import plan
from megatron_bfp.preprocessing.readers import jsonl
from megatron_bfp.preprocessing.readers.documents import BadDocument
from megatron_bfp.preprocessing.readers.input_files import input_files
from megatron_bfp.preprocessing.readers.inputs import Piece, read_batches

CONTENT = "\ufeffé one\r\n\r\n \t\ntwo\nstill two  \n\n\n{three}\nend".encode()
DOCUMENTS = {
    "file": ["é one\r\n\r\n \t\ntwo\nstill two  \n\n\n{three}\nend"],
    "paragraph": ["é one", "two\nstill two  ", "{three}\nend"],
    "line": ["é one", " \t", "two", "still two  ", "{three}", "end"],
}
LINES = {"file": [1], "paragraph": [1, 4, 8], "line": [1, 3, 4, 5, 8, 9]}


def read(path, unit, pieces=None):
    for piece in pieces or [Piece(str(path), os.path.getsize(path))]:
        for batch, _ in read_batches(piece, ["text"], unit):
            yield from batch.records(["text"])


@pytest.mark.parametrize("unit", DOCUMENTS)
@pytest.mark.parametrize("batch_bytes", [1, 7, 1 << 20])
def test_a_document_is_what_the_option_says(tmp_path, monkeypatch, unit, batch_bytes):
    monkeypatch.setattr(jsonl, "BATCH_BYTES", batch_bytes)
    for name, content in (("a.txt", CONTENT), ("b", CONTENT), ("c.txt.gz", gzip.compress(CONTENT))):
        (tmp_path / name).write_bytes(content)
        documents = list(read(tmp_path / name, unit))
        assert [document.texts[0] for document in documents] == DOCUMENTS[unit]
        assert [document.location.line for document in documents] == LINES[unit]
        for document in documents:
            assert (
                CONTENT[document.location.byte :].removeprefix(b"\xef\xbb\xbf").startswith(document.texts[0].encode())
            )


@pytest.mark.parametrize("unit", DOCUMENTS)
def test_pieces_and_a_pipe_give_the_same_documents(tmp_path, monkeypatch, unit):
    monkeypatch.setattr(plan, "SMALL_TASK", 3000)
    monkeypatch.setattr(plan, "SMALLEST_TASK", 3000)
    monkeypatch.setattr(plan, "SEGMENT_BYTES", 3000)
    path, pipe = tmp_path / "a.txt", tmp_path / "pipe"
    path.write_text("".join(f"text {number}\n" + "\n" * (number % 5 == 0) for number in range(2000)))
    wanted = [document.texts[0] for document in read(path, unit)]
    assert len(wanted) == {"file": 1, "paragraph": 400, "line": 2000}[unit] + (unit == "paragraph")
    pieces = plan.file_pieces(str(path), unit)
    assert len(pieces) > 4 if unit == "line" else len(pieces) == 1
    assert [document.texts[0] for document in read(path, unit, pieces)] == wanted
    os.mkfifo(pipe)
    threading.Thread(target=lambda: pipe.write_bytes(path.read_bytes()), daemon=True).start()
    tasks = list(plan.plan_tasks([str(pipe)], str(tmp_path), unit))
    piped = [document for task in tasks for document in read(pipe, unit, task.pieces)]
    assert [document.texts[0] for document in piped] == wanted


def test_what_is_not_utf_8_is_a_bad_document_and_what_is_no_text_a_bad_file(tmp_path):
    (tmp_path / "a.txt").write_bytes("gut\nschön\n".encode("latin-1"))
    good, bad = read(tmp_path / "a.txt", "line")
    assert isinstance(bad, BadDocument) and str(bad).endswith("a.txt:2 (byte 4): byte 4 of the document is not UTF-8")
    for content in (b"PK\x03\x04", b"%PDF-1.7\n", b"a\0b", b"version https://git-lfs.github.com/spec/v1\n"):
        (tmp_path / "b.txt").write_bytes(content)
        with pytest.raises(InputError, match="b.txt: is "):
            list(read(tmp_path / "b.txt", "line"))


def test_without_the_option_text_is_no_input(tmp_path):
    for name in ("a.txt", "b.jsonl", "c.md"):
        (tmp_path / name).write_text("a text\n" * 10)
    assert [os.path.basename(path) for path in input_files([str(tmp_path)]).paths] == ["b.jsonl"]
    files = input_files([str(tmp_path)], is_text_read=True)
    assert [os.path.basename(path) for path in files.paths] == ["a.txt", "b.jsonl"]
    for name, unit in (("a.txt", None), ("b.jsonl", "line")):
        with pytest.raises(InputError, match="none of the first 10 lines is a JSON object"):
            list(read(tmp_path / name, unit))


def test_other_keys_than_text_are_bad_documents(tmp_path):
    (tmp_path / "a.txt").write_text("a text\n")
    ((batch, _),) = read_batches(Piece(str(tmp_path / "a.txt"), 7), ["title"], "line")
    assert [str(record) for record in batch.records(["title"])] == [
        f"{tmp_path}/a.txt:1 (byte 0): no key 'title'; its keys are 'text'"
    ]
