"""Commands as people see them: on a terminal of 80 columns, in a pipe that is closed, with names from the tab key."""

import contextlib
import importlib.util
import io
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from helpers.datasets import DATA, ROOT, documents_of
from helpers.terminal import run_on_terminal

from megatron_bfp.commands import main as verbs
from megatron_bfp.commands import preprocess as preprocess_command
from megatron_bfp.commands import report as report_command
from megatron_bfp.commands.shared import dataset_prefix
from megatron_bfp.console import run
from megatron_bfp.indexed_dataset.reader import IndexedDataset
from megatron_bfp.indexed_dataset.writer import IndexedDatasetWriter
from megatron_bfp.tables import WIDTH, format_table, wrap

PREPROCESS = ("tools/preprocess_bfp.py",)
REPORT = ("tools/report_bfp.py",)
VERBS = ("-m", "megatron_bfp")
PRINT_ALL = """
import pytest, sys
from helpers.commands import call
with pytest.MonkeyPatch.context() as patch:
    for line in sys.argv[1:]:
        print("=====", line)
        assert call(patch, *line.split("|")) == 0, line
"""


def python(*words, unbuffered=False, stderr=subprocess.PIPE, **settings):
    """Start a command of this project."""
    command = [sys.executable, *map(str, words)]
    environment = os.environ | {"PYTHONUNBUFFERED": "1" if unbuffered else ""}
    return subprocess.Popen(command, cwd=ROOT, stderr=stderr, text=True, env=environment, **settings)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """The prefix of a dataset with indexes, of documents short and long."""
    prefix = str(tmp_path_factory.mktemp("corpus") / "web_text_document")
    lengths = np.minimum(np.random.default_rng(0).lognormal(5.84, 0.98, 5000).astype(np.int64) + 1, 30_000)
    with IndexedDatasetWriter(prefix, "uint16") as writer:
        writer.add(np.ones(lengths.sum(), dtype=np.uint16), lengths)
        writer.finalize()
    preprocess_command.main(["--indexed", prefix, "--seq-length", "2048", "8192", "--split", "969,30,1"])
    return prefix


@pytest.fixture(scope="module")
def outputs(corpus):
    """What each command prints about the corpus, without the folder that it is in."""
    of_index = ["--seq-length", "8192", "--split", "969,30,1", "--sequence", "77"]
    printed = []
    for main, arguments in (
        (report_command.main, [corpus, "--seq-length", "2048", "8192", "131072"]),
        (preprocess_command.main, ["--indexed", corpus, "--seq-length", "2048", "8192", "--split", "969,30,1"]),
        (preprocess_command.main, ["--merge", corpus, "--output-prefix", f"{corpus}2", "--seq-length", "8192"]),
        (verbs.main, ["verify", corpus, "--tokens", "--vocab-size", "100"]),
        (verbs.main, ["show", corpus, *of_index]),
    ):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            main(arguments)
        printed.append(output.getvalue().replace(os.path.dirname(corpus) + "/", ""))
    return printed


def test_fault_C07_output_fits_80_columns(outputs):
    for output in outputs:
        assert max(map(len, output.splitlines())) <= 80, output


