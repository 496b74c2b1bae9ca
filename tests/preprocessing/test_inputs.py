"""--input: files, folders, patterns and standard input, in a known order."""

import gzip
import os
import threading

import pytest

from megatron_bfp import InputError, OptionError
from megatron_bfp.preprocessing.input_files import input_files
from megatron_bfp.preprocessing.inputs import Piece, read_batches, stream_batches


@pytest.fixture
def folder(tmp_path):
    names = [
        "b.jsonl",
        "a.json",
        "sub/c.jsonl.gz",
        "sub/d.ndjson.zst",
        "part-1.parquet",
        "part-10.parquet",
        "README.md",
    ]
    names += [".hidden.jsonl", "_metadata.json", ".cache/x.jsonl", "old.bad.jsonl"]
    for name in names:
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    return tmp_path / "data"


def relative(paths, folder):
    return [os.path.relpath(path, folder) for path in paths]


def left_out(files):
    return {entry.reason: (entry.num_files, entry.first) for entry in files.left_out}


def test_a_folder_s_data_files_are_sorted_and_the_others_counted(folder):
    files = input_files([str(folder)])
    wanted = ["a.json", "b.jsonl", "part-1.parquet", "part-10.parquet", "sub/c.jsonl.gz", "sub/d.ndjson.zst"]
    assert relative(files.paths, folder) == wanted
    assert left_out(files) == {
        "not named as data": (1, str(folder / "README.md")),
        "names that begin with . or _": (2, str(folder / ".hidden.jsonl")),
        "written by this tool: *.bad.jsonl, *.summary.json": (1, str(folder / "old.bad.jsonl")),
        "in folders named .*, _*, *.bfp or *.shards": (1, str(folder / ".cache")),
    }


def test_patterns_are_sorted_and_the_order_of_values_is_kept(folder):
    values = [str(folder / "part-*"), "-", str(folder / "b.jsonl"), str(folder / "**" / "*.gz"), str(folder / "a.json")]
    files = input_files(values)
    assert files.left_out == []
    wanted = ["part-1.parquet", "part-10.parquet", "b.jsonl", "sub/c.jsonl.gz", "a.json"]
    assert relative([path for path in files.paths if path != "-"], folder) == wanted and files.paths[2] == "-"
    assert relative(input_files([str(folder / "su*")]).paths, folder) == ["sub/c.jsonl.gz", "sub/d.ndjson.zst"]


def test_a_file_whose_name_looks_like_a_pattern(tmp_path):
    (tmp_path / "a[1].jsonl").write_text("")
    assert input_files([str(tmp_path / "a[1].jsonl")]).paths == [str(tmp_path / "a[1].jsonl")]


@pytest.mark.parametrize(
    "values, reason",
    [
        (["{0}/none.jsonl"], "no such file"),
        (["{0}/*.none"], "no file matches this pattern"),
        (["{0}/.cache/../empty"], "no file in this folder is named as data"),
        (["-", "-"], "once only"),
    ],
)
def test_what_names_no_file_is_refused(folder, values, reason):
    (folder / "empty").mkdir()
    with pytest.raises(OptionError, match=f"--input.*{reason}"):
        input_files([value.format(folder) for value in values])


def test_a_pipe_is_read_as_a_file(tmp_path):
    path = str(tmp_path / "pipe")
    os.mkfifo(path)
    content = gzip.compress(b'{"text": "a"}\n' * 100_000)
    writer = threading.Thread(target=lambda: open(path, "wb").write(content))
    writer.start()
    (path_given,) = input_files([path]).paths
    assert sum(len(list(batch.records(["text"]))) for batch in stream_batches(path_given)) == 100_000
    writer.join()


def test_parquet_from_a_pipe_is_refused(tmp_path):
    path = str(tmp_path / "pipe")
    os.mkfifo(path)
    writer = threading.Thread(target=lambda: open(path, "wb").write(b"PAR1"))
    writer.start()
    with pytest.raises(InputError, match="cannot be read from a pipe"):
        list(stream_batches(path))
    writer.join()


def test_a_missing_file_and_a_folder_are_input_errors(tmp_path):
    for path, reason in ((tmp_path / "none.jsonl", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(InputError, match=f"cannot be read: {reason}"):
            list(read_batches(Piece(str(path), 0), ["text"]))
