"""Weights & Biases offline and MLflow in a folder: what their own libraries read back after kills and resumes.

Runs of the real trainer are killed in a step and in a save, with two ranks and two loader workers.
"""

import json
import re
import shutil
import subprocess
import sys
import time

import mlflow
import psutil
import pytest
import wandb

pytest.importorskip("deepspeed")
pytest.importorskip("tokenizers")

from helpers import launching
from helpers.datasets import documents_of, write
from helpers.launching import in_folder, launch, make_corpus, steps
from helpers.small_disks import small_disk
from helpers.trainer_in_process import run_trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trainer import log as log_module
from trainer.log import Log
from trainer.tracking import tracker as tracker_module
from trainer.tracking.mlflow_runs import MLflow
from trainer.tracking.run_ids import RunIds
from trainer.tracking.weights_and_biases import WeightsAndBiases

TRACKERS = ("--wandb-project", "tests", "--wandb-exp-name", "killed", "--mlflow-experiment", "tests")


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    for name in ("WANDB_API_KEY", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    yield
    wandb.teardown()  # it remembers its settings as long as the process lives


def wandb_records(save):
    """The records of a run's files, one list for each process that wrote one, as ``wandb leet inspect`` reads them."""
    processes = []
    for path in sorted((save / "wandb" / "wandb").glob("offline-run-*/*.wandb")):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
        processes.append([json.loads(line) for line in done.stdout.splitlines()])
    return processes


def wandb_history(save):
    """(step, its numbers) in the order of the files."""
    records = [record for process in wandb_records(save) for record in process]
    return [(record["history"]["step"]["num"], record["history"]["item"]) for record in records if "history" in record]


def mlflow_runs(uri):
    """The client, and all runs."""
    client = mlflow.MlflowClient(str(uri))
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    return client, list(client.search_runs(experiments))


def mlflow_history(uri):
    """Metric -> (step, value) of each entry, of the only run."""
    client, [run] = mlflow_runs(uri)
    histories = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    return {name: [(metric.step, metric.value) for metric in history] for name, history in histories.items()}


class Killed:
    """A run of 12 steps that was killed in step 8 and while it saved step 9, with a checkpoint at each third step."""

    def __init__(self, folder):
        corpus, self.save = make_corpus(folder), folder / "saved"
        options = (*in_folder(self.save), *TRACKERS, "--tensorboard-dir", folder / "events", "--num-workers", 2)
        options += ("--save-interval", 3, "--eval-interval", 3, "--eval-iters", 1, "--zero-stage", 1)
        self.outputs, self.seen = [], []
        for fault in ("0 SIGKILL 15", "0 SIGKILL iter_0000009/mp_rank_00_model_states.pt", None):
            status, output = launch(corpus, *options, train_iters=12, fault=fault, launcher="ranks")
            assert (status != 0) == bool(fault), output[-5000:]
            self.outputs.append(output)
            self.seen.append(([step for step, _ in wandb_history(self.save)], mlflow_history(self.save / "mlruns")))
        self.losses = {step: float(loss) for output in self.outputs for step, (loss, *_) in steps(output).items()}
        self.events = EventAccumulator(str(folder / "events")).Reload()


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    with pytest.MonkeyPatch.context() as environment:
        environment.setitem(launching.ENVIRONMENT, "WANDB_MODE", "offline")
        environment.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        yield Killed(tmp_path_factory.mktemp("killed"))


def test_steps_were_repeated_and_some_were_lost(killed):
    """The control: without care there would be doubles and gaps."""
    assert [list(steps(output)) for output in killed.outputs] == [[*range(1, 8)], [*range(7, 10)], [*range(7, 13)]]
    (wandb_first, mlflow_first), (_, mlflow_second), _ = killed.seen
    assert wandb_first != [*range(1, 7)]  # its files lack the last seconds before a kill, or have step 7
    assert mlflow_first["train/loss"][-1][0] >= 6 and mlflow_second["train/loss"][-1][0] >= 8


def test_wandb_has_one_history(killed):
    history = wandb_history(killed.save)
    assert [step for step, _ in history] == [*range(1, 13)]
    assert [item["train/loss"] for _, item in history] == pytest.approx([killed.losses[step] for step in range(1, 13)])
    assert [step for step, item in history if "valid/loss" in item] == [3, 6, 9, 12]
    for name in ("seconds_per_step", "data_seconds_per_step", "seconds_left", "slowest_over_mean", "learning_rate"):
        assert all(item[f"train/{name}"] >= 0 for _, item in history), name
    runs = [record["run"] for process in wandb_records(killed.save) for record in process if "run" in record]
    assert len({run["run_id"] for run in runs}) == 1
    assert {(run["project"], run["display_name"]) for run in runs} == {("tests", "killed")}
    assert runs[-1]["config"]["update"]["seq_length"] == 128


def test_mlflow_has_one_history(killed):
    history = mlflow_history(killed.save / "mlruns")
    assert [step for step, _ in history["train/loss"]] == [*range(1, 13)]
    assert [loss for _, loss in history["train/loss"]] == pytest.approx([killed.losses[step] for step in range(1, 13)])
    for name, entries in history.items():
        assert [step for step, _ in entries] == ([3, 6, 9, 12] if name.startswith("valid/") else [*range(1, 13)]), name
    _, [run] = mlflow_runs(killed.save / "mlruns")
    assert (run.info.run_name, run.info.status) == ("saved", "FINISHED")
    assert run.data.params["seq_length"] == "128" and len(run.data.params) > 60


def test_tensorboard_has_one_history(killed):
    assert [event.step for event in killed.events.Scalars("train/loss")] == [*range(1, 13)]
    assert [event.step for event in killed.events.Scalars("valid/loss")] == [3, 6, 9, 12]


def test_the_log_says_where_a_history_goes_on(killed):
    for name in ("Weights & Biases", "MLflow"):
        assert len(re.findall(rf"^{name}: run .*$", killed.outputs[-1], re.MULTILINE)) == 1
    assert "resumed" not in re.findall("^MLflow: run .*$", killed.outputs[0], re.MULTILINE)[0]
    assert ", resumed after step 9, " in re.findall("^MLflow: run .*$", killed.outputs[-1], re.MULTILINE)[0]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write(tmp_path_factory.mktemp("data") / "data", documents_of([5, 40, 1, 17, 31, 32, 9, 70, 3, 12])).prefix


def test_going_back_makes_no_doubles_and_another_name_is_another_run(prefix, tmp_path):
    save = tmp_path / "saved"
    options = (*in_folder(save), "--save-interval", 2, *TRACKERS)
    run_trainer(prefix, *options)
    (save / "iter_0000004" / "complete.json").unlink()
    _, output = run_trainer(prefix, *options, "--train-iters", 5, "--wandb-entity", "us")
    assert list(steps(output)) == [3, 4, 5]
    assert [step for step, _ in mlflow_history(save / "mlruns")["train/loss"]] == [1, 2, 3, 4, 5]
    assert [step for step, _ in wandb_history(save)] == [1, 2, 3, 4] + [1, 2, 3, 4, 5]  # a whole run of its own
    _, output = run_trainer(prefix, *options, "--train-iters", 6)
    assert "resumed after step 4" in output and "resumed after step 5" in output
    assert [step for step, _ in wandb_history(save)][-2:] == [5, 6]


def test_no_tracker_ends_a_run(prefix, tmp_path, monkeypatch):
    """Nobody listens, there is no key, and a disk is full; when that is over, the same command sends all steps."""
    monkeypatch.setattr(log_module, "CLOSE_SECONDS", 5.0)
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(tmp_path))
    options = (*in_folder(tmp_path / "saved"), *TRACKERS, "--wandb-save-dir", tmp_path / "wandb")
    status, output = run_trainer(prefix, *options, "--mlflow-tracking-uri", "http://127.0.0.1:9")
    assert status == 0 and list(steps(output)) == [1, 2, 3, 4]
    lines = re.findall(r"^(?:MLflow|Weights & Biases): .*$", output, re.MULTILINE)
    assert len(lines) == 4 and sum("; the run goes on, " in line for line in lines) == 2
    assert "Weights & Biases: no API key; run `wandb login`, or set WANDB_MODE=offline; the run goes on, " in output
    assert output.count(": the last steps may be missing there; the same command sends them") == 2
    with small_disk(tmp_path / "disk", "64k") as disk:
        status, output = run_trainer(prefix, *options, "--mlflow-tracking-uri", disk, "--train-iters", 5)
        assert status == 0 and list(steps(output)) == [5]
        assert re.search("^MLflow: .*No space left on device.*; the run goes on, ", output, re.MULTILINE), output
    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb.teardown()  # the mode too is remembered as long as the process lives
    run_trainer(prefix, *in_folder(tmp_path / "saved"), *TRACKERS, "--train-iters", 5)
    assert [step for step, _ in wandb_history(tmp_path / "saved")] == [1, 2, 3, 4, 5]
    assert [step for step, _ in mlflow_history(tmp_path / "saved" / "mlruns")["train/loss"]] == [1, 2, 3, 4, 5]


