"""Jobs that are stopped and resumed: what is kept, what is done again, what is refused."""

import json
import os
import re
import threading

import pytest
from helpers.datasets import DATA
from helpers.jobs import NUM_DOCUMENTS, dataset_bytes, names

pytest.importorskip("tokenizers")

from megatron_bfp.commands import preprocess as command
from megatron_bfp.commands import preprocess_options as options
from megatron_bfp.preprocessing import job_folder, write
from megatron_bfp.preprocessing.job_folder import JobFolder
from megatron_bfp.preprocessing.task import TaskWork
from megatron_bfp.tokenizers.fast.tokenizer import FastTokenizer


def stop_at(number, done=None):
    """A ``TaskWork.compute`` that is interrupted at a task. The numbers of begun tasks are added to ``done``."""
    compute = TaskWork.compute

    def interrupted_compute(work, report):
        if done is not None:
            done.append(work.task.number)
        if work.task.number == number:
            raise KeyboardInterrupt
        compute(work, report)

    return interrupted_compute


@pytest.fixture
def stopped(run, corpus, tmp_path, monkeypatch):
    """A job that was stopped after five tasks."""
    with monkeypatch.context() as patched:
        patched.setattr(TaskWork, "compute", stop_at(5))
        status, err = run("--input", corpus)
    assert status == 130 and "keeps 5 finished tasks; the same command goes on from there" in err
    return tmp_path / "out.shards"


def test_what_lies_on_disk_keeps_its_names(stopped, run, corpus, tmp_path):
    """So that this version finishes what another one began, and people's scripts read the same summary."""
    recorded = json.loads((stopped / "run").read_text())
    assert set(recorded) == {
        *("inputs", "json_keys", "tokenizer", "append_eod", "document_begins_with", "document_ends_with", "part"),
        *("folder_format", "plan"),
    }
    assert recorded["folder_format"] == 3
    assert [number for number, _ in recorded["plan"]] == list(range(len(recorded["plan"])))
    record = json.loads((stopped / "000000" / "record").read_text())
    assert set(record) == {
        *("num_documents", "num_empty", "num_tokens", "num_lines", "library", "remark", "amount", "bad"),
    }
    assert set(record["amount"]) == {"documents", "text_bytes", "tokens", "input_bytes"}
    assert {"run", "lock", "000000", "000004"} <= set(names(stopped)) and "000005" not in names(stopped)
    assert run("--input", corpus)[0] == 0
    summary = json.loads((tmp_path / "out.summary.json").read_text())
    assert set(summary) == {
        *("datasets", "each_document", "bad_documents", "text_bytes", "shards", "shards_by_library", "remarks"),
        *("this_call", "run", "version"),
    }
    assert set(summary["this_call"]) == {"shards", "tokenizing_seconds", "seconds"}
    assert set(summary["run"]) == set(recorded) - {"folder_format", "plan"}


@pytest.mark.case(7)
def test_finished_tasks_are_not_done_again(stopped, run, corpus, tmp_path, monkeypatch):
    assert run("--input", corpus, output="whole")[0] == 0
    before = {name: os.stat(stopped / name / "record").st_mtime_ns for name in names(stopped) if name.startswith("0")}
    assert len(before) == 5
    assert run("--input", corpus)[0] == 0
    assert dataset_bytes(tmp_path) == dataset_bytes(tmp_path, "whole")
    assert not stopped.exists()
    summary = json.loads((tmp_path / "out.summary.json").read_text())
    assert summary["shards"] - summary["this_call"]["shards"] == 5


def test_the_same_command_once_more_changes_nothing(run, corpus, tmp_path):
    assert run("--input", corpus)[0] == 0
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert run("--input", corpus)[0] == 0
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    assert run("--input", corpus, seq_length=("--seq-length", 32))[0] == 0  # another index of the same dataset
    assert names(tmp_path / "out_text_document.bfp") == [f"s32-d0-{NUM_DOCUMENTS}", f"s64-d0-{NUM_DOCUMENTS}"]


