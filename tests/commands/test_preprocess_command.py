"""``tools/preprocess_bfp.py``, run as users run it: what it writes, what it prints, what it refuses."""

import filecmp
import json
import os
import random
import shutil
import subprocess
import sys

import numpy as np
import pytest
from helpers.commands import files_in, preprocess_tool
from helpers.datasets import DATA, ROOT, documents_of

pytest.importorskip("tokenizers")

from helpers.tokenizer_fixtures import EOD

from megatron_bfp.commands import preprocess as command
from megatron_bfp.indexed_dataset.reader import IndexedDataset
from megatron_bfp.sequence_index.verify import verify_all
from megatron_bfp.tokenizers.registry import load_tokenizer

GOOD = str(DATA / "nasty" / "00_good.jsonl")


@pytest.fixture
def run_here(tmp_path, tokenizer_file, capsys, monkeypatch):
    """Run the command in this process, which is quicker, as the console script does."""

    def run(*arguments, defaults=True):
        if defaults:
            arguments += ("--output-prefix", tmp_path / "out", "--tokenizer-model", tokenizer_file)
            arguments += ("--eod-token", EOD, "--append-eod", "--seq-length", 64)
        monkeypatch.setattr(sys, "argv", ["preprocess_bfp", *map(str, arguments)])
        try:
            status = command.console()
        except SystemExit as exit:
            status = exit.code
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.mark.case(2)
def test_documents_become_a_dataset_and_its_indexes(run_here, tmp_path, tokenizer_file):
    status, out, _ = run_here("--input", GOOD, "--split", "5,2,1", "--seq-length", 64, 128)
    assert status == 0
    dataset = IndexedDataset(str(tmp_path / "out_text_document"))
    tokenizer = load_tokenizer("HuggingFaceTokenizer", tokenizer_file, EOD)
    texts = [json.loads(line)["text"] for line in open(GOOD, encoding="utf-8")]
    expected = [[*ids.tolist(), tokenizer.eod] for ids in tokenizer.encode_batch(texts)]
    assert [dataset.document(i).tolist() for i in range(dataset.num_documents)] == expected
    assert dataset.dtype == np.uint16
    # --seq-length was given twice: argparse keeps the last
    assert sorted(os.path.basename(index.path) for index in verify_all(dataset.prefix)) == [
        "s64-d0-5",
        "s64-d5-7",
        "s64-d7-8",
    ]
    assert f"{dataset.num_tokens:,}" in out
    for split in ("train", "valid", "test"):
        assert "s64-d" in out and split in out


def test_several_sequence_lengths_and_keys(run_here, tmp_path, tokenizer_file):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": "a b c", "code": "x = 1" * n}) + "\n" for n in range(5)))
    options = ("--output-prefix", tmp_path / "out", "--tokenizer-model", tokenizer_file, "--seq-length", 8, 16)
    status, _, _ = run_here("--input", path, "--json-keys", "text", "code", *options, defaults=False)
    assert status == 0
    text, code = (IndexedDataset(str(tmp_path / f"out_{key}_document")) for key in ("text", "code"))
    assert (text.num_documents, code.num_documents) == (5, 4)
    assert [index.key.seq_length for index in verify_all(code.prefix)] == [16, 8]


def test_indexes_for_fill_in_the_middle(run_here, tmp_path, tokenizer_file):
    fim = ("--fim-rate", 1, "--seed", 7)
    options = ("--output-prefix", tmp_path / "out", "--tokenizer-model", tokenizer_file, "--seq-length", 512)
    status, out, _ = run_here("--input", GOOD, *options, *fim, "--targets-only", defaults=False)
    written = str(tmp_path / "out_text_document")
    merged = str(tmp_path / "merged")
    parts = ("--merge", written, written, "--output-prefix", merged, "--seq-length", 512)
    assert status == 0 and "too long" in out and run_here(*parts, *fim, defaults=False)[0] == 0
    for prefix, name in ((written, "s512-d0-8-t-fim1-7"), (merged, "s512-d0-16-fim1-7")):
        (index,) = verify_all(prefix)
        assert index.key.name == name and index.counts["fim_documents"] > 0


@pytest.mark.case(1)
def test_the_table_counts_what_is_cut_and_what_is_empty(run_here):
    status, out, err = run_here("--input", str(DATA / "nasty" / "02_whitespace_only.jsonl"))
    assert status == 0 and err == ""
    lines = out.splitlines()
    assert lines[0].endswith("out_text_document") and "3 documents (1 empty and 0 bad ones left out), " in out
    cuts, sizes = (number for number, line in enumerate(lines) if line.startswith("index "))
    assert lines[cuts].split() == ["index", "split", "concatenation", "packing", "longer", "than", "L"]
    assert lines[cuts + 2].split()[1:] == ["all", "0", "0", "2"]
    assert lines[sizes + 2].split()[1] == "3" and "padding" in lines[sizes]


