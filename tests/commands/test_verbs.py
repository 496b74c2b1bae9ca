"""``megatron-bfp VERB``: each verb does what the older command does, and ``run`` what the module did with a script."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from helpers.commands import ONE_DOOR, VERBS, call, files_in
from helpers.datasets import DATA, ROOT, documents_of, write

from megatron_bfp.commands import main
from megatron_bfp.sequence_index.key import IndexKey, build_command

LENGTHS = np.random.default_rng(2).integers(0, 90, 60).tolist()
INDEX = ("--seq-length", 64, 32, "--split", "8,1,1", "--max-documents-per-sequence", 5)


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Two folders with the same datasets, to compare what two commands make of them."""
    for folder in (tmp_path / "new", tmp_path / "old"):
        folder.mkdir()
        for name, lengths in (("a", LENGTHS), ("b", LENGTHS[:7]), ("c", [3, 0, 70])):
            write(folder / name, documents_of(lengths))

    def both(new, old):
        printed = []
        for folder, (command, *arguments) in ((tmp_path / "new", new), (tmp_path / "old", old)):
            monkeypatch.chdir(folder)
            assert call(monkeypatch, command, *arguments) == 0
            names = [name for name in files_in(folder) if not name.endswith(".summary.json")]  # it tells times
            printed.append({name: (folder / name).read_bytes() for name in names})
        assert printed[0] == printed[1]
        return printed[0]

    return both


def test_index_builds_and_prints_what_the_older_command_does(folders, capsys):
    older = ["megatron-bfp-preprocess", "--indexed", "a", "b", *INDEX]
    content = folders(["megatron-bfp index", "a", "b.idx", *INDEX], older)
    assert sum(name.endswith("index.json") for name in content) == 12
    out = capsys.readouterr().out
    assert out[: len(out) // 2] == out[len(out) // 2 :] and out.startswith("a\nDocuments cut needlessly")


def test_merge_writes_what_the_older_command_writes(folders):
    merge = ["megatron-bfp merge", "a", "c", "b", "--output-prefix", "all", *INDEX]
    older = ["megatron-bfp-preprocess", "--merge", "a", "c", "b", "--output-prefix", "all", *INDEX]
    content = folders(merge, older)
    assert {"all.bin", "all.idx"} < set(content) and sum(name.startswith("all.bfp/") for name in content) > 6


def test_merge_without_a_length_builds_no_index(folders, capsys):
    merge = ["megatron-bfp merge", "a", "b", "--output-prefix"]
    content = folders([*merge, "all"], [*merge, "all.idx"])
    assert {"all.bin", "all.idx"} < set(content) and not any(".bfp" in name for name in content)
    tokens = sum(LENGTHS) + sum(LENGTHS[:7])
    assert capsys.readouterr().out == f"all\n67 documents, {tokens:,} tokens, uint16\n" * 2


def test_report_prints_and_writes_what_the_older_command_does(folders, capsys):
    options = ["a", "--seq-length", 32, "--output", "report", "--split", "9,1"]
    assert "report/report.json" in folders(["megatron-bfp report", *options], ["megatron-bfp-report", *options])
    out = capsys.readouterr().out
    assert out[: len(out) // 2] == out[len(out) // 2 :] and "Documents cut needlessly" in out


def test_preprocess_writes_what_the_older_command_writes(folders, capsys):
    pytest.importorskip("tokenizers")
    options = ["--input", DATA / "nasty" / "00_good.jsonl", "--tokenizer-model", DATA / "bos_tokenizer.json"]
    options += ["--output-prefix", "out", "--append-eod", "--eod-token", "<eod>", *INDEX]
    content = folders(["megatron-bfp preprocess", *options], ["preprocess_bfp.py", *options, "--overwrite"])
    assert "out_text_document.idx" in content and "out_text_document.bfp/s64-d0-6-m5/index.json" in content
    assert capsys.readouterr().out.count("Each document: ") == 2


def test_preprocess_says_which_options_have_no_effect(monkeypatch, capsys, tmp_path):
    pytest.importorskip("tokenizers")
    options = ["--input", DATA / "nasty" / "00_good.jsonl", "--tokenizer-model", DATA / "bos_tokenizer.json"]
    options += ["--output-prefix", tmp_path / "out", "--seq-length", 8, "--vocab-size", 9]
    assert call(monkeypatch, "megatron-bfp preprocess", *options) == 0
    (line,) = capsys.readouterr().err.splitlines()
    effect = "--vocab-size has no effect here: it is for --tokenizer-type TikTokenizer"
    assert line == f"megatron-bfp preprocess: warning: {effect}"


def test_the_documents_cut_needlessly_come_first(monkeypatch, capsys, tmp_path):
    prefix = write(tmp_path / "data", documents_of(LENGTHS)).prefix
    for verb, *options in (("index",), ("merge", "--output-prefix", tmp_path / "all"), ("report",)):
        assert call(monkeypatch, f"megatron-bfp {verb}", prefix, "--seq-length", 64, *options) == 0
        lines = [line for line in capsys.readouterr().out.splitlines() if line]
        assert lines[1].startswith("Documents cut needlessly, that is, though they fit into one sequence:")
        assert lines[2 if verb == "report" else 4].strip("| ").startswith("seq_length" if verb == "report" else "index")


def test_the_command_that_messages_recommend_is_a_verb(monkeypatch, tmp_path):
    dataset = write(tmp_path / "data", documents_of(LENGTHS))
    command = build_command(dataset, IndexKey(8, 0, 48, 3), "80,20").split()
    assert command[:2] == ["megatron-bfp", "index"]
    assert call(monkeypatch, "megatron-bfp index", *command[2:]) == 0
    assert os.path.isdir(f"{dataset.prefix}.bfp/s8-d0-48-m3")


def test_verify_checks_every_dataset(monkeypatch, capsys, tmp_path):
    prefixes = [write(tmp_path / name, documents_of(LENGTHS)).prefix for name in ("a", "b")]
    assert call(monkeypatch, "megatron-bfp index", *prefixes, "--seq-length", 8) == 0
    capsys.readouterr()
    assert call(monkeypatch, "megatron-bfp verify", *prefixes) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if ".bfp" in line] == [f"{p}.bfp:" for p in prefixes]
    with open(f"{prefixes[1]}.bfp/s8-d0-60/runs.npy", "ab") as file:
        file.write(b"\0")
    assert call(monkeypatch, "megatron-bfp verify", *prefixes) == 2
    assert prefixes[1] in capsys.readouterr().err


SCRIPT = """
import os, signal, sys
open("arguments", "w").write(" ".join(sys.argv) + f" {sys.path[0]}")
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
sys.exit(7 if "--seven" in sys.argv else 0)
"""


@pytest.mark.parametrize(
    "words",
    [
        ["run", "train.py", "--seven", "--help"],
        ["--local_rank=3", "run", "train.py", "--seven", "verify"],
        ["run", "--local_rank=3", "train.py", "--seven"],
        ["train.py", "--seven", "run"],
        ["--local_rank=3", "train.py", "--seven"],
    ],
)
def test_run_runs_a_script_with_its_own_options(tmp_path, words):
    """DeepSpeed's launcher puts an option before everything else; it is passed on."""
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "megatron_bfp", *words], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 7 and "runs as it would without" in done.stderr
    rank = [word for word in words if "rank" in word]
    own = words[words.index("train.py") + 1 :]
    assert (tmp_path / "arguments").read_text().split() == ["train.py", *rank, *own, str(tmp_path)]


