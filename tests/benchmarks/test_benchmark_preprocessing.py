"""The benchmark of preprocessing runs without Megatron-LM, and its corpus is what it says."""

import json
import subprocess
import sys

import pytest
from helpers.datasets import ROOT
from helpers.tokenizer_fixtures import EOD

from benchmarks.corpus import copy_tokenizer, first_documents, make_corpus
from megatron_bfp import InputError
from megatron_bfp.errors import OptionError


def run_benchmark(*arguments):
    command = [sys.executable, str(ROOT / "benchmarks/preprocessing.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_table_and_the_json_tell_the_same(tokenizer_folder, tmp_path):
    model = tokenizer_folder({"eos_token": EOD})
    arguments = ["--input", tmp_path / "corpus.jsonl", "--tokenizer-model", model, "--workers", 1, "--repeats", 1]
    arguments += ["--make-corpus", ROOT / "megatron_bfp", "--megabytes", 0.1, "--output", tmp_path / "out.json"]
    done = run_benchmark(*arguments, "--work-folder", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--megatron-lm was not given" in done.stdout
    ours, *others = json.loads((tmp_path / "out.json").read_text())["contenders"]
    texts = [json.loads(line)["text"] for line in (tmp_path / "corpus.jsonl").open()]
    assert (ours["contender"], ours["documents"]) == ("ours", len(texts))
    assert ours["text_bytes"] == sum(len(text.encode()) for text in texts) >= 100_000
    assert f"{ours['seconds'][0]:.2f}" in done.stdout
    assert ours["largest_process_bytes"] > 10_000_000
    for gigatoken in others:  # where it is installed: all tokens but the ends of documents
        assert gigatoken["tokens"] == ours["tokens"] - len(texts)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "model", "out.json"]


def test_a_corpus_has_each_text_once_and_no_special_token(tmp_path):
    files = {"a.py": "alpha", "b.txt": "beta\r\n\u2028", "again.md": "alpha", "c.md": f"has {EOD}", "d.rst": " \n"}
    (tmp_path / "texts").mkdir()
    for name, text in files.items():
        (tmp_path / "texts" / name).write_bytes(text.encode())
    (tmp_path / "texts" / "binary.py").write_bytes(b"\xff\xfe")
    (tmp_path / "texts" / "other.bin").write_bytes(b"gamma")
    corpus = tmp_path / "corpus.jsonl"
    make_corpus(str(corpus), [str(tmp_path / "texts")], 12, [EOD])
    texts = [json.loads(line)["text"] for line in corpus.open(encoding="utf-8", newline="\n")]
    assert sorted(texts) == ["alpha", "beta\r\n\u2028"]
    with pytest.raises(OptionError, match="exists"):
        make_corpus(str(corpus), [str(tmp_path / "texts")], 12, [EOD])
    with pytest.raises(InputError, match="0.0 MB of text are there"):
        make_corpus(str(tmp_path / "more.jsonl"), [str(tmp_path / "texts")], 1000, [EOD])
    assert not list(tmp_path.glob("more*"))


def test_a_share_is_whole_documents_from_the_start(tmp_path):
    for name, texts in {"a": ["1234", "\u00e9" * 4], "b": ["12", "1"]}.items():
        (tmp_path / name).write_text("\n".join(json.dumps({"text": text}) for text in texts))
    inputs = [str(tmp_path / "a"), str(tmp_path / "b")]
    for text_bytes, documents, copied in [(0, 1, 4), (4, 1, 4), (5, 2, 12), (13, 3, 14), (float("inf"), 4, 15)]:
        share = first_documents(inputs, str(tmp_path / "share"), text_bytes)
        assert (share.documents, share.text_bytes) == (documents, copied)
        assert len((tmp_path / "share").read_text().splitlines()) == documents


def test_the_copied_tokenizer_puts_no_token_before_a_text(tokenizer_folder, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizer_folder({"eos_token": EOD})
    tokenizer = tokenizers.Tokenizer.from_file(f"{model}/tokenizer.json")
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(f"{EOD} $A", special_tokens=[(EOD, 0)])
    tokenizer.save(f"{model}/tokenizer.json")
    assert EOD in copy_tokenizer(model, str(tmp_path / "copy"))
    copy = tokenizers.Tokenizer.from_file(str(tmp_path / "copy/tokenizer.json"))
    assert tokenizer.encode("text").ids == [0, *copy.encode("text").ids]
    assert (tmp_path / "copy/tokenizer_config.json").exists()


def test_bad_options_are_one_line(tokenizer_folder, tmp_path):
    model = tokenizer_folder({"eos_token": EOD})
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"words": 1}\n')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "good.jsonl").write_text('{"text": "fine"}\n')
    for name, match in [("bad", "line 2 is not"), ("empty", "no documents"), ("missing", "cannot be read")]:
        done = run_benchmark("--input", tmp_path / f"{name}.jsonl", "--tokenizer-model", model)
        assert done.returncode == 2 and match in done.stderr and len(done.stderr.splitlines()) == 1
    good = ["--input", tmp_path / "good.jsonl"]
    for arguments, match in [
        (["--tokenizer-model", tmp_path], "tokenizer.json"),
        (["--tokenizer-model", model, "--megabytes", "0"], "above 0"),
        (["--tokenizer-model", model, "--megatron-lm", tmp_path], "a checkout of Megatron-LM"),
    ]:
        done = run_benchmark(*good, *arguments)
        assert done.returncode == 2 and match in done.stderr.splitlines()[-1], done.stderr