def test_any_number_of_workers_gives_the_same_bytes(tmp_path, tokenizer_file):
    path = tmp_path / "in.jsonl"
    rng = random.Random(1)
    with open(path, "w") as file:
        for number in range(6000):
            file.write(json.dumps({"text": f"{number} " + "word " * rng.randint(0, 200)}) + "\n")
    again = shutil.copy(path, tmp_path / "again.jsonl")
    prefixes = []
    for workers in (1, 2, 3):
        prefixes.append(tmp_path / f"out{workers}")
        common = ("--tokenizer-model", tokenizer_file, "--eod-token", EOD, "--append-eod", "--seq-length", 128)
        done = preprocess_tool("--input", path, again, "--output-prefix", prefixes[-1], "--workers", workers, *common)
        assert done.returncode == 0, done.stderr
    for prefix in prefixes[1:]:
        for suffix in (".bin", ".idx"):
            assert filecmp.cmp(f"{prefixes[0]}_text_document{suffix}", f"{prefix}_text_document{suffix}", shallow=False)


@pytest.mark.case(8)
def test_indexes_for_a_dataset_that_exists(run_here, write_dataset, tmp_path):
    prefix = write_dataset(documents_of([5, 90, 3, 64])).prefix
    before = files_in(tmp_path)
    status, out, _ = run_here("--indexed", prefix, "--seq-length", 64, 32, "--split", "1,1", defaults=False)
    assert status == 0 and "concatenation" in out
    assert {os.path.dirname(name) for name in set(files_in(tmp_path)) - set(before)} == {
        f"data.bfp/s{seq_length}-{documents}" for seq_length in (32, 64) for documents in ("d0-2", "d2-4")
    }
    assert run_here("--indexed", prefix, "--seq-length", 64, "--split", "1,1", defaults=False)[0] == 0


def test_a_stale_index_is_rebuilt_only_with_overwrite(run_here, write_dataset):
    prefix = write_dataset(documents_of([5, 90, 3, 64])).prefix
    assert run_here("--indexed", prefix, "--seq-length", 64, defaults=False)[0] == 0
    write_dataset(documents_of([5, 90, 4, 64]))
    status, _, err = run_here("--indexed", prefix, "--seq-length", 64, defaults=False)
    assert status == 2 and "--overwrite" in err
    assert run_here("--indexed", prefix, "--seq-length", 64, "--overwrite", defaults=False)[0] == 0
    verify_all(prefix)


def test_a_dataset_that_is_there_is_not_replaced_unasked(run_here, tmp_path):
    assert run_here("--input", GOOD)[0] == 0
    before = {name: (tmp_path / name).read_bytes() for name in files_in(tmp_path)}
    status, _, err = run_here("--input", str(DATA / "nasty" / "12_bom.jsonl"))
    assert status == 2 and "exists" in err
    assert {name: (tmp_path / name).read_bytes() for name in files_in(tmp_path)} == before
    assert run_here("--input", str(DATA / "nasty" / "12_bom.jsonl"), "--overwrite")[0] == 0
    assert IndexedDataset(str(tmp_path / "out_text_document")).num_documents == 2
    (index,) = verify_all(str(tmp_path / "out_text_document"))
    assert index.counts["documents"] == 2


BAD_OPTIONS = [
    (["--split=-1,1,0"], "--split"),
    (["--split", "-1,1,0"], "--split"),
    (["--split", "90,abc,5"], "--split"),
    (["--split", "0,0,0"], "--split"),
    (["--seq-length", "0"], "--seq-length"),
    (["--seq-length", "abc"], "--seq-length"),
    (["--workers", "0"], "--workers"),
    (["--max-documents-per-sequence", "0"], "max_documents_per_sequence"),
    (["--input", "/nowhere/in.jsonl"], "no such file"),
    (["--tokenizer-model", "/nowhere/tokenizer.json"], "No such file"),
    (["--tokenizer-type", "Nonesuch"], "--tokenizer-type"),
    (["--eod-token", "</s>"], "--eod-token"),
    (["--output-prefix", "/nowhere/out"], "no folder"),
    (["--indexed", "/nowhere/data"], "one of --input, --indexed and --merge"),
    (["--nonsense"], "--nonsense"),
    (["--input", "/nowhere/*.jsonl"], "no file matches"),
    (["--input", "-", "-"], "once only"),
    (["--json-keys", "text", "text"], "given twice"),
    (["--json-keys", "a/b"], "slash"),
    (["--json-keys", ""], "cannot be empty"),
    (["--vocab-size", "0"], "--vocab-size"),
    (["--tokenizer-type", "TikTokenizer"], "tiktoken"),
    (["--tokenizer-type", "SentencePieceTokenizer"], "not a SentencePiece model"),
]


