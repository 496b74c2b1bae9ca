"""A tokenizer that is not there, or is of another type, is named with what helps."""

import json
import shutil

import pytest
from helpers.datasets import DATA

pytest.importorskip("tokenizers")
pytest.importorskip("sentencepiece")
pytest.importorskip("tiktoken")

from megatron_bfp import OptionError
from megatron_bfp.tokenizers.files import type_of
from megatron_bfp.tokenizers.registry import TOKENIZER_TYPES, load_tokenizer


@pytest.fixture
def files(tokenizer_file, sentencepiece_file, tiktoken_file, megatron_tiktoken_file):
    """Files, each with the type that reads it."""
    return {
        tokenizer_file: "HuggingFaceTokenizer",
        str(DATA / "bos_tokenizer.json"): "HuggingFaceTokenizer",
        sentencepiece_file: "SentencePieceTokenizer",
        tiktoken_file: "TikTokenizer",
        megatron_tiktoken_file: "TikTokenizer",
    }


def test_fault_C10_a_file_of_another_type_is_named_with_its_type(files, train_sentencepiece):
    files[train_sentencepiece(model_type="unigram", byte_fallback=False)] = "SentencePieceTokenizer"
    for path, right in files.items():
        assert type_of(open(path, "rb").read()) == right
        for tokenizer_type in set(TOKENIZER_TYPES) - {"GPT2BPETokenizer"}:  # which has two files
            if tokenizer_type != right:
                with pytest.raises(
                    OptionError, match=f"--tokenizer-model {path}: not a .*give --tokenizer-type {right}$"
                ):
                    load_tokenizer(tokenizer_type, path, needs_eod=False)


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"{}", b"[]", b"[1]", b'{"model": 3}', b'{"a": 1}', b"\xff\xfe", b"a b\n"]
)
def test_other_files_are_of_no_type(content):
    assert type_of(content) is None


def test_a_type_is_not_told_to_use_itself(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "None", "vocab": {}}}')
    with pytest.raises(OptionError, match="not a Hugging Face tokenizer: (?!.*--tokenizer-type)"):
        load_tokenizer("HuggingFaceTokenizer", str(tmp_path / "tokenizer.json"))


@pytest.mark.parametrize("tokenizer_type", ["HuggingFaceTokenizer", "SentencePieceTokenizer", "TikTokenizer"])
def test_fault_C10_a_name_of_the_hub_is_met_with_the_command_that_downloads_it(tokenizer_type, tmp_path, monkeypatch):
    """Of a Hugging Face tokenizer, if the Hub's library cannot get it: tests have no network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name, folder in (("gpt2", "gpt2"), ("meta-llama/Llama-3.1-8B", "Llama-3.1-8B")):
        with pytest.raises(OptionError) as caught:
            load_tokenizer(tokenizer_type, name)
        looked_up = (
            ", and not available on the Hugging Face Hub: " if tokenizer_type == "HuggingFaceTokenizer" else ". "
        )
        assert str(caught.value).startswith(f"--tokenizer-model {name}: No such file or folder{looked_up}")
        assert str(caught.value).endswith(
            ". If it is a name of the Hugging Face Hub, download it and give its tokenizer: "
            f"hf download {name} --include 'tokenizer*' --local-dir {folder}"
        )
        assert "\n" not in str(caught.value)
    for path in ("tokenizer.json", "a/tokenizer.model", str(tmp_path / "gpt2"), "../gpt2", "./gpt2", "a/b/c", "it's"):
        with pytest.raises(OptionError, match=r"No such file or folder$"):
            load_tokenizer(tokenizer_type, path)


def test_fault_C10_a_folder_without_a_tokenizer_says_what_it_has(tmp_path, sentencepiece_file):
    folder = tmp_path / "it's a model"
    folder.mkdir()
    with pytest.raises(OptionError, match="the folder holds no tokenizer.json$"):
        load_tokenizer("HuggingFaceTokenizer", str(folder))
    for name in ("vocab.json", "merges.txt"):
        (folder / name).write_text("")
    with pytest.raises(OptionError, match="; --tokenizer-type GPT2BPETokenizer --vocab-file ") as caught:
        load_tokenizer("HuggingFaceTokenizer", str(folder))
    import shlex

    options = shlex.split(str(caught.value).partition("; ")[2].partition(" reads its")[0])
    assert options[2:] == ["--vocab-file", str(folder / "vocab.json"), "--merge-file", str(folder / "merges.txt")]
    shutil.copy(sentencepiece_file, folder / "tokenizer.model")
    with pytest.raises(OptionError, match="SentencePieceTokenizer reads its .*/tokenizer.model$"):
        load_tokenizer("HuggingFaceTokenizer", str(folder))
    with pytest.raises(OptionError, match="is a folder; give the tokenizer's file, .*/tokenizer.model$"):
        load_tokenizer("SentencePieceTokenizer", str(folder))
    (folder / "tokenizer.model").rename(folder / "other.txt")
    with pytest.raises(OptionError, match="is a folder; give the tokenizer's file$"):
        load_tokenizer("TikTokenizer", str(folder))


def test_a_vocabulary_alone_is_no_tokenizer(tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1}))
    with pytest.raises(OptionError, match="vocab.json: not a Hugging Face tokenizer: "):
        load_tokenizer("HuggingFaceTokenizer", str(tmp_path / "vocab.json"))


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt"])
def test_one_of_two_files_makes_no_tokenizer(tmp_path, name):
    (tmp_path / name).write_text("")
    with pytest.raises(OptionError, match="the folder holds no tokenizer.json$"):
        load_tokenizer("HuggingFaceTokenizer", str(tmp_path))
