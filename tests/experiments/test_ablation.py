"""examples/ablation.py and its parts: the corpus, undefined names, intervals, the report; the whole at a tiny size."""

import shlex
import subprocess
import sys

import numpy as np
import pytest
from helpers.datasets import ROOT, write

pytest.importorskip("tokenizers")

from experiments.ablation.command import Sampling, prompts_and_continuations
from experiments.ablation.data import CorpusSize, choose, write_cut_documents
from experiments.ablation.held_out import HeldOut
from experiments.ablation.report import Result, report
from experiments.data_methods import COMPARISONS, METHODS, PACKING_OPTIONS, check_settings, chosen_methods
from experiments.intervals import Interval, checked_seeds, over_items, over_seeds, seeds_needed, verdict
from helpers.launching import ENVIRONMENT

from megatron_bfp import BFPError, OptionError
from megatron_bfp.indexed_dataset.reader import IndexedDataset


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
    from experiments.ablation.undefined_names import check_completion

    assert check_completion(PROMPT, completion) == expected


def test_a_prompt_that_ends_with_its_line_is_not_counted():
    pytest.importorskip("pyflakes")
    from experiments.ablation.undefined_names import check_completion

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
    for seeds in (1, 21):
        with pytest.raises(OptionError, match="--seeds"):
            checked_seeds(seeds)


def test_as_many_seeds_are_needed_as_make_the_interval_narrow_enough():
    values = [0.0, 1.0, 2.0, 3.0]
    needed = seeds_needed(values, width=2.0)
    repeated = np.resize((-1.0, 1.0), needed) * np.std(values, ddof=1)
    for fewer, is_enough in ((0, True), (1, False)):
        half = over_seeds((repeated[fewer:]).tolist())
        scale = np.std(values, ddof=1) / np.std(repeated[fewer:], ddof=1)
        assert ((half.high - half.low) * scale < 2.0) == is_enough
    assert seeds_needed(values, width=0.01) is None


def test_a_difference_is_one_if_no_interval_holds_0():
    below, around = Interval(-2, -3, -1), Interval(-2, -5, 1)
    assert "loss is lower than with B" in verdict("A", "B", "loss", (below, below))
    assert "no difference in loss" in verdict("A", "B", "loss", (below, around))
    assert "no difference" in verdict("A", "B", "loss", (below, Interval(-1, float("nan"), float("nan"))))


LENGTHS = np.array([40, 8, 20, 32, 12])
SEQ_LENGTH = 16


def held_out():
    """Documents in which only token 7 is repeated: at 3 and 14 of the first, where it is 11 positions back, and at 4
    and 6 of the second."""
    tokens = np.arange(100, 100 + LENGTHS.sum())
    tokens[[3, 14, 40 + 4, 40 + 6]] = 7
    return HeldOut(SEQ_LENGTH, LENGTHS, tokens)


def test_far_tokens_are_those_whose_evidence_a_cut_would_have_removed():
    documents = held_out()
    assert np.flatnonzero(documents.far).tolist() == [14]
    assert documents.evidence_distance[[14, 46]].tolist() == [11, 2] and documents.evidence_distance.sum() == 13
    # in another chunk, or nearer than half of the sequence length: not far
    assert not HeldOut(8, LENGTHS, np.arange(LENGTHS.sum()) % 20).far.any()
    tokens = np.arange(LENGTHS.sum())
    tokens[7] = tokens[0]
    assert not HeldOut(SEQ_LENGTH, LENGTHS, tokens).far.any()
    tokens[8] = tokens[0]
    assert not HeldOut(SEQ_LENGTH, LENGTHS, tokens).far.any()  # the last occurrence counts
    tokens[7] = 7
    assert np.flatnonzero(HeldOut(SEQ_LENGTH, LENGTHS, tokens).far).tolist() == [8]


def test_each_target_is_in_one_group_of_each_kind():
    documents = held_out()
    by_position, by_length, by_evidence = documents.groups()
    for groups in (by_position, by_length, by_evidence):
        assert (np.sum([*groups.tokens.values()], axis=0) == documents.targets).all()
    assert documents.targets.sum() == LENGTHS.sum() - len(LENGTHS)
    assert by_position.tokens["16+"].sum() == (40 - 16) + (20 - 16) + (32 - 16)
    assert by_length.tokens["16+"].sum() == 39 + 19 + 31 and by_length.tokens["8-15"].sum() == 7 + 11
    assert (by_evidence.tokens["8+"] == documents.far).all()


def result(loss, far_loss, undefined):
    """A model with these mean losses, a little different for each document; of 100 prompts with 2 completions each 80
    parse twice."""
    documents = held_out()
    losses = np.repeat(np.linspace(0.9, 1.1, len(LENGTHS)), LENGTHS) * loss
    losses *= loss / losses[documents.targets & ~documents.far].mean()
    losses[documents.far], losses[~documents.targets] = far_loss, np.nan
    return Result(losses, 2.0 * (np.arange(100) < 80), 2.0 * (np.arange(100) < undefined), 200)