def test_a_number_that_was_half_written_is_written_again(prefix, tmp_path):
    """As a full disk leaves it; MLflow itself cannot read such a file."""
    save = tmp_path / "saved"
    options = (*in_folder(save), "--save-interval", 2, "--mlflow-experiment", "tests")
    run_trainer(prefix, *options)
    [path] = (save / "mlruns").glob("*/*/metrics/train/loss")
    path.write_text(path.read_text() + "1795")
    path.with_name("grad_norm").write_text("")
    with pytest.raises((ValueError, mlflow.exceptions.MlflowException), match="is malformed"):
        mlflow_history(save / "mlruns")
    run_trainer(prefix, *options, "--train-iters", 5)
    for name, entries in mlflow_history(save / "mlruns").items():
        assert [step for step, _ in entries] == [1, 2, 3, 4, 5], name


@pytest.fixture
def lines(monkeypatch):
    """What is printed, without ranks; what fails is tried again at once."""
    printed = []
    for module in (log_module, tracker_module):
        monkeypatch.setattr(module, "log", printed.append)
    monkeypatch.setattr(tracker_module, "RETRY_SECONDS", 0.1)
    return printed


def wait_until(is_true):
    end = time.monotonic() + 20
    while not is_true() and time.monotonic() < end:
        time.sleep(0.02)


