"""Input files to tasks: every document once, in order, whatever the sizes."""

import io
import os
import random
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_bfp.errors import InputError
from megatron_bfp.preprocessing import plan
from megatron_bfp.preprocessing.plan import Task, part_of, plan_tasks, task_bytes
from megatron_bfp.preprocessing.readers.inputs import Piece, count_lines, read_batches
from megatron_bfp.preprocessing.readers.jsonl import count_line_starts, line_chunks
from megatron_bfp.preprocessing.replanning import kept_tasks, plan_again


@given(st.binary(max_size=60).map(lambda content: content.replace(b"\x01", b"\n")), st.data())
def test_ranges_of_bytes_cover_every_line_once(content, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=6)))
    ends = [0, *cuts, len(content)]
    lines, starts = b"", 0
    for begin, end in zip(ends, ends[1:]):
        if begin == end:
            continue
        first, chunks = line_chunks(io.BytesIO(content), begin, end)
        chunks = b"".join(chunks)
        if chunks:
            assert first == len(lines)
        lines += chunks
        starts += count_line_starts(io.BytesIO(content), begin, end)
    assert lines == content
    assert starts == len(content.split(b"\n")) - (content[-1:] in (b"\n", b""))


def texts_of(tasks):
    batches = (batch for task in tasks for piece in task.pieces for batch, _ in read_batches(piece, ["text"]))
    return [record.texts[0] for batch in batches for record in batch.records(["text"])]


@pytest.fixture
def inputs(tmp_path):
    """Files of several kinds and sizes, and their 400 documents."""
    import gzip

    import pyarrow
    from pyarrow import parquet

    rng = random.Random(5)
    texts = [f"{number} " + "x" * rng.choice([0, 10, 500, 4000]) for number in range(400)]
    lines = [f'{{"text": "{text}"}}\n'.encode() for text in texts]
    paths = [str(tmp_path / name) for name in ("large.jsonl", "small.jsonl", "c.jsonl.gz", "d.parquet", "e.jsonl")]
    (tmp_path / "large.jsonl").write_bytes(b"".join(lines[:200]))
    (tmp_path / "small.jsonl").write_bytes(b"".join(lines[200:201]))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[201:250])))
    parquet.write_table(pyarrow.table({"text": texts[250:350]}), tmp_path / "d.parquet", row_group_size=9)
    (tmp_path / "e.jsonl").write_bytes(b"".join(lines[350:]).rstrip(b"\n"))
    return paths, texts


@pytest.fixture
def tasks_of(monkeypatch):
    """Have tasks of so many bytes, wherever in the input."""
    return lambda size: monkeypatch.setattr(plan, "task_bytes", lambda left: size)


@pytest.mark.parametrize("size", [100, 3000, 20_000, 1 << 30])
def test_tasks_hold_all_documents_in_order(inputs, tmp_path, tasks_of, size):
    tasks_of(size)
    paths, texts = inputs
    tasks = list(plan_tasks(paths, str(tmp_path)))
    assert texts_of(tasks) == texts
    assert [task.number for task in tasks] == list(range(len(tasks)))
    whole = max(os.path.getsize(path) for path in paths if path.endswith("gz"))
    largest = max(os.path.getsize(path) // 11 for path in paths if path.endswith("parquet"))  # of a row group
    assert all(task.num_bytes <= max(size, whole, 2 * largest) for task in tasks)
    assert sum(task.num_bytes for task in tasks) == pytest.approx(sum(map(os.path.getsize, paths)), abs=40)
    assert (len(tasks) == 1) == (size == 1 << 30)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 500])
def test_parts_follow_one_another(inputs, tmp_path, tasks_of, count):
    tasks_of(3000)
    paths, texts = inputs
    tasks = list(plan_tasks(paths, str(tmp_path)))
    parts = [part_of(tasks, index, count) for index in range(count)]
    assert [task for part in parts for task in part] == tasks
    if count <= 3:
        sizes = [sum(task.num_bytes for task in part) for part in parts]
        assert max(sizes) - min(sizes) <= 2 * max(task.num_bytes for task in tasks)


def test_lines_of_pieces_are_counted(inputs, tmp_path, tasks_of):
    tasks_of(700)
    paths, _ = inputs
    pieces = [piece for task in plan_tasks(paths[:1], str(tmp_path)) for piece in task.pieces]
    counts = [count_lines(piece) for piece in pieces]
    assert sum(counts) == 200 and 0 in counts  # a line longer than a piece leaves some without one
    assert counts == [sum(batch.num_lines for batch, _ in read_batches(piece, ["text"])) for piece in pieces]


def test_a_line_longer_than_many_pieces_is_not_read_for_each(tmp_path):
    class Counting(io.BytesIO):
        num_read = 0

        def readline(self, size=-1):
            line = super().readline(size)
            self.num_read += len(line)
            return line

    megabyte = 1 << 20
    file = Counting(b"x" * 32 * megabyte + b"\n")
    for begin in range(4 * megabyte, 32 * megabyte, 4 * megabyte):
        assert [*line_chunks(file, begin, begin + 4 * megabyte)[1]] == []
    assert file.num_read <= 7 * 5 * megabyte + 1


