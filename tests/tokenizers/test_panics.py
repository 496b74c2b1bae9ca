"""Panics of the Rust code of tokenizers, which are no Exceptions, are errors of a document or a tokenizer."""

import json

import numpy as np
import pytest
from helpers.datasets import DATA

tokenizers = pytest.importorskip("tokenizers")
tiktoken = pytest.importorskip("tiktoken")

from megatron_bfp import InputError, OptionError
from megatron_bfp.commands import preprocess as command
from megatron_bfp.indexed_dataset.reader import IndexedDataset
from megatron_bfp.preprocessing.executors.processes import run_in_processes
from megatron_bfp.tokenizers.fast import tokenizer as fast_tokenizer
from megatron_bfp.tokenizers.fast.tokenizer import FastTokenizer
from megatron_bfp.tokenizers.interface import TokenizingError, is_from_library
from megatron_bfp.tokenizers.registry import load_tokenizer
from megatron_bfp.tokenizers.tiktoken import TikTokenizer, TiktokenOptions


class PanicException(BaseException):
    """As pyo3's: not an Exception."""


def changed(tmp_path, **changes):
    """The tokenizer with other parts."""
    description = json.loads((DATA / "bos_tokenizer.json").read_text()) | changes
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(description))
    return str(path)


def panicking(tmp_path):
    """A tokenizer whose library panics at texts that begin with Q, where it puts something in front."""
    replaced = {"type": "Replace", "pattern": {"Regex": "(?=Q)"}, "content": "\xe9"}
    return changed(tmp_path, normalizer=replaced)


def test_the_library_panics(tmp_path):
    """What the other tests here begin with."""
    library = tokenizers.Tokenizer.from_file(panicking(tmp_path))
    with pytest.raises(BaseException, match="out of bounds") as caught:
        library.encode_batch_fast(["Q a"])
    assert not isinstance(caught.value, Exception)


def arguments(tmp_path, texts, *options):
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    files = ["--input", str(source), "--output-prefix", str(tmp_path / "out"), "--tokenizer-model", panicking(tmp_path)]
    return [*files, "--eod-token", "<eod>", "--append-eod", "--seq-length", "16", *options]


@pytest.mark.parametrize("workers", [1, 2])
def test_fault_B17_a_panic_is_an_error_of_its_document(tmp_path, workers):
    with pytest.raises(InputError, match=r"in.jsonl:2 \(byte .*\): the tokenizer's library cannot encode it: .*bounds"):
        command.main(arguments(tmp_path, ["the river", "Q a", "a"], "--workers", str(workers)))


def test_fault_B17_a_document_with_a_panic_can_be_skipped(tmp_path):
    command.main(arguments(tmp_path, ["the river", "Q a", "river"], "--skip-bad-documents"))
    (bad,) = map(json.loads, (tmp_path / "out.bad.jsonl").read_text().splitlines())
    assert bad["line"] == 2 and "out of bounds" in bad["reason"]
    written = IndexedDataset(str(tmp_path / "out_text_document"))
    assert written.num_documents == 2 and written.tokens(0, 6).tolist() == [1, 85, 73, 70, 322, 0]


def test_fault_B17_a_panic_while_loading_is_an_error_of_the_tokenizer(tmp_path):
    path = changed(tmp_path, normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"})
    with pytest.raises(OptionError, match="--tokenizer-model .*: not a Hugging Face tokenizer: Precompiled"):
        load_tokenizer("HuggingFaceTokenizer", path, "<eod>")
    path = changed(tmp_path, pre_tokenizer={"type": "FixedLength", "length": 0})
    with pytest.raises(OptionError, match="--tokenizer-model .*: not a Hugging Face tokenizer: chunk size must be"):
        load_tokenizer("HuggingFaceTokenizer", path, "<eod>")


class Library:
    """A tokenizer's library that raises."""

    def __init__(self, error):
        self.error = error

    def __getattr__(self, name):
        def call(*_, **__):
            raise self.error

        return call


@pytest.mark.parametrize("kind", ["huggingface", "sentencepiece", "tiktoken"])
def test_fault_B17_of_each_library(kind, tokenizer_file, sentencepiece_file, tiktoken_file):
    tokenizer = {
        "huggingface": lambda: load_tokenizer("HuggingFaceTokenizer", tokenizer_file, needs_eod=False),
        "sentencepiece": lambda: load_tokenizer("SentencePieceTokenizer", sentencepiece_file),
        "tiktoken": lambda: TikTokenizer(tiktoken_file, None, False, TiktokenOptions("gpt2")),
    }[kind]()
    for error in (PanicException("index\nout of bounds"), RuntimeError("index")):
        tokenizer._library = Library(error)
        with pytest.raises(TokenizingError, match="^index$"):
            tokenizer.encode_batch(["a text"])
    for error in (KeyboardInterrupt(), MemoryError()):
        tokenizer._library = Library(error)
        with pytest.raises(type(error)):
            tokenizer.encode_batch(["a text"])


def test_what_is_from_a_library():
    assert is_from_library(PanicException()) and is_from_library(ValueError())
    assert (
        not is_from_library(MemoryError())
        and not is_from_library(SystemExit())
        and not is_from_library(KeyboardInterrupt())
    )


def test_a_fast_tokenizer_that_cannot_be_made_again_leaves_the_work_to_the_reference(tokenizer_file, monkeypatch):
    reference = load_tokenizer("HuggingFaceTokenizer", tokenizer_file, needs_eod=False)
    backends = iter([Library(ValueError())])

    def load():
        for backend in backends:
            return backend
        raise PanicException("no memory for words")

    fast = FastTokenizer(reference, load)
    monkeypatch.setattr(fast_tokenizer, "FEWEST_CHARACTERS", 0)
    monkeypatch.setattr(fast_tokenizer, "MOST_CHARACTERS", -1)
    for _ in range(2):
        assert np.array_equal(fast.encode_batch(["a text"])[0], reference.encode_batch(["a text"])[0])


class Panicking:
    """The work on a task; task 1 panics."""

    def __init__(self, task):
        self.task = task

    def compute(self, report):
        if self.task == 1:
            raise PanicException("index\nout of bounds")

    def finish(self):
        return self.task


class PanickingLater(Panicking):
    def compute(self, report):
        pass

    def finish(self):
        super().compute(None)
        return self.task


class Strange(Exception):
    """Cannot be made again of what is pickled."""

    def __init__(self, one, two):
        super().__init__(f"strange {one}")


class RaisingStrange(Panicking):
    def compute(self, report):
        raise Strange(1, 2)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("make_work", [Panicking, PanickingLater])
def test_fault_B17_a_panic_elsewhere_names_its_task(workers, make_work, capfd):
    with pytest.raises(InputError, match="^1: PanicException: index$"):
        list(run_in_processes(make_work, range(3), workers, print))
    assert "trying again" not in capfd.readouterr().err


def test_an_error_that_cannot_travel_is_told(capfd):
    with pytest.raises(InputError, match="^0: Strange: strange 1$"):
        list(run_in_processes(RaisingStrange, range(1), 2, print))
    with pytest.raises(Strange):
        list(run_in_processes(RaisingStrange, range(1), 1, print))


def test_ray_tells_of_a_panic():
    from megatron_bfp.preprocessing.executors.ray import _do

    kind, error, _ = _do(Panicking, 1)
    assert kind == "raised" and isinstance(error, InputError) and str(error) == "1: PanicException: index"