@pytest.mark.parametrize("options, named", BAD_OPTIONS, ids=[" ".join(options) for options, _ in BAD_OPTIONS])
def test_bad_options_are_one_line_and_status_2_and_leave_nothing(run_here, tmp_path, tokenizer_file, options, named):
    good = {"--input": GOOD, "--output-prefix": tmp_path / "out", "--tokenizer-model": tokenizer_file}
    good |= {"--eod-token": EOD, "--seq-length": 64}
    arguments = [part for name, value in good.items() if name != options[0] for part in (name, value)]
    status, out, err = run_here(*arguments, "--append-eod", *options, defaults=False)
    assert status == 2 and out == ""
    assert named in err and len(err.splitlines()) == 1
    assert files_in(tmp_path) == []


@pytest.mark.case(5)
def test_a_tokenizer_without_an_eod_is_refused(run_here, tmp_path, tokenizer_file):
    common = ("--input", GOOD, "--output-prefix", tmp_path / "out", "--tokenizer-model", tokenizer_file)
    status, _, err = run_here(*common, "--append-eod", "--seq-length", 64, defaults=False)
    assert status == 2 and "--eod-token" in err and len(err.splitlines()) == 1
    assert files_in(tmp_path) == []


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    "name", ["04_missing_key.jsonl", "18_latin1.jsonl", "38_empty_file.jsonl", "10_json_array.json"]
)
def test_bad_input_is_one_line_and_leaves_nothing(tmp_path, tokenizer_file, name, workers):
    common = ("--output-prefix", tmp_path / "out", "--tokenizer-model", tokenizer_file)
    common += ("--eod-token", EOD, "--append-eod")
    inputs = [] if name.startswith("38") else [GOOD]
    done = preprocess_tool("--input", *inputs, DATA / "nasty" / name, *common, "--seq-length", 64, "--workers", workers)
    assert done.returncode == 2 and name in done.stderr and len(done.stderr.splitlines()) == 1
    assert files_in(tmp_path) == []


def test_several_keys_are_written_all_or_none(run_here, tmp_path, tokenizer_file):
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "a", "code": "b"}\n{"text": "a"}\n')
    status, _, err = run_here("--input", path, "--json-keys", "text", "code")
    assert status == 2 and ":2 (byte 27): no key 'code'" in err
    assert files_in(tmp_path) == ["in.jsonl"]


@pytest.fixture
def mixed_files(tmp_path):
    """The same 3000 documents in one file, and in a folder of ten in every container we read."""
    import bz2
    import gzip
    import lzma

    import pyarrow
    from backports import zstd
    from pyarrow import parquet

    rng = random.Random(2)
    texts = [f"{number} " + "word " * rng.randint(0, 300) for number in range(3000)]
    lines = [json.dumps({"text": text}).encode() + b"\n" for text in texts]
    (tmp_path / "one.jsonl").write_bytes(b"".join(lines))
    folder = tmp_path / "folder"
    folder.mkdir()
    writers = {"jsonl": bytes, "jsonl.gz": gzip.compress, "jsonl.zst": zstd.compress}
    writers |= {"jsonl.bz2": bz2.compress, "jsonl.xz": lzma.compress}
    for number in range(10):
        part = slice(number * 300, (number + 1) * 300)
        kind = ["parquet", *writers][number % 6]
        path = folder / f"part-{number}.{kind}"
        if kind == "parquet":
            parquet.write_table(pyarrow.table({"text": texts[part]}), path, row_group_size=77)
        else:
            path.write_bytes(writers[kind](b"".join(lines[part])))
    return tmp_path / "one.jsonl", folder


def test_any_container_and_number_of_workers_gives_the_same_bytes(tmp_path, tokenizer_file, mixed_files):
    one, folder = mixed_files
    runs = {"one": (one, 1), "folder": (folder, 1), "workers": (folder, 2), "pattern": (folder / "*", 4)}
    contents = set()
    for name, (given, workers) in runs.items():
        common = ("--tokenizer-model", tokenizer_file, "--eod-token", EOD, "--append-eod", "--seq-length", 128)
        done = preprocess_tool("--input", given, "--output-prefix", tmp_path / name, "--workers", workers, *common)
        assert done.returncode == 0, done.stderr
        contents.add(tuple((tmp_path / f"{name}_text_document.{kind}").read_bytes() for kind in ("bin", "idx")))
    assert len(contents) == 1


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", ["00_good.jsonl", "46_zst.jsonl.zst"])
def test_standard_input(tmp_path, tokenizer_file, name, workers):
    common = ("--output-prefix", tmp_path / "out", "--tokenizer-model", tokenizer_file, "--seq-length", 64)
    content = open(DATA / "nasty" / name, "rb")
    done = preprocess_tool("--input", "-", *common, "--workers", workers, stdin=content)
    assert done.returncode == 0, done.stderr
    assert IndexedDataset(str(tmp_path / "out_text_document")).num_documents == 8