CHANGES = {
    "eod": r"it differs in append_eod \(true before, false now\)",
    "keys": r"it differs in json_keys \(\[\"text\"\] before, \[\"text\", \"text.a\"\] now\)",
    "tokenizer": r"it differs in tokenizer sha256 \(\"[0-9a-f]+\" before, \"[0-9a-f]+\" now\)",
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_job_is_refused_with_both_values(stopped, run, corpus, tmp_path, tokenizer_file, change, monkeypatch):
    others = {"keys": ["--json-keys", "text", "text.a"]}.get(change, [])
    before = names(stopped)
    if change == "eod":
        monkeypatch.setattr(command, "parse", without_eod)
    elif change == "tokenizer":
        other = tmp_path / "other.json"
        other.write_text(open(tokenizer_file).read() + " ")
        monkeypatch.setattr(command, "parse", with_tokenizer(str(other)))
    status, err = run("--input", corpus, *others)
    assert status == 2
    assert re.search(CHANGES[change], err) and "--overwrite" in err and names(stopped) == before


def with_tokenizer(path):
    def parse(argv):
        parsed = options.parse(argv)
        parsed.tokenizer_model = path
        return parsed

    return parse


@pytest.mark.parametrize("change", ["input", "touched", "more", "overwrite"])
def test_other_inputs_are_named_with_both_values_and_done_again(stopped, run, corpus, tmp_path, change):
    given, others = [corpus], []
    size = corpus.stat().st_size
    if change == "input":
        corpus.write_text(corpus.read_text().replace("document 2999", "document 3,333"))
    elif change == "touched":
        os.utime(corpus)
    elif change == "more":
        given.append(DATA / "nasty" / "00_good.jsonl")
    else:
        corpus.write_text("")
        given = [DATA / "nasty" / "00_good.jsonl"]
        others = ["--overwrite"]
    status, err = run("--input", *given, *others)
    assert status == 0
    kept = 5 if change == "more" else 0
    assert f"{kept} of 5 finished tasks are kept" in err
    if change == "more":
        assert re.search(r"00_good.jsonl \(not an input before, [0-9,]+ bytes of 20.* now\)", err)
    else:
        assert re.search(rf"in.jsonl \({size:,} bytes of 20.* before, (not an input|[0-9,]+ bytes of 20.*) now\)", err)
    assert run("--input", *given, output="whole")[0] == 0
    assert dataset_bytes(tmp_path) == dataset_bytes(tmp_path, "whole")


def without_eod(argv):
    parsed = options.parse(argv)
    parsed.append_eod = False
    return parsed


def test_a_task_whose_ids_differ_is_done_again_by_the_reference(run, corpus, tmp_path, monkeypatch):
    assert run("--input", corpus, output="whole")[0] == 0
    encode = FastTokenizer.encode_batch
    is_wrong = False

    def wrong_in_one_task(tokenizer, texts):
        nonlocal is_wrong
        if len(texts) > 1:  # a batch, and not the sample of it
            is_wrong = any(text.startswith("document 1500 ") for text in texts)
        return [ids + is_wrong for ids in encode(tokenizer, texts)]

    monkeypatch.setattr(FastTokenizer, "encode_batch", wrong_in_one_task)
    status, err = run("--input", corpus)
    assert status == 0
    (line,) = err.splitlines()
    assert re.match(
        r"tokenizing without gigatoken: .*: task \d+ \(.*in.jsonl\): .* differ from its own library's", line
    )
    assert "document 15" not in line  # no text of documents in logs
    assert dataset_bytes(tmp_path) == dataset_bytes(tmp_path, "whole")
    summary = json.loads((tmp_path / "out.summary.json").read_text())
    assert summary["shards_by_library"]["HuggingFaceTokenizer"] == 1 and len(summary["remarks"]) == 1


def test_leaving_out_bad_documents_goes_on_too(run, corpus, tmp_path):
    lines = corpus.read_text().splitlines(True)
    lines[2500] = "bad\n"
    corpus.write_text("".join(lines))
    status, err = run("--input", corpus)
    assert status == 2 and "in.jsonl:2501 (byte " in err and "finished tasks" in err
    assert run("--input", corpus, "--skip-bad-documents")[0] == 0
    summary = json.loads((tmp_path / "out.summary.json").read_text())
    assert summary["shards"] - summary["this_call"]["shards"] > 5 and summary["bad_documents"] == 1
    (bad,) = [json.loads(line) for line in open(tmp_path / "out.bad.jsonl")]
    assert bad["line"] == 2501


def test_bad_documents_of_finished_tasks_are_still_errors(run, corpus, tmp_path, monkeypatch):
    lines = corpus.read_text().splitlines(True)
    lines[1500] = "bad\n"
    corpus.write_text("".join(lines))
    monkeypatch.setattr(write.TaskJoiner, "finish", interrupted)
    assert run("--input", corpus, "--skip-bad-documents")[0] == 130
    status, err = run("--input", corpus)
    assert status == 2 and "in.jsonl:1501 (byte " in err


def test_bad_documents_of_finished_tasks_stop_a_job_before_it_does_others(run, corpus, tmp_path, monkeypatch):
    lines = corpus.read_text().splitlines(True)
    lines[10] = "bad\n"
    corpus.write_text("".join(lines))
    at, done = 5, []
    monkeypatch.setattr(TaskWork, "compute", stop_at(at, done))
    assert run("--input", corpus, "--skip-bad-documents")[0] == 130
    assert done == [*range(at + 1)]
    status, err = run("--input", corpus)
    assert status == 2 and "in.jsonl:11 (byte " in err
    assert done == [*range(at + 1)]


def test_segments_of_a_stream_go_when_their_tasks_are_done(run, corpus, tmp_path, monkeypatch):
    listed = []

    def stop(*_):
        listed.extend(names(tmp_path / "out.shards"))
        raise KeyboardInterrupt

    monkeypatch.setattr(write.TaskJoiner, "finish", stop)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(corpus.read_bytes()))
    writer.start()
    assert run("--input", pipe)[0] == 130
    writer.join()
    assert any(name.isdigit() for name in listed)
    assert not any(name.startswith("segment-") for name in listed)