def test_the_report_has_the_numbers_and_what_they_say():
    results = {"concat": [result(3.0 + seed / 1000, 4.0, 40) for seed in range(3)]}
    results["concat_masked"] = [result(2.9 + seed / 1000, 4.0, 40 + (-1) ** seed) for seed in range(3)]
    results["pack"] = [result(2.9 + 2 * seed / 1000, 3.5 + seed / 100, 20) for seed in range(3)]
    reference = Result(np.array([]), np.ones(100), np.arange(100) < 5.0, 100)
    text = report(results, reference, held_out(), METHODS, COMPARISONS)
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.startswith("| pack")]
    overall, difference, from_masked, far, far_difference, *_ = rows
    targets = LENGTHS.sum() - len(LENGTHS)
    assert float(overall[2].split()[0]) == pytest.approx(np.exp((2.902 * (targets - 1) + 3.51) / targets), abs=0.01)
    assert difference[1] == "packing minus concatenation"
    expected = 100 * np.expm1((-0.099 * (targets - 1) - 0.49) / targets)
    assert float(difference[2].split()[0]) == pytest.approx(expected, abs=0.01)
    assert from_masked[1] == "packing minus concatenation, document mask"
    assert float(far[2].split()[0]) == pytest.approx(np.exp(3.51), abs=0.02)
    assert float(far_difference[2].split()[0]) == pytest.approx(100 * np.expm1(-0.49), abs=0.05)
    assert "With packing, perplexity is lower than with concatenation." in text
    assert "With packing, the share of undefined names is lower than with concatenation." in text
    assert "Between packing and concatenation, document mask, no difference in perplexity shows" in text


def test_a_folder_with_other_settings_is_refused(tmp_path):
    check_settings(str(tmp_path), ("a", 1))
    check_settings(str(tmp_path), ("a", 1))
    with pytest.raises(OptionError, match="other settings"):
        check_settings(str(tmp_path), ("a", 2))


def test_packing_options_are_compared_with_packing():
    methods, comparisons = chosen_methods(packing_options=True)
    assert set(methods) == {*METHODS, *PACKING_OPTIONS} and comparisons[:3] == COMPARISONS
    assert all(baseline == "pack" and method in PACKING_OPTIONS for method, baseline in comparisons[3:])
    assert chosen_methods(packing_options=False) == (METHODS, COMPARISONS)


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
    assert len(commands) == 24 and len({command[2] for command in commands}) == 24
    for command in commands:
        assert command[0] == "DATA_PATH=0.4 A 0.6 B" and command[3:5] == ["bash", "examples/cluster/launch/slurm.sh"]
        assert "llama_7b_code_2k" in command[5] and command[-2] == "--seed"
    assert sum("_concat_masked.sh" in command[5] for command in commands) == 8
    for wrong in (
        ["--size", "full"],
        ["--size", "full", "--lr", 0.1],
        ["--size", "cpu", "--seeds", 1],
        ["--size", "cpu"],
    ):
        done = run(*wrong, "--output", tmp_path / "out")
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr


def test_documents_are_cut_where_concatenation_cuts_them(tmp_path):
    lengths = [5, 16, 11, 30, 1, 9]
    write(str(tmp_path / "whole"), [np.arange(length) + 100 * n for n, length in enumerate(lengths)])
    write_cut_documents(str(tmp_path / "whole"), str(tmp_path / "cut"), seq_length=8)
    whole, cut = IndexedDataset(str(tmp_path / "whole")), IndexedDataset(str(tmp_path / "cut"))
    parts = [cut.document(n).tolist() for n in range(cut.num_documents)]
    assert sorted(token for part in parts for token in part) == sorted(whole.tokens(0, sum(lengths)).tolist())
    ends = np.cumsum([len(part) for part in parts])
    assert set(range(8, sum(lengths), 8)) <= set(ends.tolist()) and max(map(len, parts)) <= 8
    for part, end in zip(parts, ends.tolist()):
        assert np.ptp(np.array(part) // 100) == 0  # of one document
        assert end % 8 == 0 or (part[-1] % 100) + 1 == lengths[part[-1] // 100]  # cut, or the document's end


@pytest.mark.slow
def test_the_ablation_trains_measures_and_goes_on(tmp_path):
    """Eight tiny models; then one is lost, and the same command makes it again with the same numbers."""
    pytest.importorskip("deepspeed"), pytest.importorskip("pyflakes")
    options = ["--size", "test", "--output", tmp_path, "--seeds", 2, "--jobs", 2, "--cut-documents"]
    done = run(*options)
    assert done.returncode == 0, done.stderr[-3000:]
    for title in [*(title for title, _ in METHODS.values()), "packing of cut documents"]:
        assert f"| {title} " in done.stdout
    assert "packing of cut documents minus concatenation, document mask" in done.stdout
    text = (tmp_path / "ablation.md").read_text()
    assert text in done.stdout
    losses = {path.parent.name: np.load(path) for path in tmp_path.glob("*/token_losses.npy")}
    no_target = np.isnan(losses["pack_seed1"])
    assert len(losses) == 8 and all((np.isnan(of_run) == no_target).all() for of_run in losses.values())
    assert np.nanmean(losses["pack_seed1"]) < np.log(1024) - 1
    assert (tmp_path / "ablation.png").read_bytes().startswith(b"\x89PNG")
    lost = tmp_path / "pack_seed1"
    (lost / "result.json").unlink()
    for path in lost.glob("checkpoints/*/complete.json"):
        path.unlink()
    again = run(*options)
    assert again.returncode == 0 and (tmp_path / "ablation.md").read_text() == text
    assert again.stderr.count("trained in") == 1 and again.stderr.count("measuring") == 1


def test_a_name_with_which_a_completion_begins_is_of_the_completion():
    pytest.importorskip("pyflakes")
    from experiments.ablation.undefined_names import check_completion

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
