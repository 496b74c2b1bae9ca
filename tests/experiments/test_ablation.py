"""examples/ablation.py and its parts: the corpus, undefined names, intervals, the report; the whole at a tiny size."""

import json
import shlex
import subprocess
import sys

import numpy as np
import pytest
from helpers.datasets import ROOT

pytest.importorskip("tokenizers")

from experiments.ablation import Sampling, prompts_and_continuations
from experiments.ablation_data import CorpusSize, choose
from experiments.ablation_report import METHODS, Result, report
from experiments.intervals import Interval, checked_seeds, over_items, over_seeds, verdict
from helpers.launching import ENVIRONMENT

from megatron_bfp import BFPError, OptionError


def test_a_text_is_on_one_side_and_there_once():
    files = [(f"package/file{number}.py", f"x = {number % 700}\n" * 5) for number in range(1000)]
    files.append(("package/long.py", "y = 1\n" * 100))
    size = CorpusSize(train_bytes=20_000, valid_documents=20, longest=60, vocab_size=0)
    train, valid = choose(files, size)
    assert len(valid) == 20 and 20_000 <= sum(map(len, train)) < 20_060
    assert len({*train, *valid}) == len(train) + len(valid)
    assert all(len(text) <= 60 for text in train + valid)
    again = choose(reversed(files[:700]), size)
    assert set(again[1]) & set(train) == set() and set(again[0]) & set(valid) == set()


def test_too_few_files_are_an_error_that_says_so():
    with pytest.raises(BFPError, match="more packages"):
        choose([("a.py", "x = 1")], CorpusSize(train_bytes=100, valid_documents=1, longest=60, vocab_size=0))


PROMPT = "import os\n\n\ndef size(path, missing=undefined_in_prompt):\n    status = os."


@pytest.mark.parametrize(
    "completion, expected",
    [
        ("stat(path)\n    return status.st_size\n", (True, ())),
        ("stat(pth)\n    return stats\n", (True, ("pth", "stats"))),
        ("stat(path)\n    return stats +\n    (", (True, ())),  # cut back to the first line
        ("stat(path) + é + ok\n    return", (True, ("é", "ok"))),
        ("stat(path)\n    return later()\n\ndef later():\n    pass\n", (True, ())),
        ("stat((path\n", (False, ())),
        ("", (False, ())),
        ("\x00", (False, ())),
    ],
)
def test_undefined_names_are_those_of_the_completion(completion, expected):
    pytest.importorskip("pyflakes")
    from experiments.undefined_names import check_completion

    assert check_completion(PROMPT, completion) == expected


def test_a_prompt_that_ends_with_its_line_is_not_counted():
    pytest.importorskip("pyflakes")
    from experiments.undefined_names import check_completion

    assert check_completion("a = nothing\n", "b = a\n") == (True, ())
    assert check_completion("a = nothing\n", "b = c\n") == (True, ("c",))
    assert check_completion("a = nothing\n", "\n\n") == (False, ())


def test_intervals_are_students_and_those_of_a_bootstrap():
    interval = over_seeds([1.0, 2.0, 3.0])
    assert interval.mean == 2 and interval.high - 2 == pytest.approx(4.303 / 3**0.5, rel=1e-3)
    values = np.random.default_rng(0).normal(5, 2, 400)
    resampled = over_items(lambda counts: counts @ values / len(values), 400, values.mean())
    assert resampled.high - resampled.low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.1)
    assert resampled.contains(values.mean())
    for seeds in (1, 11):
        with pytest.raises(OptionError, match="--seeds"):
            checked_seeds(seeds)


def test_a_difference_is_one_if_no_interval_holds_0():
    below, around = Interval(-2, -3, -1), Interval(-2, -5, 1)
    assert "loss is lower than with B" in verdict("A", "B", "loss", (below, below))
    assert "no difference in loss" in verdict("A", "B", "loss", (below, around))
    assert "no difference" in verdict("A", "B", "loss", (below, Interval(-1, float("nan"), float("nan"))))


def result(loss, undefined):
    """Documents of 10 targets with about this loss a target; of 100 prompts with 2 completions each 80 parse twice."""
    documents = np.linspace(0.9, 1.1, 50) * loss * 10
    return Result(documents, np.full(50, 10.0), 2.0 * (np.arange(100) < 80), 2.0 * (np.arange(100) < undefined), 200)


