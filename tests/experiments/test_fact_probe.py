"""examples/fact_probe.py: what its documents state, what concatenation parts, its report; the whole at a small size."""

import subprocess
import sys

import numpy as np
import pytest
from experiments import fact_probe
from experiments.data_methods import COMPARISONS, METHODS
from helpers.datasets import ROOT
from helpers.launching import ENVIRONMENT

from megatron_bfp import pack


def test_each_document_states_the_value_of_its_subject_once():
    facts = fact_probe.make_facts(3, seed=1)
    tokens, lengths, stated = fact_probe.make_documents(facts, seed=2)
    counts = np.zeros(len(facts.values), dtype=int)
    for document, value in zip(np.split(tokens, np.cumsum(lengths)[:-1]), stated):
        subject, length = document[0], len(document)
        counts[subject] += 1
        assert document[value - 1] == facts.fact_token and length // 2 <= value < length - 1
        assert document[value] == facts.fact_token + 1 + facts.values[subject]
        others = np.delete(document, [0, value - 1, value, length - 1])
        assert (others >= facts.first_word).all() and (others < facts.first_word + fact_probe.WORDS).all()
        assert document[-1] == len(facts.vocabulary)
        assert (length >= fact_probe.LONG[0]) == facts.is_long[subject]
    assert (counts == facts.occurrences).all()
    assert facts.is_long.mean() == 0.5 and set(facts.occurrences) == set(fact_probe.OCCURRENCES)


def test_packing_parts_no_fact_and_fills_its_sequences():
    facts = fact_probe.make_facts(8, seed=1)
    _, lengths, stated = fact_probe.make_documents(facts, seed=2)
    packing = pack(lengths, fact_probe.SEQ_LENGTH)
    assert packing.num_sequences == facts.occurrences[facts.is_long].sum() and packing.padding == 0
    lost = [fact_probe.share_lost(lengths, stated, is_long) for is_long in (True, False)]
    assert lost[0] > 0.5 > 5 * lost[1]


def test_lost_facts_are_those_with_a_cut_between_subject_and_value():
    lengths = np.array([25, 7, 25, 25, 7, 7])  # cuts at 32 and 64; the fourth document goes past the second
    for value, lost in ((20, 1 / 3), (8, 1 / 3), (7, 0)):
        stated = np.array([20, 4, 24, value, 4, 4])
        assert fact_probe.share_lost(lengths, stated, True) == pytest.approx(lost)
        assert fact_probe.share_lost(lengths, stated, False) == 0


def test_questions_are_of_the_subject_and_new_words():
    facts = fact_probe.make_facts(4, seed=1)
    asked = fact_probe.questions(facts, seed=3)
    assert asked.shape == (fact_probe.QUESTIONS, len(facts.values), fact_probe.QUESTION_WORDS + 2)
    assert (asked[..., 0] == np.arange(len(facts.values))).all() and (asked[..., -1] == facts.fact_token).all()
    assert (asked[..., 1:-1] >= facts.first_word).all() and len(np.unique(asked[:, 0], axis=0)) == len(asked)


def test_the_report_says_where_the_difference_is(tmp_path):
    facts = fact_probe.make_facts(4, seed=1)

    def runs(of_long, of_short):
        right = np.where(facts.is_long, of_long, of_short) + np.linspace(-1, 1, len(facts.values))
        return [fact_probe.Result(right + seed / 10, right) for seed in range(3)]

    results = {"concat": runs(50, 90), "concat_masked": runs(60, 90), "pack": runs(80, 90)}
    text = fact_probe.report(results, facts, METHODS, COMPARISONS)
    assert "With packing, the share right of long documents is higher than with concatenation, document mask." in text
    assert "Between packing and concatenation, no difference in the share right of short documents" in text
    fact_probe.draw(str(tmp_path / "figure.png"), results, facts, METHODS)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_fact_probe_runs_as_a_whole(tmp_path):
    """A minute of training; then one run is lost, and the same command makes it again with the same numbers."""
    pytest.importorskip("deepspeed")
    command = [sys.executable, str(ROOT / "examples" / "fact_probe.py"), "--output", str(tmp_path)]
    command += ["--subjects", "1", "--seeds", "2", "--jobs", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-3000:]
    text = (tmp_path / "fact_probe.md").read_text()
    assert text.strip() in done.stdout and "| packing " in text
    assert (tmp_path / "fact_probe.png").read_bytes().startswith(b"\x89PNG")
    lost = tmp_path / "subjects1" / "pack_seed2"
    (lost / "result.json").unlink()
    for path in lost.glob("checkpoints/*/complete.json"):
        path.unlink()
    again = subprocess.run(command, capture_output=True, text=True, timeout=900, env=ENVIRONMENT)
    assert again.returncode == 0, again.stderr[-3000:]
    assert (tmp_path / "fact_probe.md").read_text() == text and again.stderr.count("trained in") == 1
