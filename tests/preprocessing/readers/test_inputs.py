"""--input: files, folders, patterns and standard input, in a known order."""

import errno
import gzip
import io
import os
import sys
import threading

import pytest

from megatron_bfp import InputError, OptionError
from megatron_bfp.preprocessing.readers.input_files import input_files
from megatron_bfp.preprocessing.readers.inputs import Piece, read_batches, start_of, stream_batches


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
        "written by this tool: *.bad.jsonl, *.summary.json, *.card.json": (1, str(folder / "old.bad.jsonl")),
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


def put(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    return folder


def test_fault_A09_linked_folders_are_read(tmp_path):
    data = put(tmp_path / "data", "a.jsonl", "sub/b.jsonl")
    put(tmp_path / "elsewhere", "c.jsonl", "deep/d.parquet")
    (data / "link").symlink_to(tmp_path / "elsewhere")
    (data / "sub" / "link.jsonl").symlink_to(put(tmp_path, "e.txt") / "e.txt")
    wanted = ["a.jsonl", "link/c.jsonl", "link/deep/d.parquet", "sub/b.jsonl", "sub/link.jsonl"]
    assert relative(input_files([str(data)]).paths, data) == wanted
    (tmp_path / "linked").symlink_to(data)
    assert relative(input_files([str(tmp_path / "linked")]).paths, tmp_path / "linked") == wanted


def test_fault_A09_links_that_lead_back_are_noticed_and_counted(tmp_path):
    data = put(tmp_path / "data", "a.jsonl", "sub/b.jsonl")
    (data / "up").symlink_to("..")
    (data / "sub" / "back").symlink_to(data)
    (data / "sub" / "self").symlink_to(".")
    files = input_files([str(data / "sub")])
    assert relative(files.paths, data) == ["sub/b.jsonl", "sub/back/a.jsonl"]
    (loops,) = files.left_out
    assert (loops.reason, loops.num_files) == ("links back to a folder that holds them", 3)
    assert str(loops).startswith("3 links in the folders given not read")
    assert [str(entry).split(" in ")[0] for entry in input_files([str(data / "**")]).left_out] == ["3 links"]
    (data / "once_more").symlink_to(data / "sub")
    with pytest.raises(OptionError, match="sub/b.jsonl: is the same file as .*once_more/b.jsonl"):
        input_files([str(data)])


def test_fault_A09_links_everywhere_are_walked_once(tmp_path):
    folders = [tmp_path / "data" / f"{number:02}" for number in range(15)]
    for folder in folders:
        folder.mkdir(parents=True)
        for other in folders:
            (folder / f"to-{other.name}").symlink_to(other)
    put(tmp_path / "data", "a.jsonl")
    assert relative(input_files([str(tmp_path / "data")]).paths, tmp_path / "data") == ["a.jsonl"]
    put(folders[7], "b.jsonl")
    assert len(input_files([str(tmp_path / "data" / "**" / "*.jsonl")]).paths) == 2
    with pytest.raises(OptionError, match=r"b.jsonl: is the same file as .*b.jsonl"):
        input_files([str(tmp_path / "data")])


def test_fault_A09_what_is_left_out_is_counted_by_the_rule(tmp_path):
    data = put(
        tmp_path / "data", "a.jsonl", "_x/b.jsonl", "_x/c/d.jsonl", ".y/e.jsonl", "old.shards/f", "old.bfp/g.json"
    )
    put(data, "_h.jsonl", "README", "notes.txt", "out.summary.json")
    (data / "_l").symlink_to(put(tmp_path / "far", "h.jsonl", "i.jsonl"))
    (data / "empty" / "_none").mkdir(parents=True)
    files = input_files([str(data)])
    assert relative(files.paths, data) == ["a.jsonl"]
    assert [str(entry) for entry in files.left_out] == [
        f"7 other files in the folders given not read (in folders named .*, _*, *.bfp or *.shards): {data}/.y ...",
        f"2 other files in the folders given not read (not named as data): {data}/README ...",
        f"1 other file in the folders given not read (names that begin with . or _): {data}/_h.jsonl",
        "1 other file in the folders given not read (written by this tool: *.bad.jsonl, *.summary.json, *.card.json): "
        f"{data}/out.summary.json",
    ]
    assert relative(input_files([str(data / "_x")]).paths, data) == ["_x/b.jsonl", "_x/c/d.jsonl"]  # it is named


@pytest.mark.parametrize("error", [errno.EACCES, errno.ESTALE, errno.EIO])
@pytest.mark.parametrize("value", ["data", "data/*", "data/**", "data/**/*.jsonl", "data/s*/*.jsonl"])
def test_fault_A09_what_cannot_be_listed_is_an_error(tmp_path, monkeypatch, error, value):
    put(tmp_path / "data", "a.jsonl", "sub/b.jsonl")
    scandir = os.scandir

    def failing(folder):
        if os.path.basename(folder) == "sub":
            raise OSError(error, os.strerror(error), folder)
        return scandir(folder)

    assert len(input_files([str(tmp_path / "data" / "**")]).paths) == 2
    monkeypatch.setattr(os, "scandir", failing)
    with pytest.raises(InputError, match=rf"data/sub cannot be listed: {os.strerror(error)}$"):
        input_files([str(tmp_path / value)])


def test_fault_A09_what_cannot_be_looked_at_is_an_error(tmp_path, monkeypatch):
    put(tmp_path / "data", "a.jsonl", "sub/b.jsonl")
    (tmp_path / "data" / "link").symlink_to(tmp_path / "data" / "sub")
    for name in ("stat", "lstat"):
        call = getattr(os, name)

        def failing(path, *rest, call=call, **options):
            if str(path).endswith(("b.jsonl", "link")):
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
            return call(path, *rest, **options)

        monkeypatch.setattr(os, name, failing)
    for value in ("data", "data/*", "data/sub/b.jsonl", "data/*/b.jsonl"):
        with pytest.raises(InputError, match="cannot be read: Input/output error$"):
            input_files([str(tmp_path / value)])


def test_a_pattern_gives_the_files_of_the_folders_it_matches_too(tmp_path):
    data = put(tmp_path / "data", "a.jsonl", "notes.txt", "sub/b.jsonl", "sub/c.txt", ".h/d.jsonl", "none/e.txt")
    files = input_files([str(data / "*")])
    assert relative(files.paths, data) == ["a.jsonl", "notes.txt", "sub/b.jsonl"]
    assert left_out(files) == {"not named as data": (2, str(data / "none/e.txt"))}
    everything = input_files([str(data / "**")])  # each once, though folders are matched, too
    assert sorted(relative(everything.paths, data)) == [
        "a.jsonl",
        "none/e.txt",
        "notes.txt",
        "sub/b.jsonl",
        "sub/c.txt",
    ]
    assert left_out(everything) == {"in folders named .*, _*, *.bfp or *.shards": (1, str(data / ".h"))}
    assert relative(input_files([f"{data}/*/"]).paths, data) == ["sub/b.jsonl"]
    assert relative(input_files([str(data / "**" / "[bd].jsonl")]).paths, data) == ["sub/b.jsonl"]
    assert relative(input_files([str(data / ".*" / "*.jsonl")]).paths, data) == [".h/d.jsonl"]
    (data / "sub" / "loop").symlink_to(data)
    assert relative(input_files([str(data / "**" / "b.jsonl")]).paths, data)[0] == "sub/b.jsonl"


@pytest.mark.parametrize("value", ["a.jsonl", "*.jsonl", "sub/../s*", "./a?jsonl", "/"])
def test_patterns_match_what_the_standard_library_s_match(tmp_path, monkeypatch, value):
    import glob

    from megatron_bfp.preprocessing.readers.input_files import matching_paths

    put(tmp_path, "a.jsonl", "b.jsonl", "sub/c.jsonl", ".d.jsonl")
    monkeypatch.chdir(tmp_path)
    ours = [os.path.normpath(path) for path in matching_paths(value)]
    assert sorted(ours) == sorted(map(os.path.normpath, glob.glob(value)))


@pytest.mark.parametrize("second", ["same", "dot", "link", "hard", "linked folder", "pattern", "folder"])
def test_fault_A10_a_file_that_comes_twice_is_refused_with_both_names(tmp_path, monkeypatch, second):
    put(tmp_path / "data", "a.jsonl", "b.jsonl")
    first = str(tmp_path / "data" / "a.jsonl")
    others = {
        "same": first,
        "dot": str(tmp_path / "data" / ".." / "data" / "a.jsonl"),
        "link": str(tmp_path / "link.jsonl"),
        "hard": str(tmp_path / "hard.jsonl"),
        "linked folder": str(tmp_path / "folder"),
        "pattern": str(tmp_path / "data" / "*"),
        "folder": str(tmp_path / "data"),
    }
    os.symlink(first, tmp_path / "link.jsonl")
    os.link(first, tmp_path / "hard.jsonl")
    os.symlink(tmp_path / "data", tmp_path / "folder")
    for values in ([first, others[second]], [others[second], first]):
        with pytest.raises(OptionError) as error:
            input_files(values)
        names = {"same": [first], "linked folder": [first, others[second] + "/a.jsonl"]}
        expected = names.get(second, [first] if second in ("pattern", "folder") else [first, others[second]])
        assert all(name in str(error.value) for name in expected) and "\n" not in str(error.value)
    assert len(input_files([first, str(tmp_path / "data" / "b.jsonl")]).paths) == 2


def test_fault_A10_standard_input_by_two_names_is_refused(tmp_path, monkeypatch):
    put(tmp_path, "a.jsonl")
    with open(tmp_path / "a.jsonl") as file:
        monkeypatch.setattr(sys, "stdin", file)
        name = f"/dev/fd/{file.fileno()}"
        for values in (["-", name], [name, "-"], ["-", str(tmp_path / "a.jsonl")]):
            with pytest.raises(OptionError, match="is the same file as"):
                input_files(values)
        assert input_files(["-"]).paths == ["-"]


def test_fault_A10_names_tell_where_inodes_do_not(tmp_path, monkeypatch):
    from megatron_bfp.preprocessing.readers import input_files as module

    put(tmp_path, "a.jsonl", "b.jsonl")
    os.symlink("a.jsonl", tmp_path / "link.jsonl")
    monkeypatch.setattr(module, "_identity", lambda path: (1, 0))
    assert len(input_files([str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]).paths) == 2
    with pytest.raises(OptionError, match="link.jsonl: is the same file as .*a.jsonl"):
        input_files([str(tmp_path / name) for name in ("a.jsonl", "link.jsonl")])


def test_fault_A10_a_file_beside_its_compressed_self_is_warned_of(tmp_path):
    put(
        tmp_path, "a.jsonl", "a.jsonl.gz", "b.jsonl.zst", "b.jsonl.xz", "c.jsonl", "sub/c.jsonl.gz", "d.json", "d.jsonl"
    )
    files = input_files([str(tmp_path)])
    assert len(files.paths) == 8
    (warning,) = files.warnings
    assert warning == (
        f"{tmp_path}/a.jsonl and {tmp_path}/a.jsonl.gz are both read (and 1 more such pair); if one is a copy of the "
        "other, its documents come twice"
    )
    assert input_files([str(tmp_path / "c.jsonl"), str(tmp_path / "a.jsonl.gz")]).warnings == []


@pytest.mark.parametrize("name", ["a.jsonl", "README", "folder"])
@pytest.mark.parametrize("value", [".", "*", "**", "{name}", "{name}/x.jsonl", "{name}*/x.jsonl"])
def test_fault_B05_a_broken_link_is_one_line(tmp_path, monkeypatch, name, value):
    put(tmp_path, "good.jsonl")
    os.symlink("gone", tmp_path / name)
    monkeypatch.chdir(tmp_path)
    if value == "{name}/x.jsonl":
        with pytest.raises(OptionError, match="no such file"):
            input_files([value.format(name=name)])
        return
    with pytest.raises(InputError, match=rf"--input (\./)?{name}: is a link to gone, which does not exist"):
        input_files([value.format(name=name)])
    os.symlink("gone", tmp_path / "_left_out")
    os.remove(name)
    assert relative(input_files(["."]).paths, ".") == ["good.jsonl"]


def test_fault_B05_a_link_to_itself_is_one_line(tmp_path):
    os.symlink("a.jsonl", tmp_path / "a.jsonl")
    for value in (tmp_path, tmp_path / "a.jsonl", tmp_path / "*"):
        with pytest.raises(InputError, match="a.jsonl: cannot be read: Too many levels of symbolic links$"):
            input_files([str(value)])


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


def test_the_start_of_a_file_is_read_whole_also_in_small_chunks():
    """As a pipe gives them."""

    class Small(io.BytesIO):
        def read(self, size=-1):
            return super().read(min(size, 3))

    for size, expected in ((8, b"01234567"), (10, b"0123456789"), (20, b"0123456789")):
        assert start_of(Small(b"0123456789"), size) == expected