def interrupted(*_):
    raise KeyboardInterrupt


@pytest.fixture
def stopped_between_names(run, corpus, tmp_path, monkeypatch):
    """A job that was stopped when its .bin had its name, and its .idx had not."""

    def move_one(bin_file, idx_file, prefix):
        os.replace(bin_file, f"{prefix}.bin")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(write, "move_files", move_one)
        assert run("--input", corpus)[0] == 130
    return tmp_path / "out.shards"


def test_a_job_that_stops_between_two_names_goes_on(stopped_between_names, run, corpus, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(TaskWork, "compute", interrupted)  # all are done
        assert run("--input", corpus)[0] == 0
    assert run("--input", corpus, output="whole")[0] == 0
    assert dataset_bytes(tmp_path) == dataset_bytes(tmp_path, "whole") and not stopped_between_names.exists()


def test_a_finished_dataset_that_was_removed_is_written_anew_with_overwrite(
    stopped_between_names, run, corpus, tmp_path
):
    (tmp_path / "out_text_document.bin").unlink()
    status, err = run("--input", corpus)
    assert status == 2 and "out_text_document.bin" in err
    assert run("--input", corpus, "--overwrite")[0] == 0
    assert run("--input", corpus, output="whole")[0] == 0
    assert dataset_bytes(tmp_path) == dataset_bytes(tmp_path, "whole")


def test_a_joined_task_keeps_its_record_alone(run, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(write, "verify_documents", interrupted)
    assert run("--input", corpus)[0] == 130
    tasks = [path for path in (tmp_path / "out.shards").iterdir() if path.name.startswith("0")]
    assert len(tasks) > 5 and all(names(task) == ["record"] for task in tasks)
    num_tokens = sum(json.loads((task / "record").read_text())["num_tokens"][0] for task in tasks)
    assert (tmp_path / "out.shards" / "joined-0.bin").stat().st_size == 2 * num_tokens


def test_tasks_of_another_version_are_refused(stopped, run, corpus, monkeypatch):
    monkeypatch.setattr(job_folder, "FORMAT", 1)
    status, err = run("--input", corpus)
    assert status == 2 and "it is another version's" in err and "--overwrite" in err


@pytest.mark.parametrize("step", ["TaskJoiner.finish", "verify_documents", "move_files", "write_summary"])
def test_a_job_that_stops_at_the_end_goes_on(run, corpus, tmp_path, monkeypatch, step):
    assert run("--input", corpus, output="whole")[0] == 0
    with monkeypatch.context() as patched:
        patched.setattr(f"{write.__name__}.{step}", interrupted)
        assert run("--input", corpus)[0] == 130
    assert not list(tmp_path.glob("out*.part"))
    assert bool(list(tmp_path.glob("out*.bin"))) == (step == "write_summary")
    monkeypatch.setattr(TaskWork, "compute", interrupted)  # all are done
    assert run("--input", corpus)[0] == 0
    assert dataset_bytes(tmp_path) == dataset_bytes(tmp_path, "whole")


def test_two_processes_do_not_write_the_same(run, corpus, tmp_path):
    with JobFolder(str(tmp_path / "out.shards"), {}, False):
        status, err = run("--input", corpus)
    assert status == 2 and "another process is writing these datasets" in err


def test_a_folder_of_something_else_is_left_alone(run, corpus, tmp_path):
    (tmp_path / "out.shards").mkdir()
    (tmp_path / "out.shards" / "thesis.tex").write_text("years of work")
    for overwrite in ((), ("--overwrite",)):
        status, err = run("--input", corpus, *overwrite)
        assert status == 2 and "it holds thesis.tex" in err
    assert (tmp_path / "out.shards" / "thesis.tex").exists()


def test_what_is_written_beside_datasets_is_no_input(run, corpus, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    corpus.rename(folder / "in.jsonl")
    assert run("--input", folder, output="data/out")[0] == 0
    assert run("--input", folder, output="data/out")[0] == 0
    before = dataset_bytes(tmp_path, "data/out")
    assert run("--input", folder, "--overwrite", output="data/out")[0] == 0
    assert dataset_bytes(tmp_path, "data/out") == before


@pytest.mark.parametrize("before, now", [("line", None), (None, "line"), ("line", "file")])
def test_another_kind_of_text_documents_is_another_job(run, corpus, before, now):
    given = {unit: ["--text-documents", unit] if unit else [] for unit in (before, now)}
    assert run("--input", corpus, *given[before])[0] == 0
    status, err = run("--input", corpus, *given[now])
    values = [f'"{unit}"' if unit else "null" for unit in (before, now)]
    assert status == 2 and f"it differs in text_documents ({values[0]} before, {values[1]} now)" in err
    assert run("--input", corpus, *given[before])[0] == 0
