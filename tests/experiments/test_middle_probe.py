"""The probe of fill-in-the-middle: its documents and gaps, its report, and the whole of it, small."""

import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("deepspeed")

from experiments import middle_probe
from experiments.middle_probe import MODULUS, STEPS
from helpers.datasets import ROOT


def test_held_out_documents_are_none_of_those_that_are_trained_on():
    trained, held_out = (middle_probe.make_documents(4000, seed=1, held_out=held_out) for held_out in (False, True))
    for documents in (trained, held_out):
        for *numbers, step in documents[:500]:
            assert len(numbers) == len(set(numbers))
            steps = {(after - before) % MODULUS for before, after in zip(numbers, numbers[1:])}
            assert steps == {STEPS[step - MODULUS]}
    beginnings = [{(document[0], document[-1]) for document in documents} for documents in (trained, held_out)]
    assert not beginnings[0] & beginnings[1] and len(beginnings[0] | beginnings[1]) == MODULUS * len(STEPS)


def test_a_middle_has_something_on_both_sides():
    gaps = middle_probe.make_gaps(300, seed=2)
    for document, begin, end in zip(*gaps):
        assert 1 <= begin < end <= len(document) - 2  # a number and the step follow
    assert min(gaps.begins) == 1 and len(set(gaps.begins)) > 5


def test_the_report_says_what_it_found():
    def runs(both, prefix):
        return [{"both": np.full(40, both + seed), "prefix": np.full(40, prefix + seed)} for seed in (0.0, 1.0, 2.0)]

    text = middle_probe.report({"without": runs(1.0, 30.0), "fim": runs(90.0, 31.0)})
    cells = [cell.strip() for cell in text.splitlines()[2].split("|")]
    assert cells[2:4] == ["2.0 [-0.5, 4.5]", "31.0 [28.5, 33.5]"]
    assert "89.0 [89.0, 89.0] over seeds, 89.0 [89.0, 89.0] over documents" in text
    assert "the share of middles filled right is higher than with no fill-in-the-middle" in text
    same = middle_probe.report({"without": runs(1.0, 30.0), "fim": runs(1.0, 30.0)})
    assert "no difference in the share of middles filled right" in same


@pytest.mark.slow
def test_the_probe_runs_as_a_whole(tmp_path):
    command = [sys.executable, str(ROOT / "examples" / "middle_probe.py"), "--output", str(tmp_path)]
    done = subprocess.run([*command, "--steps", "20", "--seeds", "2", "--jobs", "2"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "middle_probe.md").read_text() in done.stdout
    rows = [line for line in done.stdout.splitlines() if line.startswith("|") and "fill-in-the-middle" in line]
    assert len(rows) == 2 and "512 held-out documents" in done.stdout