def test_verbs_but_run_clean_up_when_they_are_terminated(monkeypatch, capsys, tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        assert call(monkeypatch, "megatron-bfp run", "gone.py") == 2
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert call(monkeypatch, "megatron-bfp verify", tmp_path / "gone") == 2
        with pytest.raises(SystemExit) as ended:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.sigtimedwait([], 1)
        assert ended.value.code == 143
    finally:
        signal.signal(signal.SIGTERM, before)
    capsys.readouterr()


def test_ranks_are_quiet_only_when_they_run_a_script(monkeypatch, capsys, tmp_path):
    """A scheduler that starts a verb in several tasks gets the error of each."""
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setattr("megatron_bfp.console.QUIET_SECONDS", 0)
    for door in ONE_DOOR:
        assert call(monkeypatch, f"{door} run", "gone.py") == 2
        assert capsys.readouterr().err == ""
        assert call(monkeypatch, f"{door} index", "data", "--seq-length", "x") == 2
        assert capsys.readouterr().err.startswith(f"{door} index: error: ")


def test_every_verb_has_a_module_with_the_same_parts():
    for verb in VERBS:
        module = main.module_of(verb)
        assert module.DESCRIPTION and (module.EPILOG is None or module.EPILOG.startswith("keys of --json"))
        assert callable(module.add_arguments) and callable(module.execute)


def test_index_reads_the_idx_alone_and_replaces_a_damaged_index_if_asked(monkeypatch, capsys, tmp_path):
    dataset = write(tmp_path / "data", documents_of([5, 3, 8]))
    os.remove(f"{dataset.prefix}.bin")
    words = ("megatron-bfp index", dataset.prefix, "--seq-length", 8)
    assert call(monkeypatch, *words) == 0
    path = tmp_path / "data.bfp" / "s8-d0-3" / "runs.npy"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert call(monkeypatch, *words) == 2 and "--overwrite" in capsys.readouterr().err
    assert call(monkeypatch, *words, "--overwrite") == 0 and path.read_bytes() == whole
