"""Trackers behind the log: one history over all resumes, and none of them ends or holds up a run."""

import errno
import os
import re
import sys
import threading
import time

import pytest

pytest.importorskip("deepspeed")

from helpers.launching import steps
from helpers.small_disks import small_disk
from helpers.trainer_in_process import run_trainer
from trainer import log as log_module
from trainer.log import Log
from trainer.tracking import journal as journal_module
from trainer.tracking import tracker as tracker_module
from trainer.tracking.journal import FILE, Journal, row_of
from trainer.tracking.run_ids import RunIds

from megatron_bfp import OptionError


@pytest.fixture
def lines(monkeypatch):
    """What is printed, without ranks."""
    printed = []
    for module in (log_module, journal_module, tracker_module):
        monkeypatch.setattr(module, "log", printed.append)
    monkeypatch.setattr(tracker_module, "RETRY_SECONDS", 0.01)
    return printed


class Recorder:
    """A tracker in memory that survives processes. ``failures`` are raised by its next calls."""

    name = "Recorder"

    def __init__(self, history=(), failures=()):
        self.history, self.failures = list(history), list(failures)

    def open(self, iteration):
        self.last = max(self.history, default=0)
        return f"after {self.last}"

    def send(self, rows):
        for row in rows:
            if self.failures and (failure := self.failures.pop(0)):
                raise failure
            if row.iteration > self.last:
                self.history.append(row.iteration)

    def close(self, failed):
        self.closed = failed


def run(folder, tracker, first, last, wait=True):
    """Steps of a process that resumed before ``first``."""
    log = Log(remote=[tracker])
    with log.of_run(folder and str(folder), first - 1):
        for step in range(first, last + 1):
            log.write("train", step, {"loss": 1.0 / step, "time": "now"})
        end = time.monotonic() + 5
        while wait and (tracker.history or [0])[-1] < last and time.monotonic() < end:
            time.sleep(0.001)


def test_steps_that_are_repeated_are_tracked_once(tmp_path, lines):
    tracker = Recorder()
    run(tmp_path, tracker, 1, 5)
    run(tmp_path, tracker, 4, 8)
    assert tracker.history == [1, 2, 3, 4, 5, 6, 7, 8] and not tracker.closed
    assert lines == ["Recorder: after 0", "Recorder: after 5"]


def test_steps_that_a_tracker_lacks_come_from_the_journal(tmp_path, lines):
    run(tmp_path, Recorder(), 1, 5)
    behind = Recorder([1, 2])
    run(tmp_path, behind, 5, 6)
    assert behind.history == [1, 2, 3, 4, 5, 6]
    (tmp_path / FILE).unlink()
    without = Recorder([1, 2])
    run(tmp_path, without, 5, 6)
    assert without.history == [1, 2, 5, 6]  # the control: the journal it was


def test_the_journal_has_whole_rows_of_steps_until_the_checkpoint(tmp_path):
    journal = Journal(str(tmp_path), 0)
    for step in range(1, 1001):
        journal.append(row_of("train", step, {"loss": float("nan"), "text": "left out"}))
    with open(tmp_path / FILE, "a") as file:
        file.write('{"iteration": 7, "ev')
    journal, rows, position = Journal(str(tmp_path), 900), [], 0
    while (more := journal.read(position))[0]:
        rows += more[0]
        position = more[1]
    assert [row.iteration for row in rows] == list(range(1, 901)) and list(rows[0].values) == ["loss"]
    assert position == os.path.getsize(tmp_path / FILE)


def test_what_does_not_fit_on_the_disk_is_written_when_there_is_room(tmp_path, lines):
    with small_disk(tmp_path / "disk", "64k") as disk:
        journal = Journal(str(disk), 0)
        (disk / "filling").write_bytes(bytes(48 << 10))
        for step in range(1, 501):
            journal.append(row_of("train", step, {"loss": 1.0}))
        assert lines == [f"{FILE}: No space left on device; the run goes on, and trackers wait until it can be written"]
        assert len(journal.read(0)[0]) < 400
        (disk / "filling").unlink()
        journal.append(row_of("train", 501, {"loss": 1.0}))
        assert [row.iteration for row in journal.read(0)[0]] == list(range(1, 502))
        journal._file.close()


def test_a_tracker_that_fails_is_opened_again_and_gets_what_it_lacks(tmp_path, lines):
    lost = ConnectionError("no route to host\nand more")
    tracker = Recorder(failures=[None, None, lost, lost])
    run(tmp_path, tracker, 1, 6)
    assert tracker.history == [1, 2, 3, 4, 5, 6]
    assert lines[1:] == [
        "Recorder: no route to host; the run goes on, and its steps are sent when it works again",
        "Recorder: works again, after 2",
    ]