def test_a_stream_is_cut_into_segments(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "SEGMENT_BYTES", 1 << 20)
    path = str(tmp_path / "pipe")
    os.mkfifo(path)
    lines = [f'{{"text": "{number} {"x" * 1000}"}}\n'.encode() for number in range(14_000)]
    writer = threading.Thread(target=lambda: open(path, "wb").write(b"".join(lines)))
    writer.start()
    tasks = list(plan_tasks([path], str(tmp_path)))
    writer.join()
    assert len(tasks) > 2 and all(piece.segment for task in tasks for piece in task.pieces)
    assert texts_of(tasks) == [line[10:-3].decode() for line in lines]
    bytes_at = [piece.begin for task in tasks for piece in task.pieces]
    assert bytes_at == [sum(task.num_bytes for task in tasks[:number]) for number in range(len(tasks))]
    assert sum(count_lines(task.pieces[0]) for task in tasks) == len(lines)


def test_a_file_that_is_none_is_refused_before_it_is_cut(tmp_path, tasks_of):
    tasks_of(100)
    path = tmp_path / "a.json"
    path.write_text("[" + '{"text": "a"},\n' * 1000 + '{"text": "a"}]')
    with pytest.raises(InputError, match="is a JSON array"):
        list(plan_tasks([str(path)], str(tmp_path)))


def test_the_size_of_tasks():
    sizes = [task_bytes(left << 20) >> 20 for left in (0, 20, 64, 128, 2048, 4096, 1 << 14, 1 << 30)]
    assert sizes == [8, 8, 16, 32, 32, 64, 256, 256]


@pytest.mark.parametrize("num_files", [1, 7])
def test_tasks_become_smaller_towards_the_end(tmp_path, num_files):
    paths = [str(tmp_path / f"{number}.jsonl") for number in range(num_files)]
    for path in paths:
        with open(path, "wb") as file:
            file.write(b'{"text": "a"}\n')
            file.truncate((20 << 30) // num_files)  # a hole: only sizes are looked at
    sizes = [task.num_bytes >> 20 for task in plan_tasks(paths, str(tmp_path))]
    assert sum(sizes) == pytest.approx(20 << 10, abs=len(sizes)) and len(sizes) < 300
    assert max(sizes) <= 256 and min(sizes) >= 2
    assert all(later <= 1.5 * earlier for earlier, later in zip(sizes, sizes[1:])) and sizes[-1] <= 8


def test_a_task_is_named_by_its_files():
    task = Task(7, (Piece("a.jsonl", 1), Piece("b.jsonl", 1), Piece("b.jsonl", 1)))
    assert str(task) == "task 7 (a.jsonl and 1 more file)"


def piece(path, begin=0, end=None, num_bytes=100):
    return Piece(path, num_bytes, begin, end)


def test_tasks_are_kept_where_their_pieces_still_follow_one_another(tmp_path, monkeypatch):
    paths = {name: str(tmp_path / name) for name in "abcdx"}
    for path in paths.values():
        (tmp_path / path).write_text("{}\n" * 40)
    a, b, c, d, x = paths.values()
    before = [
        Task(0, (piece(a, 0, 50), piece(a, 50, 100))),
        Task(1, (piece(b), piece(c))),
        Task(2, (piece(d),)),
    ]
    everything = {0, 1, 2}
    assert kept_tasks(before, {a, b, c, d}, everything) == before
    assert kept_tasks(before, {a, c, d}, everything) == [before[0], before[2]]
    assert kept_tasks(before, {a, b, c, d}, {1}) == [before[1]]
    tasks = plan_again([a, b, x, c, d], before, before, {a, b, c, d})  # x stands between what shared a task
    assert [task.number for task in tasks] == [0, 3, 2]
    assert [piece.path for piece in tasks[1].pieces] == [b, x, c]
    assert plan_again([d, b, c, a], before, before, {a, b, c, d}) == [before[2], before[1], before[0]]


@pytest.mark.parametrize("content", [b"ab\n\ncde\nf", b"\n\n\n", b"abc", b"a\nb\n"])
def test_a_line_belongs_to_the_range_in_which_it_begins(content):
    """At every cut, also one exactly between two lines."""
    for cut in range(1, len(content)):
        parts = [b"".join(line_chunks(io.BytesIO(content), *ends)[1]) for ends in ((0, cut), (cut, len(content)))]
        assert b"".join(parts) == content
        lines = content.splitlines(keepends=True)
        begins = [sum(map(len, lines[:number])) for number in range(len(lines))]
        assert parts[0] == b"".join(line for line, begin in zip(lines, begins) if begin < cut)


def test_a_task_belongs_to_the_part_in_which_its_middle_is():
    for sizes, expected in (([3, 1], [[0], [1]]), ([1, 3], [[0], [1]]), ([1, 1, 1, 1], [[0, 1], [2, 3]])):
        tasks = [Task(number, (Piece("file", size),)) for number, size in enumerate(sizes)]
        assert [[task.number for task in part_of(tasks, index, 2)] for index in range(2)] == expected


def test_pieces_of_row_groups_become_smaller_towards_the_end(monkeypatch):
    monkeypatch.setattr(plan, "task_bytes", lambda left: max(10, left // 2))
    pieces = list(plan._row_group_pieces("file", 100, [7] * 10, left=100))
    assert [(piece.begin, piece.end) for piece in pieces] == [(0, 5), (5, 7), (7, 8), (8, 9), (9, 10)]
    assert [piece.num_bytes for piece in pieces] == [50, 20, 10, 10, 10]


def test_a_finished_task_is_kept_if_all_of_its_files_are_unchanged():
    tasks = [
        Task(number, tuple(Piece(path, 1) for path in paths)) for number, paths in enumerate(("a", "ab", "b", "c"))
    ]
    kept = [task.number for task in kept_tasks(tasks, {"a", "c"}, {0, 1, 2})]
    assert kept == [0]
