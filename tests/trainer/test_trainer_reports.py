"""What a run reports: lines and events of steps and evaluations, the time left, and the loss that stops it."""

import json
import re

import pytest

pytest.importorskip("deepspeed")

from helpers.datasets import documents_of, write
from helpers.launching import steps
from helpers.trainer_in_process import alone, command_line, run_trainer
from trainer import reports
from trainer.arguments import parse_arguments
from trainer.engine import initialize_distributed
from trainer.log import RankSeconds, TrainingStopped, Work
from trainer.process import complete_environment


def test_a_step_without_targets_stops_the_run(tmp_path):
    prefix = write(tmp_path / "data", [[7]] * 300).prefix
    with pytest.raises(TrainingStopped, match="iteration 1: the loss is nan"):
        run_trainer(prefix)


@pytest.mark.parametrize("document, options", [([7], []), ([0, 5], ["--eod-mask-loss"])])
def test_fault_A18_a_split_without_targets_has_no_perplexity(tmp_path, document, options):
    documents = [*documents_of([40] * 4), *[document] * 200]
    prefix = write(tmp_path / "data", documents).prefix
    log = tmp_path / "log.jsonl"
    split = ("--split", "4,200,0", "--train-iters", 1, "--eval-interval", 1, "--json-log", log)
    status, output = run_trainer(prefix, *split, *options)
    assert status == 0
    line = r"^validation at iteration 1 \| loss nan \| perplexity nan \| target tokens 0 "
    assert re.search(line, output, re.MULTILINE)
    assert "have no target tokens" in output
    event = json.loads(log.read_text().splitlines()[-1])
    assert event["event"] == "valid" and event["loss"] is event["perplexity"] is None


def test_fault_C11_lines_have_the_time_the_seconds_of_a_step_and_those_that_are_left(prefix, tmp_path):
    log = tmp_path / "log.jsonl"
    _, output = run_trainer(prefix, "--save", tmp_path / "saved", "--log-interval", 2, "--json-log", log)
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d$"
    lines = re.findall(rf"^iteration .* \| (\S+) s/step \| ETA (\S+) \| {stamp}", output, re.MULTILINE)
    assert len(lines) == len(steps(output)) == 2
    assert lines[-1][1] == "0:00:00"
    assert re.search(rf"^saved \S+ in \S+ s \| {stamp}", output, re.MULTILINE)
    first, last = (json.loads(line) for line in log.read_text().splitlines())
    assert first["seconds_left"] == pytest.approx(2 * first["seconds_per_step"]) and last["seconds_left"] == 0
    assert re.match(stamp, first["time"])


def test_fault_C11_the_time_that_is_left_is_that_of_recent_steps(monkeypatch):
    clock = iter([0.0, 10.0, 10.0, 30.0, 30.0])
    monkeypatch.setattr(reports.time, "perf_counter", lambda: next(clock))
    config = parse_arguments(command_line("data", "--train-iters", 100))
    with alone():
        complete_environment()
        initialize_distributed(config)
        meter = reports.Meter(config, 1)
        for num_steps, iteration, seconds_per_step, seconds_left in ((2, 2, 5.0, 98 * 5.0), (10, 12, 2.0, 88 * 2.5)):
            for _ in range(num_steps):
                meter.add(Work(100, 1), RankSeconds(3.0, 2.0))
            speed = meter.read(iteration)
            assert (speed["seconds_per_step"], speed["seconds_left"]) == (seconds_per_step, seconds_left)
            assert speed["slowest_over_mean"] == 1.5
    assert reports.duration(93_784.4) == "1 day, 2:03:04"
