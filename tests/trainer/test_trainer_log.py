"""What a run stops at, how its work is counted, and where its numbers are written."""

import json
import math
import time

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from trainer.evaluation import Evaluation
from trainer.log import ComputeClock, Log, RankSeconds, SpikeDetector, Work, model_flops
from trainer.tracking.tensorboard import TensorBoard


def test_a_run_stops_at_spikes_and_at_what_is_no_number():
    detector = SpikeDetector(3.0)
    assert all(detector.reason(loss, 1.0) is None for loss in [9.0, 30.0, *[5.0] * 10])
    assert "30.0" in detector.reason(30.0, 1.0)
    assert "nan" in detector.reason(math.nan, 1.0)
    assert "gradient norm is inf" in detector.reason(5.0, math.inf)
    assert detector.reason(6.0, 1.0) is None
    assert SpikeDetector(0.0).reason(1e9, 1.0) is None


def test_flops_count_real_attention():
    # one sequence of 8 tokens in chunks of 5 and 3, a model of 100 weights, 2 layers, hidden size 4
    assert model_flops(Work(8, 25 + 9), 100, 2, 4) == 6 * 8 * 100 + 6 * 34 * 2 * 4
    assert model_flops(Work(8, 64), 0, 1, 4) == 3 * (2 * 2 * 8 * 8 / 2 * 4)


def compute(seconds):
    """Take so much processor time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_on_the_cpu_the_clock_counts_computing_and_not_waiting():
    clock = ComputeClock(torch.device("cpu"))
    with clock.forward():
        compute(0.03)
        time.sleep(0.1)
    compute(0.03)  # beside the passes
    with clock.backward():
        compute(0.02)
    assert clock.seconds() == pytest.approx(0.05, abs=0.01)


def test_on_a_gpu_the_clock_reads_the_events_of_forward_passes_and_waits_for_the_last_only(monkeypatch):
    calls = []

    class Event:
        """Recorded at 0, 10, 20 ... ms."""

        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = 10 * sum(call == "record" for call in calls)
            calls.append("record")

        def synchronize(self):
            calls.append(self.at)

        def elapsed_time(self, end):
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: pytest.fail("waits for everything"))
    clock = ComputeClock(torch.device("cuda"))
    for _ in range(3):
        with clock.forward():
            pass
        with clock.backward():
            compute(0.001)
    assert clock.seconds() == 0.03 and calls == ["record"] * 6 + [50]


def test_the_slowest_rank_is_compared_with_the_mean():
    assert RankSeconds.of([1.0, 2.0, 6.0]) == (6.0, 3.0)


def test_events_go_to_tensorboard(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log = Log(local=[TensorBoard(str(tmp_path))])
    with log.of_run(None, 0):
        for iteration in (1, 2):
            log.write("train", iteration, {"loss": 1.5 * iteration})
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 1.5), (2, 3.0)]


def test_events_are_json_lines(tmp_path):
    for _ in range(2):
        log = Log(str(tmp_path / "log.jsonl"))
        log.write("train", 3, {"loss": 1.5})
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert lines == [{"event": "train", "iteration": 3, "loss": 1.5}] * 2
    assert Evaluation(1000.0, 1).perplexity == math.inf