def test_the_report_has_the_numbers_and_what_they_say():
    results = {"concat": [result(3.0 + seed / 1000, 40) for seed in range(3)]}
    results["concat_masked"] = [result(2.9 + seed / 1000, 40 + (-1) ** seed) for seed in range(3)]
    results["pack"] = [result(2.9 + 2 * seed / 1000, 20) for seed in range(3)]
    text = report(results, Result(np.array([]), np.array([]), np.ones(100), np.arange(100) < 5.0, 100))
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.startswith("| pack")]
    assert float(rows[0][2].split()[0]) == pytest.approx(np.exp(2.902), abs=0.01)
    assert float(rows[0][3].split()[0]) == pytest.approx(100 * np.expm1(-0.099), abs=0.01)
    assert rows[1][2:4] == ["80.0", "25.0 [25.0, 25.0]"] and rows[1][4].startswith("-25.0")
    assert "With packing, perplexity is lower than with concatenation." in text
    assert "With packing, the share of undefined names is lower than with concatenation." in text
    assert "Between packing and concatenation, document mask, no difference in perplexity" in text


def run(*options, timeout=900):
    command = [sys.executable, str(ROOT / "examples" / "ablation.py"), *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=ENVIRONMENT)


def test_the_full_size_is_commands_of_the_launchers(tmp_path):
    options = [
        "--size",
        "full",
        "--output",
        tmp_path / "out",
        "--data-path",
        "0.4",
        "A",
        "0.6",
        "B",
        "--valid-data",
        "C",
    ]
    done = run(*options, "--tokenizer-model", "t.model", "--launcher", "bash examples/cluster/launch/slurm.sh")
    assert done.returncode == 0, done.stderr
    commands = [shlex.split(line) for line in done.stdout.splitlines() if line.startswith("DATA_PATH=")]
    assert len(commands) == 9 and len({command[2] for command in commands}) == 9
    for command in commands:
        assert command[0] == "DATA_PATH=0.4 A 0.6 B" and command[3:5] == ["bash", "examples/cluster/launch/slurm.sh"]
        assert "llama_7b_code_2k" in command[5] and command[-2] == "--seed"
    assert sum("_concat_masked.sh" in command[5] for command in commands) == 3
    for wrong in (["--size", "full"], ["--size", "cpu", "--seeds", 1], ["--size", "cpu"]):
        done = run(*wrong, "--output", tmp_path / "out")
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.slow
def test_the_ablation_trains_measures_and_goes_on(tmp_path):
    """Six tiny models; then one is lost, and the same command makes it again with the same numbers."""
    pytest.importorskip("deepspeed"), pytest.importorskip("pyflakes")
    options = ["--size", "test", "--output", tmp_path, "--seeds", 2, "--jobs", 2]
    done = run(*options)
    assert done.returncode == 0, done.stderr[-3000:]
    for title, _ in METHODS.values():
        assert f"| {title} " in done.stdout
    text = (tmp_path / "ablation.md").read_text()
    assert text in done.stdout
    measured = json.loads((tmp_path / "pack_seed1" / "result.json").read_text())
    targets = [json.loads(path.read_text())["targets"] for path in tmp_path.glob("*/result.json")]
    assert len(targets) == 6 and all(counts == targets[0] for counts in targets)
    assert sum(measured["losses"]) / sum(measured["targets"]) < np.log(1024) - 1
    lost = tmp_path / "pack_seed1"
    (lost / "result.json").unlink()
    for path in lost.glob("checkpoints/*/complete.json"):
        path.unlink()
    again = run(*options)
    assert again.returncode == 0 and (tmp_path / "ablation.md").read_text() == text
    assert again.stderr.count("trained in") == 1 and again.stderr.count("measuring") == 1


def test_a_name_with_which_a_completion_begins_is_of_the_completion():
    pytest.importorskip("pyflakes")
    from experiments.undefined_names import check_completion

    assert check_completion("a = 1\nb = ", "later\n") == (True, ("later",))
    assert check_completion("a = 1\nb = later", " + 1\n") == (True, ())
    assert check_completion("a = 1\n", "later\n") == (True, ("later",))


def test_documents_of_just_a_prompt_and_its_continuation_are_used(write_dataset):
    valid = write_dataset([[1, 2, 3, 4], [1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]).prefix
    sampling = Sampling(prompts=5, completions=1, prompt_tokens=3, completion_tokens=2)
    prompts, continuations = prompts_and_continuations(valid, sampling)
    assert prompts.tolist() == [[1, 2, 3], [6, 7, 8]] and continuations.tolist() == [[4, 5], [9, 10]]
    with pytest.raises(BFPError, match="no document has the 7 tokens"):
        prompts_and_continuations(valid, sampling._replace(completion_tokens=4))
