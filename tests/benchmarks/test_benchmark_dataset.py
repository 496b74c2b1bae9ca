"""The benchmark of reading runs on both of megatron-core's datasets."""

import json
import sys
from pathlib import Path

import pytest
from helpers.datasets import documents_of

from megatron_bfp import BFPError

pytest.importorskip("megatron.core")

CODE = str(Path(__file__).parents[1] / "data" / "code_lengths.npy")


@pytest.fixture
def benchmark(monkeypatch):
    """The benchmark, called with a command line."""
    from benchmarks.dataset import main

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["dataset.py", *arguments])
        main()

    return run


def test_the_table_and_the_json_tell_the_same(write_dataset, tmp_path, benchmark, capsys):
    prefixes = [write_dataset(documents_of([300] * 50), name).prefix for name in ("one", "two")]
    arguments = ["--data-path", *prefixes, "--seq-length", "1024", "--workers", "0", "1", "--seconds", "0.02"]
    arguments += ["--reads", "100", "--output", str(tmp_path / "out.json")]
    benchmark(*arguments)
    printed = capsys.readouterr().out
    figures = json.loads((tmp_path / "out.json").read_text())
    assert {(row["workers"], row["corpora"]) for row in figures["rates"]} == {(0, 1), (1, 1), (0, 2), (1, 2)}
    assert not (tmp_path / "cache").exists()  # of GPTDataset, beside the data
    names = {row["dataset"] for row in figures["rates"]}
    assert {
        "BFPGPTDataset",
        "BFPGPTDataset, targets only",
        "BFPGPTDataset, fill-in-the-middle",
        "GPTDataset, no mask",
        "GPTDataset, reset_attention_mask",
    } <= names
    assert all(name in printed for name in names)
    assert [row["reads"] for row in figures["memory"]] == list(range(10, 101, 10))


def test_a_simulated_corpus_is_made_where_none_is_given(benchmark, capsys):
    arguments = [
        "--tokens",
        "1000000",
        "--seq-length",
        "512",
        "--corpora",
        "1",
        "--workers",
        "0",
        "--seconds",
        "0.01",
        "--reads",
        "10",
        "--lengths",
        CODE,
        "--fim-rate",
        "0.9",
    ]
    benchmark(*arguments)
    assert "GPTDataset, no mask" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tokens", "0"],
        ["--seq-length", "0"],
        ["--corpora", "0"],
        ["--data-path", "nowhere", "--corpora", "2"],
        ["--data-path", "nowhere"],
    ],
)
def test_bad_options_are_refused(arguments, benchmark):
    with pytest.raises(BFPError):
        benchmark(*arguments)