def test_bad_standard_input_is_named(tmp_path, tokenizer_file):
    common = ("--output-prefix", tmp_path / "out", "--tokenizer-model", tokenizer_file, "--seq-length", 64)
    done = preprocess_tool("--input", "-", *common, input="x\n")
    assert done.returncode == 2 and "standard input:1 (byte 0): not JSON" in done.stderr
    assert files_in(tmp_path) == []


@pytest.mark.parametrize("workers", [1, 2])
def test_skipped_documents_are_listed_in_order(tmp_path, tokenizer_file, workers):
    path, other = tmp_path / "in.jsonl", str(DATA / "nasty" / "06_not_an_object.jsonl")
    with open(path, "w") as file:
        for number in range(30_000):
            file.write("bad\n" if number % 1000 == 7 else json.dumps({"text": f"document {number} " * 9}) + "\n")
    again = shutil.copy(path, tmp_path / "again.jsonl")
    common = ("--output-prefix", tmp_path / "out", "--tokenizer-model", tokenizer_file, "--seq-length", 64)
    done = preprocess_tool("--input", path, other, again, *common, "--workers", workers, "--skip-bad-documents")
    assert done.returncode == 0, done.stderr
    listed = [json.loads(line) for line in open(tmp_path / "out.bad.jsonl")]
    content = path.read_bytes()
    assert [entry["line"] for entry in listed] == [*range(8, 30_000, 1000), 2, 3, 4, 5, *range(8, 30_000, 1000)]
    assert all(content[entry["byte"] :].startswith(b"bad\n") for entry in listed if entry["file"] != other)
    assert f"\n{2 * 30_000 - 60 + 2:,} documents (0 empty and 64 bad ones left out)" in done.stdout
    assert IndexedDataset(str(tmp_path / "out_text_document")).num_documents == 59_942


def test_without_bad_documents_an_older_list_goes(run_here, tmp_path):
    bad, good = (str(DATA / "nasty" / name) for name in ("04_missing_key.jsonl", "00_good.jsonl"))
    assert run_here("--input", bad, "--skip-bad-documents")[0] == 0
    assert "out.bad.jsonl" in files_in(tmp_path)
    assert run_here("--input", good, "--skip-bad-documents", "--overwrite")[0] == 0
    assert "out.bad.jsonl" not in files_in(tmp_path)


def test_other_files_in_a_folder_are_mentioned(run_here, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "a"}\n')
    (folder / "README.md").write_text("no data\n")
    status, _, err = run_here("--input", folder)
    assert (
        status == 0 and len(err.splitlines()) == 1 and "1 other file in the folders given" in err and "README.md" in err
    )


@pytest.mark.parametrize("workers", [1, 2])
def test_a_file_that_is_cut_off_leaves_nothing(tmp_path, tokenizer_file, workers):
    import gzip

    path = tmp_path / "in.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "a text"}\n' * 120_000)[:-9])
    common = ("--output-prefix", tmp_path / "out", "--tokenizer-model", tokenizer_file, "--seq-length", 64)
    done = preprocess_tool("--input", path, *common, "--workers", workers, "--skip-bad-documents")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"{path}: its gzip data ends at byte {path.stat().st_size}" in done.stderr.splitlines()[-1]
    assert files_in(tmp_path) == ["in.jsonl.gz"]


def test_the_module_and_the_tool_verify(run_here, tmp_path):
    assert run_here("--input", GOOD)[0] == 0
    verify = [sys.executable, "-m", "megatron_bfp", "verify"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    whole = subprocess.run([*verify, tmp_path / "out_text_document"], capture_output=True, text=True, env=environment)
    assert whole.returncode == 0 and "whole" in whole.stdout
    runs = next((tmp_path / "out_text_document.bfp").glob("*/runs.npy"))
    runs.write_bytes(runs.read_bytes()[:-1])
    for prefix in ("out_text_document", "none"):
        broken = subprocess.run([*verify, tmp_path / prefix], capture_output=True, text=True, env=environment)
        assert broken.returncode == 2 and len(broken.stderr.splitlines()) == 1
