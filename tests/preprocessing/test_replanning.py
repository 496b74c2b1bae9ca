"""Inputs that change before a job is finished: what has not changed is kept, and the bytes are a new job's."""

import json
import os
import random
import re
import sys

import pytest

pytest.importorskip("tokenizers")

from helpers.tokenizer_fixtures import EOD

from megatron_bfp import InputError, OptionError
from megatron_bfp.commands import preprocess as command
from megatron_bfp.preprocessing import job_folder, joiner, plan, summary, write
from megatron_bfp.preprocessing.task import TaskWork

NAMES = ("a", "b", "c", "d", "e")


def write_documents(path, name, number=200, bad_at=()):
    """A file of about 14 KB. Times of modification are set, so that they differ though tests are quick."""
    rng = random.Random(name)
    lines = [json.dumps({"text": f"{name} {line} " + "word " * rng.randrange(18), "b": name}) for line in range(number)]
    for line in bad_at:
        lines[line] = "bad"
    path.write_text("\n".join(lines) + "\n")
    write_documents.time += 1
    os.utime(path, (1_700_000_000, 1_700_000_000 + write_documents.time))


write_documents.time = 0


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Five files that are cut into some tasks each, and small ones that share one."""
    for name in ("SMALL_TASK", "SMALLEST_TASK"):
        monkeypatch.setattr(plan, name, 10_000)
    (tmp_path / "data").mkdir()
    for name in NAMES:
        write_documents(tmp_path / "data" / f"{name}.jsonl", name)
    for name in ("b1", "b2", "b3"):
        write_documents(tmp_path / "data" / f"{name}.jsonl", name, 20)
    return tmp_path / "data"


@pytest.fixture
def run(folder, tmp_path, tokenizer_file, capsys, monkeypatch):
    """Run the command in this process; returns its status, its messages and the files of the tasks that it did."""

    def run(*arguments, output="out", inputs=None, keys=("text", "b")):
        done = []

        class Watched(TaskWork):
            def compute(self, report):
                done.append({os.path.basename(piece.path).split(".")[0] for piece in self.task.pieces})
                super().compute(report)

        monkeypatch.setattr(write, "TaskWork", Watched)
        arguments += ("--input", *(inputs or [folder]), "--output-prefix", tmp_path / output)
        arguments += ("--tokenizer-model", tokenizer_file, "--eod-token", EOD, "--append-eod")
        if "--shard-index" not in arguments:
            arguments += ("--seq-length", 64)
        monkeypatch.setattr(sys, "argv", ["preprocess_bfp", *map(str, arguments), "--json-keys", *keys])
        status = command.console()
        return status, capsys.readouterr().err, done

    return run


def contents(tmp_path, output="out"):
    suffixes = [f"_{key}_document.{kind}" for key in ("text", "b") for kind in ("bin", "idx")] + [".bad.jsonl"]
    paths = [tmp_path / (output + suffix) for suffix in suffixes]
    return [path.read_bytes() if path.exists() else None for path in paths]


def interrupted(*_, **__):
    raise KeyboardInterrupt


def interrupted_when_joined(task_joiner, *_):
    for copy in task_joiner._copies:
        copy.result()
    raise KeyboardInterrupt


@pytest.fixture
def stopped(run, monkeypatch):
    """Stops a job when so many tasks are finished; with None, when all are finished and joined."""

    def stop(number, *arguments, **options):
        with monkeypatch.context() as patched:
            if number is None:
                patched.setattr(write.TaskJoiner, "finish", interrupted_when_joined)
            else:
                count, compute = 0, TaskWork.compute

                def compute_some(work, report):
                    nonlocal count
                    if count == number:
                        raise KeyboardInterrupt
                    count += 1
                    compute(work, report)

                patched.setattr(TaskWork, "compute", compute_some)
            assert run(*arguments, **options)[0] == 130

    return stop


@pytest.mark.parametrize("is_compressed", [False, True])
def test_fault_B08_a_repaired_file_is_done_again_alone(run, folder, tmp_path, is_compressed):
    import gzip

    if is_compressed:
        write_documents(folder / "c.jsonl", "c")
        whole = gzip.compress((folder / "c.jsonl").read_bytes())
        (folder / "c.jsonl").unlink()
        (folder / "c.jsonl.gz").write_bytes(whole[:-9])
    else:
        write_documents(folder / "c.jsonl", "c", bad_at=[180])
    status, err, done = run()
    assert status == 2 and "finished tasks" in err and "c.jsonl" in err
    if is_compressed:
        (folder / "c.jsonl.gz").write_bytes(whole)
    else:
        write_documents(folder / "c.jsonl", "c")
    status, err, again = run()
    assert status == 0
    assert re.search(r"its inputs have changed since: .*c.jsonl\S* \([0-9,]+ bytes of .* before, [0-9,]+ bytes of", err)
    assert not any({"a", "b"} & files for files in again) and {"c", "d", "e"} <= {
        name for files in again for name in files
    }
    assert run(output="whole")[0] == 0
    assert contents(tmp_path) == contents(tmp_path, "whole")
    assert len(contents(tmp_path)[0]) > 10_000 and not (tmp_path / "out.shards").exists()


CHANGES = {
    "first": {"a"},
    "middle": {"c"},
    "in a shared task": {"b2"},
    "last": {"e"},
    "two": {"b", "d"},
    "touched": {"d"},
    "shorter": {"b"},
    "removed": set(),
    "added in front": {"0"},
    "added behind": {"f"},
    "renamed": {"b0"},
    "all": {*NAMES, "b1", "b2", "b3"},
    "nothing": set(),
}
"""Change -> the files that are others then."""
GONE = {"removed": {"c"}, "renamed": {"b"}}


def files_in_tasks_with(tmp_path, names):
    """These files, and those that share a task with one of them, which is done again whole."""
    planned = json.loads((tmp_path / "out.shards" / "run").read_text())["plan"]
    shared = [{os.path.basename(piece[0]).split(".")[0] for piece in pieces} for _, pieces in planned]
    return set(names).union(*(files for files in shared if files & names))


def change_files(folder, change):
    for name in {"first": "a", "middle": "c", "in a shared task": ["b2"], "last": "e", "two": "bd"}.get(change, ""):
        write_documents(folder / f"{name}.jsonl", name + " changed", 20 if name == "b2" else 190)
    if change == "touched":
        os.utime(folder / "d.jsonl")
    elif change == "shorter":
        write_documents(folder / "b.jsonl", "b", 3)
    elif change == "removed":
        (folder / "c.jsonl").unlink()
    elif change.startswith("added"):
        name = "0" if change.endswith("front") else "f"
        write_documents(folder / f"{name}.jsonl", name)
    elif change == "renamed":
        (folder / "b.jsonl").rename(folder / "b0.jsonl")
    elif change == "all":
        for path in folder.iterdir():
            os.utime(path)


QUICK = [("first", None), ("in a shared task", None), ("removed", None), ("added in front", 9), ("middle", 3)]
CASES = [(change, number) for change in CHANGES for number in (3, 9, None)]


@pytest.mark.parametrize(
    ("change", "number"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_fault_B08_what_has_not_changed_is_kept_and_the_bytes_are_a_new_job_s(
    run, stopped, folder, tmp_path, change, number
):
    write_documents(folder / "d.jsonl", "d", bad_at=[1, 77, 199])
    stopped(number, "--skip-bad-documents")
    expected = files_in_tasks_with(tmp_path, CHANGES[change] | GONE.get(change, set())) - GONE.get(change, set())
    change_files(folder, change)
    status, err, done = run("--skip-bad-documents")
    assert status == 0 and ("its inputs have changed" in err) == (change != "nothing")
    if number is None:
        assert {name for files in done for name in files} == expected
    assert run("--skip-bad-documents", output="whole")[0] == 0
    assert contents(tmp_path) == contents(tmp_path, "whole")
    bad = [json.loads(line)["line"] for line in (contents(tmp_path)[4] or b"").splitlines()]
    assert bad == ([] if change == "two" else [2, 78, 200])  # d is repaired then


@pytest.mark.parametrize("how", ["grows", "goes"])
def test_fault_B08_a_file_that_changes_while_it_is_read_is_refused(run, folder, tmp_path, how, monkeypatch):
    finish = TaskWork.finish

    def change_meanwhile(*arguments):
        if how == "goes":
            (folder / "e.jsonl").unlink(missing_ok=True)
        else:
            with open(folder / "e.jsonl", "a") as file:
                file.write('{"text": "more", "b": "more"}\n')
        return finish(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(TaskWork, "finish", change_meanwhile)
        status, err, _ = run()
    assert status == 2 and "e.jsonl" in err and not list(tmp_path.glob("out_*"))
    if how == "grows":
        assert re.search(
            r"inputs changed while they were read: .*e.jsonl \([0-9,]+ bytes .* before, .* now\)\. Give", err
        )
    status, err, done = run()
    assert status == 0 and "its inputs have changed since" in err and not any({"a", "b"} & files for files in done)
    assert run(output="whole")[0] == 0
    assert contents(tmp_path) == contents(tmp_path, "whole")


def test_fault_B08_the_order_of_inputs_may_change(run, stopped, folder, tmp_path):
    paths = [folder / f"{name}.jsonl" for name in NAMES]
    backwards = paths[::-1]
    stopped(None, inputs=paths)
    status, err, done = run(inputs=backwards)
    assert status == 0 and "the order of its inputs" in err and done == []
    assert run(inputs=backwards, output="whole")[0] == 0
    assert contents(tmp_path) == contents(tmp_path, "whole")


@pytest.mark.parametrize("moment", ["take_out", "plan", "cut", "after the cut"])
def test_fault_B08_a_kill_while_it_is_planned_again_loses_nothing(run, stopped, folder, tmp_path, moment, monkeypatch):
    stopped(None)
    expected = files_in_tasks_with(tmp_path, {"c"})
    change_files(folder, "middle")
    with monkeypatch.context() as patched:
        if moment == "take_out":
            calls, take_out = [], joiner.take_out

            def third_is_interrupted(*arguments):
                calls.append(arguments)
                return take_out(*arguments) if len(calls) < 4 else interrupted()

            patched.setattr(joiner, "take_out", third_is_interrupted)
        elif moment == "plan":
            patched.setattr(job_folder, "write_whole", interrupted)
        elif moment == "cut":
            patched.setattr(job_folder.JobFolder, "_cut", interrupted)
        else:
            cut = job_folder.JobFolder._cut
            patched.setattr(job_folder.JobFolder, "_cut", lambda *arguments: (cut(*arguments), interrupted()))
        assert run()[0] == 130
    if moment == "cut":
        sizes = json.loads((tmp_path / "out.shards" / "run").read_text())["cut"]
        assert all((tmp_path / "out.shards" / name).stat().st_size > size for name, size in sizes.items())
        with monkeypatch.context() as patched:
            patched.setattr(TaskWork, "compute", interrupted)
            assert run()[0] == 130
        assert all((tmp_path / "out.shards" / name).stat().st_size <= size for name, size in sizes.items())
    status, err, done = run()
    assert status == 0 and {name for files in done for name in files} == expected
    assert run(output="whole")[0] == 0
    assert contents(tmp_path) == contents(tmp_path, "whole")


def test_fault_B08_what_is_no_longer_to_be_joined_is_cut_off(run, stopped, folder, tmp_path, monkeypatch):
    """Copies may leave holes as they are, and so rely on nothing being behind what was joined."""
    stopped(None)
    size = (tmp_path / "out.shards" / "joined-0.bin").stat().st_size
    change_files(folder, "middle")
    with monkeypatch.context() as patched:
        patched.setattr(TaskWork, "compute", interrupted)
        assert run()[0] == 130
    assert 0 < (tmp_path / "out.shards" / "joined-0.bin").stat().st_size < size / 2


def test_fault_B08_the_product_s_version_does_not_matter(run, stopped, monkeypatch):
    monkeypatch.setattr(summary, "__version__", "0.0.1", raising=False)
    stopped(9)
    monkeypatch.setattr(summary, "__version__", "9.9.9", raising=False)
    status, err, done = run()
    assert status == 0 and len(done) < 9


def test_fault_B08_a_job_that_an_earlier_version_finished_is_finished(run, folder, tmp_path):
    assert run()[0] == 0
    path = tmp_path / "out.summary.json"
    summary = json.loads(path.read_text())
    assert "version" not in summary["run"]
    path.write_text(json.dumps(summary | {"run": {"version": "0.0.1", **summary["run"]}}))
    assert run() == (0, "", [])
    path.write_text(json.dumps(summary | {"run": summary["run"] | {"append_eod": False}}))
    status, err, _ = run()
    assert status == 2 and "it differs in append_eod (false before, true now)" in err


def test_fault_B08_files_that_are_left_out_but_there_are_not_lost_unasked(run, stopped, folder, tmp_path):
    stopped(9)
    paths = [folder / f"{name}.jsonl" for name in "bcde"]
    status, err, _ = run(inputs=paths)
    assert status == 2 and "a.jsonl, which is there and not given now" in err and "--overwrite" in err
    assert len(list((tmp_path / "out.shards").glob("0*"))) == 9
    assert run("--overwrite", inputs=paths)[0] == 0
    assert run(inputs=paths, output="whole")[0] == 0
    assert contents(tmp_path) == contents(tmp_path, "whole")


def test_fault_B08_a_part_of_the_input_is_done_with_what_all_jobs_read(run, stopped, folder):
    part = ("--shard-index", 0, "--shard-count", 2)
    stopped(3, *part)
    change_files(folder, "middle")
    status, err, _ = run(*part)
    assert status == 2 and re.search(r"c.jsonl \([0-9,]+ bytes of .* before, [0-9,]+ bytes of .* now\)", err)
    assert "in each of them" in err and "--overwrite" in err


@pytest.fixture
def merge(tmp_path, capsys):
    """Merge parts, given by their numbers; returns what was said."""

    def merge(*numbers, key="text"):
        parts = [str(tmp_path / f"out-{number:05d}-of-00002_{key}_document.idx") for number in numbers]
        arguments = ["--merge", *parts, "--output-prefix", str(tmp_path / "all"), "--seq-length", "8", "--overwrite"]
        command.main(arguments)
        return capsys.readouterr().err

    return merge


def test_fault_B08_parts_of_other_inputs_are_not_merged(run, folder, merge):
    for index in range(2):
        assert run("--shard-index", index, "--shard-count", 2)[0] == 0
    assert merge(0, 1) == "" and merge(1, 0, key="b") == ""
    change_files(folder, "middle")
    assert run("--shard-index", 1, "--shard-count", 2, "--overwrite")[0] == 0
    with pytest.raises(InputError, match=r"out-00001-of-00002: does not fit .*c.jsonl \(.* before, .* now\)"):
        merge(0, 1)
    assert run("--shard-index", 0, "--shard-count", 2, "--overwrite")[0] == 0
    assert merge(0, 1) == ""


def test_parts_that_are_not_given_are_named_and_parts_given_twice_refused(run, folder, merge):
    for index in range(2):
        assert run("--shard-index", index, "--shard-count", 2)[0] == 0
    assert "warning: " in (said := merge(1)) and "out-00000-of-00002_text_document of these 2 parts not merged" in said
    with pytest.raises(OptionError, match="out-00001-of-00002_text_document: this part is given twice"):
        merge(0, 1, 1)


def test_fault_B08_a_finished_job_says_how_it_differs(run, folder):
    assert run()[0] == 0
    change_files(folder, "middle")
    status, err, _ = run()
    assert status == 2 and re.search(
        r"exists; its inputs have changed: .*c.jsonl \([0-9,]+ bytes of .* before, [0-9,]+ b", err
    )


def test_fault_B08_a_stream_in_place_of_files_is_refused_and_its_tasks_are_not_theirs(
    run, stopped, folder, tmp_path, monkeypatch
):
    stopped(3)
    reading, writing = os.pipe()
    os.write(writing, b'{"text": "a", "b": "c"}\n')
    os.close(writing)
    with os.fdopen(reading) as pipe:
        monkeypatch.setattr(sys, "stdin", pipe)
        status, err, _ = run(inputs=["-"])
    assert status == 2 and "which is there and not given now" in err
    assert len(list((tmp_path / "out.shards").glob("0*"))) == 3
