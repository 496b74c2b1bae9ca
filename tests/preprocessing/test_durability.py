"""What a job writes is on disk before it gets its name and before what it replaces is removed."""

import json
import os
import sys

import pytest
from helpers.disk_order import watched_disk

pytest.importorskip("tokenizers")

from helpers.tokenizer_fixtures import EOD

from megatron_bfp.commands import preprocess as command
from megatron_bfp.preprocessing import plan
from megatron_bfp.preprocessing.job_folder import JobFolder


@pytest.fixture
def run(tmp_path, tokenizer_file, monkeypatch):
    """Run the command in this process on a file of three tasks with a bad line and two keys."""
    for name in ("SMALL_TASK", "SMALLEST_TASK"):
        monkeypatch.setattr(plan, name, 3_000)
    lines = [json.dumps({"text": f"document {number} " * 5, "b": "b"}) for number in range(80)]
    (tmp_path / "in.jsonl").write_text("\n".join([*lines[:50], "bad", *lines[50:]]))

    def run(*options):
        arguments = ["--input", str(tmp_path / "in.jsonl"), "--json-keys", "text", "b", "--seq-length", "64"]
        arguments += ["--output-prefix", str(tmp_path / "out"), "--tokenizer-model", tokenizer_file, *options]
        arguments += ["--eod-token", EOD, "--append-eod", "--skip-bad-documents"]
        monkeypatch.setattr(sys, "argv", ["megatron-bfp-preprocess", *arguments])
        with watched_disk() as disk:
            status = command.console()
        return status, disk

    return run


def test_everything_is_forced_to_disk_before_it_gets_its_name(run, tmp_path):
    status, disk = run()
    assert status == 0 and disk.unforced == [] and disk.names_not_forced() == []
    written = [tmp_path / name for name in ("out.bad.jsonl", "out.summary.json")]
    written += [tmp_path / f"out_{key}_document.{kind}" for key in ("text", "b") for kind in ("bin", "idx")]
    assert all(disk.is_forced(path) for path in written)  # also what was not flushed when it was forced
    named = {os.path.relpath(path, tmp_path) for kind, path in disk.events if kind == "name"}
    tasks = {f"out.shards/{number:06d}" for number in range(3)}
    datasets = {f"out_{key}_document.{kind}" for key in ("text", "b") for kind in ("bin", "idx")}
    assert named >= tasks | datasets | {"out.summary.json", "out.bad.jsonl", "out.shards/run", "out.shards/verified"}


def test_the_job_s_folder_goes_when_all_names_are_on_disk(run, tmp_path):
    """Its tasks are all there is of the datasets until then."""
    _, disk = run()
    removed = disk.index("remove", "out.shards/run")
    forced = max(index for index in range(removed) if disk.events[index] == ("force", str(tmp_path)))
    for name in ("out.summary.json", "out.bad.jsonl", "out_text_document.idx", "out_b_document.idx"):
        assert disk.events.index(("name", str(tmp_path / name))) < forced
    verified = disk.events.index(("name", str(tmp_path / "out.shards" / "verified")))
    first = disk.events.index(("name", str(tmp_path / "out_text_document.bin")))
    assert ("force", str(tmp_path / "out.shards")) in disk.events[verified:first]


def test_a_finished_task_is_on_disk_with_its_record(run, tmp_path):
    _, disk = run()
    for number in range(3):
        named = disk.events.index(("name", str(tmp_path / "out.shards" / f"{number:06d}")))
        ending = f"-{os.getpid()}.part"
        forced = [path for kind, path in disk.events[:named] if kind == "force" and f"{number:06d}." in path]
        assert any(path.endswith(ending) for path in forced)
        assert sum("/record." in path for path in forced) == 1


def test_what_is_cut_off_growing_datasets_is_on_disk_before_the_plan_needs_it_no_more(tmp_path):
    (tmp_path / "out.shards").mkdir()
    for name in ("joined-0.bin", "joined-0.lengths"):
        (tmp_path / "out.shards" / name).write_bytes(bytes(8))
    with JobFolder(str(tmp_path / "out.shards"), {"inputs": []}, overwrite=False) as folder:
        for name in ("joined-0.bin", "joined-0.lengths"):
            (tmp_path / "out.shards" / name).write_bytes(bytes(8))
        with watched_disk() as disk:
            folder.set_plan([], {"joined-0.bin": 4, "joined-0.lengths": 9})
        assert [(tmp_path / "out.shards" / name).stat().st_size for name in ("joined-0.bin", "joined-0.lengths")] == [
            4,
            8,
        ]
        events = [(kind, os.path.basename(path)) for kind, path in disk.events]
        last_plan = max(index for index, event in enumerate(events) if event == ("name", "run"))
        assert {("force", "joined-0.bin"), ("force", "joined-0.lengths")} <= set(events[:last_plan])
