"""OUT.card.md and OUT.card.json: they say what is in the files, whatever happened while those were written."""

import hashlib
import json
import subprocess
import threading

import numpy as np
import pytest
from helpers.tokenizer_fixtures import EOD

from megatron_bfp.preprocessing import card, write
from megatron_bfp.preprocessing.job import Job
from megatron_bfp.preprocessing.write import write_datasets
from megatron_bfp.tokenizers.registry import TokenizerOptions


@pytest.fixture
def job(tmp_path, tokenizer_file):
    texts = ["a b c " * number for number in range(40)]
    lines = [json.dumps({"text": text, "title": text[:9]}) for text in texts]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + '\n{"text": 1}\n')
    options = TokenizerOptions("HuggingFaceTokenizer", tokenizer_file, EOD, append_eod=True)
    paths = (str(tmp_path / "in.jsonl"),)
    return Job(paths, ("text", "title"), str(tmp_path / "out"), options, skip_bad_documents=True)


def test_the_card_says_what_the_files_hold(job, tmp_path):
    datasets = [written.dataset for written in write_datasets(job)]
    content = json.loads((tmp_path / "out.card.json").read_text())
    assert content["inputs"] == [{"path": job.paths[0], "bytes": (tmp_path / "in.jsonl").stat().st_size}]
    assert content["bad_documents_left_out"] == 1
    assert content["tokenizer"]["sha256"] == hashlib.sha256(open(job.tokenizer.path, "rb").read()).hexdigest()
    assert list(content["datasets"]) == ["text", "title"]
    for dataset, described in zip(datasets, content["datasets"].values(), strict=True):
        assert described["tokens"] == dataset.num_tokens == sum(r["tokens"] for r in described["lengths"]["histogram"])
        assert described["documents"] == 39 == sum(r["documents"] for r in described["lengths"]["histogram"])
        assert described["empty_documents_left_out"] == 1
        for file in described["files"]:
            written = (tmp_path / file["name"]).read_bytes()
            assert (file["bytes"], file["sha256"]) == (len(written), hashlib.sha256(written).hexdigest())


def test_its_hashes_can_be_checked_by_a_command(job, tmp_path):
    write_datasets(job)
    page = (tmp_path / "out.card.md").read_text()
    sums = "\n".join(block for number, block in enumerate(page.split("```\n")) if number % 2)
    check = ["sha256sum", "--check", "-"]
    subprocess.run(check, input=sums, cwd=tmp_path, text=True, check=True)
    (tmp_path / "out_text_document.bin").write_bytes(b"other tokens")
    assert subprocess.run(check, input=sums, cwd=tmp_path, text=True).returncode == 1


def test_lengths_are_counted_exactly(write_dataset, monkeypatch):
    """Also those that are not counted by their exact length, and more documents than are read at once."""
    monkeypatch.setattr(card, "SHORT", 64)
    monkeypatch.setattr(card, "LENGTHS_AT_ONCE", 7)
    lengths = np.random.default_rng(3).geometric(0.02, 500)
    lengths[:3] = 64, 128, 63
    dataset = write_dataset([np.zeros(length) for length in lengths])
    described = card._lengths(dataset, card.without_progress)
    nearest = np.sort(lengths)
    expected = [nearest[0], nearest[249], nearest[449], nearest[494], nearest[-1]]
    assert [described[name] for name in card.PERCENT] == expected
    assert described["mean"] == round(lengths.mean(), 1)
    for row in described["histogram"]:
        inside = lengths[(lengths > row["longest"] // 2) & (lengths <= row["longest"])]
        assert (row["documents"], row["tokens"]) == (len(inside), inside.sum())
    assert sum(row["documents"] for row in described["histogram"]) == 500


@pytest.mark.parametrize("step", ["_name_datasets", "_write_card", "write_summary"])
def test_a_job_that_ends_early_writes_the_same_card(job, tmp_path, monkeypatch, step):
    write_datasets(job)
    pages = [(tmp_path / f"out.card.{ending}").read_bytes() for ending in ("md", "json")]
    for path in tmp_path.glob("out*"):
        path.unlink()

    class Interrupted(Exception):
        pass

    def interrupt(*_):
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(write if step == "write_summary" else write._Steps, step, interrupt)
        with pytest.raises(Interrupted):
            write_datasets(job)
    write_datasets(job)
    assert [(tmp_path / f"out.card.{ending}").read_bytes() for ending in ("md", "json")] == pages


def test_a_file_may_get_another_name_before_it_is_read(tmp_path, monkeypatch):
    path = tmp_path / "joined.bin"
    path.write_bytes(b"tokens")
    wait = threading.Event()
    read = card.FileHash._read
    monkeypatch.setattr(card.FileHash, "_read", lambda self: (wait.wait(10), read(self)))
    digest = card.FileHash(str(path))
    path.rename(tmp_path / "out.bin")
    wait.set()
    assert digest.hexdigest() == hashlib.sha256(b"tokens").hexdigest()


def test_without_a_card_no_file_is_hashed(job, tmp_path, monkeypatch):
    monkeypatch.setattr(card.FileHash, "__init__", lambda *_: pytest.fail("a file is hashed"))
    write_datasets(Job(**{**vars(job), "card": False}))
    assert not list(tmp_path.glob("*.card.*"))


def test_a_part_without_documents_has_a_card_too(job, tmp_path):
    write_datasets(Job(**{**vars(job), "part": (7, 8)}))
    page = (tmp_path / "out-00007-of-00008.card.md").read_text()
    assert "This is part 7 (from 0) of 8." in page and "0 documents" in page and "Tokens per document" not in page