def test_a_tracker_is_opened_when_workers_have_been_forked(tmp_path, lines):
    """Processes that a library starts and workers that are forked at the same time would wait for each other."""
    tracker = Recorder([1, 2])
    log = Log(remote=[tracker])
    with log.of_run(str(tmp_path), 2):
        time.sleep(0.05)
        assert lines == []
        log.write("train", 3, {"loss": 1.0})
    assert lines == ["Recorder: after 2"] and tracker.history == [1, 2, 3]
    run(tmp_path, tracker, 4, 3)  # a finished run that is started again sends what is left
    assert lines[1:] == ["Recorder: after 3"] and not tracker.closed


@pytest.mark.parametrize("folder", [True, False])
def test_a_tracker_that_hangs_does_not_hold_up_the_run(tmp_path, lines, monkeypatch, folder):
    monkeypatch.setattr(log_module, "CLOSE_SECONDS", 0.1)
    tracker, release = Recorder(), threading.Event()
    tracker.send = lambda rows: release.wait(20)
    start = time.monotonic()
    run(tmp_path if folder else None, tracker, 1, 3, wait=False)
    assert time.monotonic() - start < 5
    later = "; the same command sends them" if folder else ""
    assert lines[-1] == f"Recorder: the last steps may be missing there{later}"
    release.set()


def test_a_run_that_fails_is_closed_as_failed(tmp_path, lines):
    tracker = Recorder()
    log = Log(remote=[tracker])
    with pytest.raises(RuntimeError), log.of_run(str(tmp_path), 0):
        log.write("train", 1, {"loss": 1.0})
        raise RuntimeError
    assert tracker.closed and tracker.history == [1]


def test_a_json_log_on_a_full_disk_does_not_end_the_run(tmp_path, lines):
    with small_disk(tmp_path / "disk", "64k") as disk:
        log = Log(str(disk / "log.jsonl"))
        (disk / "filling").write_bytes(bytes(56 << 10))
        for step in range(1, 301):
            log.write("train", step, {"loss": 1.0})
        assert lines == [f"--json-log {disk}/log.jsonl: No space left on device; the run goes on"]
        (disk / "filling").unlink()
        log.write("train", 301, {"loss": 1.0})
        log._file.close()
        numbers = re.findall(r'"iteration": (\d+), "loss": 1.0}\n', (disk / "log.jsonl").read_text())
        assert len(numbers) > 200 and numbers[-1] == "301"


def test_tensorboard_shows_repeated_steps_once_and_a_full_disk_does_not_end_the_run(prefix, tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def tracked(name="train/loss"):
        events = accumulator.EventAccumulator(str(tmp_path / "events"), {accumulator.SCALARS: 0}).Reload()
        return [event.step for event in events.Scalars(name)]

    options = ("--tensorboard-dir", tmp_path / "events", "--save", tmp_path / "saved", "--load", tmp_path / "saved")
    run_trainer(prefix, *options, "--save-interval", 2, "--exit-interval", 3)
    (tmp_path / "saved" / "iter_0000003" / "complete.json").unlink()
    _, output = run_trainer(prefix, *options)
    assert list(steps(output)) == [3, 4] and tracked() == [1, 2, 3, 4] == tracked("train/data_seconds_per_step")
    with small_disk(tmp_path / "disk", "16k") as disk:
        (disk / "filling").write_bytes(bytes(16 << 10))
        status, output = run_trainer(prefix, "--tensorboard-dir", disk)
    assert status == 0 and list(steps(output)) == [1, 2, 3, 4]
    lines = re.findall("^TensorBoard: .*$", output, re.MULTILINE)
    assert lines == [f"TensorBoard: {os.strerror(errno.ENOSPC)}; the run goes on, and steps are missing there"]


def test_a_run_of_other_names_is_another_run(tmp_path):
    ids = RunIds(str(tmp_path))
    ids.put("one", "a", "1")
    ids.put("other", "a", "2")
    again = RunIds(str(tmp_path))
    assert (again.get("one", "a"), again.get("other", "a"), again.get("one", "b")) == ("1", "2", None)
    alone = RunIds(None)
    alone.put("one", "a", "1")
    assert alone.get("one", "a") == "1" and RunIds(None).get("one", "a") is None


@pytest.mark.parametrize("option, module", [("--wandb-project", "wandb"), ("--mlflow-experiment", "mlflow")])
def test_a_library_that_is_missing_is_named_at_the_start(prefix, monkeypatch, option, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(OptionError, match=rf"^{option} needs {module}: pip install 'megatron-bfp\[{module}\]'$"):
        run_trainer(prefix, option, "name")