def test_output_of_every_verb_fits_a_terminal_of_80_columns(corpus, tmp_path):
    name, index = "web_text_document", "--seq-length|2048|8192|--split|969,30,1"
    preprocess = f"--input|{DATA / 'nasty' / '00_good.jsonl'}|--tokenizer-model|{DATA / 'bos_tokenizer.json'}"
    lines = [
        f"megatron-bfp preprocess|{preprocess}|--output-prefix|{tmp_path}/out|{index}",
        f"megatron-bfp index|{name}|{index}",
        f"megatron-bfp merge|{name}|{name}|--output-prefix|two|{index}",
        f"megatron-bfp report|{name}|--seq-length|2048|131072|--output|report",
        f"megatron-bfp verify|{name}|two|--tokens|--vocab-size|100",
        f"megatron-bfp show|{name}|--seq-length|8192|--split|969,30,1|--sample|77|--html|page.html",
        "megatron-bfp status",
        f"megatron-bfp-preprocess|--indexed|{name}|{index}",
        f"megatron-bfp-report|{name}|{index}",
    ]
    if importlib.util.find_spec("tokenizers") is None:
        del lines[0]
    settings = {"cwd": os.path.dirname(corpus), "env": os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests"}}
    status, shown = run_on_terminal([sys.executable, "-c", PRINT_ALL, *lines], **settings)
    printed = [re.sub(r"/\S+", "PATH", line.split("\r")[-1]) for line in re.split("\r?\n", shown)]
    assert status == 0 and sum(line.startswith("=====") for line in printed) == len(lines), shown
    assert [line for line in printed if len(line) > 80 and not line.startswith("=====")] == []


def cut_needlessly(lengths, seq_length):
    """Documents that concatenation cuts though they fit into one sequence."""
    ends = np.cumsum(lengths, dtype=np.int64)
    is_cut = (ends - lengths) // seq_length != (ends - 1) // seq_length
    return int(np.count_nonzero(is_cut & (lengths <= seq_length)))


def test_fault_C07_the_documents_cut_needlessly_come_first(outputs, corpus):
    report, indexed, merged, *_ = (output.splitlines() for output in outputs)
    numbers = [re.findall(r"[\d,]+", line) for line in report if re.match(r"\| +2,048 ", line)][0]
    rows = [line.split() for line in indexed if line.startswith("s")]
    assert report[2].startswith("Documents cut needlessly") and report[6].startswith("|      2,048 |")
    assert indexed[1].startswith("Documents cut needlessly") and rows[0][:2] == ["s2048-d0-4845", "train"]
    lengths = np.array(IndexedDataset(corpus).document_lengths[0:5000])
    in_file_order = cut_needlessly(lengths[:4845], 2048)
    np.random.RandomState(1234).shuffle(lengths)  # as megatron-core does
    assert [int(number.replace(",", "")) for number in numbers[1:3]] == [cut_needlessly(lengths, 2048), 0]
    assert [int(number.replace(",", "")) for number in rows[0][2:4]] == [in_file_order, 0]
    assert in_file_order > 500
    assert merged[1].startswith("Documents cut needlessly")


def test_fault_C07_a_wide_table_goes_on_below_with_its_first_column():
    header = ["name", *(f"column {number}" for number in range(20))]
    rows = [[f"row {row}", *range(row * 1000, row * 1000 + 20)] for row in range(1, 4)]
    for markdown in (False, True):
        parts = format_table(header, rows, markdown).split("\n\n")
        assert len(parts) > 1 and all(len(line) <= WIDTH for part in parts for line in part.splitlines())
        cells = [re.split(r"  +|\|", line.strip("| ")) for part in parts for line in part.splitlines()[::2]]
        names = [cell.strip() for part in parts for cell in re.split(r"  +|\|", part.splitlines()[0]) if cell.strip()]
        assert names.count("name") == len(parts) and sorted(set(names)) == sorted(header)
        assert len(names) == len(header) - 1 + len(parts) and cells
        assert all(
            [line.strip("| ")[:5] for line in part.splitlines()[2:]] == ["row 1", "row 2", "row 3"] for part in parts
        )
        assert len(format_table(header, rows, markdown, width=None).splitlines()) == 5
    exact = format_table(["a" * 30, "b" * 48], [["x", "y"]])
    assert len(exact.splitlines()[0]) == 80 and "\n\n" not in exact
    three = format_table(["a" * 30, "b" * 20, "c" * 27], [["x", "y", "z"]])
    assert "\n\n" in three and "\n\n" not in format_table(["a" * 30, "b" * 20, "c" * 26], [["x", "y", "z"]])


def test_fault_C07_paths_in_sentences_stay_whole():
    path = "/folder-of-data/" + "x" * 90
    assert path in wrap(f"some words before {path} and after it").splitlines()


BARS = """
import time
from megatron_bfp import progress
from megatron_bfp.preprocessing.progress import Amount
from megatron_bfp.preprocessing.progress import Meter
progress.FIRST_SECONDS = 0.0
def work(meter, number, *amount):
    meter._start -= 20_000
    with meter:
        for _ in range(number):
            time.sleep(0.11)
            meter.add(Amount(*amount))
work(Meter(10**10), 3, 111_234_567, 10**12, 3 * 10**11, 2 * 10**9)
work(Meter(0), 2, 1_234_567, 10**12, 3 * 10**11, 10**9)
for number in (4, None):
    for _ in progress.terminal_progress(range(4), number, "shuffling 1,000,000,000 documents"):
        time.sleep(0.11)
"""


def test_fault_C07_one_bar_with_amount_and_rate_once():
    pytest.importorskip("tqdm")
    status, shown = run_on_terminal([sys.executable, "-c", BARS], cwd=ROOT)
    assert status == 0, shown
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", shown) if line.strip()]
    assert max(map(len, lines)) <= 80 and len(lines) > 8
    bars = [line for line in lines if "|" in line]
    assert len(bars) > 4 and min(len(line.split("|")[1]) for line in bars) >= 10
    meters = [line for line in lines if "docs" in line]
    assert all(line.count("MB/s") == line.count("docs") == line.count("tok/s") == 1 for line in meters)
    assert any("60%|" in line and "333.70 M docs, 150 MB/s, 45.0 M tok/s, 3.7 h left" in line for line in meters), (
        meters
    )
    assert not any("B/s]" in line or "it/s" in line or line.count("%") > 1 for line in lines)
    assert any(line.startswith("tokenizing: 2.47 M docs, ") for line in meters)
    assert any(line.startswith("shuffling 1,000,000,000 documents:  75%|") for line in bars)


def closed_pipe():
    """The end of a pipe that nobody reads."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    return write_end


def commands(corpus, folder):
    """One of each kind, and a path that it has to have written."""
    index = ("--seq-length", 8192)
    yield (*REPORT, corpus, "--seq-length", 2048, "--output", folder / "report"), folder / "report/truncations.png"
    yield (*PREPROCESS, "--indexed", corpus, "--seq-length", 1024), f"{corpus}.bfp/s1024-d0-5000"
    yield (*PREPROCESS, "--merge", corpus, corpus, "--output-prefix", folder / "two", *index), folder / "two.idx"
    yield (*VERBS, "verify", corpus), corpus + ".idx"
    show = (*VERBS, "show", corpus, *index, "--split", "969,30,1", "--sequence", 5, "--html", folder / "page.html")
    yield show, folder / "page.html"
    for words in ((*VERBS, "status"), (*VERBS, "--help"), (*REPORT, "--version"), (*PREPROCESS, "--help")):
        yield words, corpus + ".idx"


def test_fault_C04_a_closed_pipe_ends_a_command_quietly(corpus, tmp_path):
    started = []
    for words, path in commands(corpus, tmp_path):
        end = closed_pipe()
        started.append((words, path, python(*words, stdout=end)))
        os.close(end)
    for words, path, process in started:
        errors = process.communicate(timeout=60)[1]
        assert (process.returncode, errors) == (141, ""), words
        assert os.path.exists(path), words


def test_fault_C04_also_without_buffers_and_with_errors_in_the_same_pipe(corpus, tmp_path):
    report = (*REPORT, corpus, "--seq-length", 2048, "--output")
    end = closed_pipe()
    unbuffered = python(*report, tmp_path / "a", unbuffered=True, stdout=end)
    same = python(*report, tmp_path / "b", stdout=end, stderr=end)
    failed = python(*VERBS, "verify", tmp_path / "missing", stdout=end, stderr=end)
    os.close(end)
    assert (unbuffered.communicate(timeout=60)[1], unbuffered.returncode) == ("", 141)
    assert (same.wait(60), failed.wait(60)) == (141, 2)
    assert len(os.listdir(tmp_path / "a")) == len(os.listdir(tmp_path / "b")) == 4


def test_fault_C04_an_open_pipe_gets_all(corpus):
    process = python(*VERBS, "verify", corpus, stdout=subprocess.PIPE)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "") and output.count(" whole ") >= 6


def test_fault_C04_errors_stay_errors(corpus, tmp_path):
    end = closed_pipe()
    missing = python(*VERBS, "verify", tmp_path / "missing", stdout=end)
    os.close(end)
    with open("/dev/full", "w") as full_disk:
        report = (*REPORT, corpus, "--seq-length", 8192)
        full = [python(*report, unbuffered=unbuffered, stdout=full_disk) for unbuffered in (False, True)]
    errors = missing.communicate(timeout=60)[1]
    assert missing.returncode == 2 and len(errors.splitlines()) == 1 and "missing.idx" in errors
    for process in full:
        errors = process.communicate(timeout=60)[1]
        assert errors.partition(": ")[2] == "error: standard output: cannot be written: No space left on device\n"
        assert process.returncode == 2


def test_fault_C04_another_pipe_that_breaks_is_no_quiet_end():
    def main():
        raise BrokenPipeError("the pipe of a worker")

    with pytest.raises(BrokenPipeError):
        run(main, "tool")


@pytest.mark.parametrize(
    "name", ["{}.idx", "{}.bin", "{}.bfp", "{}.bfp/", "{}/", "{}", "{}.bfp/s2048-d0-4845", "{}.bfp/s2048-d0-4845/"]
)
def test_fault_C10_every_name_of_a_dataset_is_taken_for_its_prefix(capsys, corpus, tmp_path, name):
    name, output = name.format(corpus), str(tmp_path / "merged")
    assert dataset_prefix(name) == corpus
    report_command.main([name, "--seq-length", "8192"])
    verbs.main(["verify", name])
    verbs.main(["show", name, "--seq-length", "8192", "--split", "969,30,1", "--sequence", "0"])
    preprocess_command.main(["--indexed", name, "--seq-length", "8192", "--split", "969,30,1"])
    preprocess_command.main(["--merge", name, name, "--output-prefix", output + ".idx", "--seq-length", "8192"])
    assert os.path.exists(output + ".bin") and not os.path.exists(output + ".idx.idx")
    assert corpus in capsys.readouterr().out


def test_fault_C10_a_dataset_whose_prefix_ends_so_is_still_that_one(write_dataset, tmp_path):
    for name in ("a.idx", "a.bin", "a.bfp"):
        write_dataset(documents_of([3, 4]), name)
        assert dataset_prefix(str(tmp_path / name)) == str(tmp_path / name)
        assert dataset_prefix(f"{tmp_path / name}.idx") == str(tmp_path / name)
    for name in ("b", "b.text", ".bin", "/", "b.bin.gz", "s2048-d0-3"):
        assert dataset_prefix(name) == name
    assert dataset_prefix("b.bin.idx") == "b.bin"  # one ending, once