def test_mlflow_on_a_full_disk_gets_all_steps_when_there_is_room(tmp_path, lines):
    with small_disk(tmp_path / "disk", "2m") as disk:
        (tmp_path / "saved").mkdir()
        log = Log(remote=[MLflow(str(disk), "tests", "full", {"lr": 1.0}, RunIds(str(tmp_path / "saved")))])
        with log.of_run(str(tmp_path / "saved"), 0):
            log.write("train", 1, {f"number {i}": 0.5 for i in range(20)})
            wait_until(lambda: lines)
            (disk / "filling").write_bytes(bytes(shutil.disk_usage(disk).free - 5 * 4096))
            for step in range(2, 251):
                log.write("train", step, {f"number {i}": 0.5 for i in range(20)})
            wait_until(lambda: len(lines) == 2)
            (disk / "filling").unlink()
            wait_until(lambda: len(lines) == 3)
        assert "No space left on device" in lines[1] and "MLflow: works again, run full (" in lines[2], lines
        history = mlflow_history(disk)
        assert len(history) == 20 and len(lines) == 3
        for name, entries in history.items():
            assert [step for step, _ in entries] == [*range(1, 251)], name


def test_a_service_of_wandb_that_is_killed_is_started_again(tmp_path, lines):
    """As when a launcher signals all processes of a job."""
    tracker = WeightsAndBiases(("tests", None, "killed"), str(tmp_path / "wandb"), {}, RunIds(str(tmp_path)))
    log = Log(remote=[tracker])
    with log.of_run(str(tmp_path), 0):
        for step in range(1, 7):
            log.write("train", step, {"loss": 1.0 / step})
            if step == 3:
                wait_until(lambda: lines)
                [service] = [child for child in psutil.Process().children() if child.name() == "wandb-core"]
                service.kill()
    assert [step for step, _ in wandb_history(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert "; the run goes on, " in lines[1] and ": works again, run killed (" in lines[2] and len(lines) == 3
