"""Tokenizers of each library, trained in a moment on made-up text."""

import base64
import io
import json
import os

import pytest

from helpers.texts import code_files

tokenizers = pytest.importorskip("tokenizers")

EOD = "<|endoftext|>"
LIBRARIES = ("HuggingFaceTokenizer", "SentencePieceTokenizer", "TikTokenizer")


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=[EOD, "<|pad|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(code_files(), trainer)
    tokenizer.save(str(path))
    return str(path)


@pytest.fixture
def tokenizer_folder(tokenizer_file, tmp_path):
    """A folder whose configuration names the EOD, as model repositories have it."""

    def make(config):
        folder = tmp_path / "model"
        folder.mkdir()
        (folder / "tokenizer.json").write_bytes(open(tokenizer_file, "rb").read())
        if config is not None:
            (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return str(folder)

    return make


@pytest.fixture(scope="session")
def train_sentencepiece(tmp_path_factory):
    """Trains a model; its options are the library's."""
    sentencepiece = pytest.importorskip("sentencepiece")

    def train(**options):
        path = tmp_path_factory.mktemp("sentencepiece") / "tokenizer.model"
        lines = [line for text in code_files() for line in text.splitlines()]
        model = io.BytesIO()
        defaults = {"vocab_size": 600, "model_type": "bpe", "byte_fallback": True, "character_coverage": 0.99}
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=model, minloglevel=2, **(defaults | options)
        )
        path.write_bytes(model.getvalue())
        return str(path)

    return train


@pytest.fixture(scope="session")
def sentencepiece_file(train_sentencepiece):
    """As Mistral's and Gemma's models: bytes for what is no piece, and user-defined pieces of both kinds."""
    return train_sentencepiece(
        user_defined_symbols=["<|im_end|>", "[INST]", "\u2581\u2581"],
        control_symbols=["<mask>"],
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
    )


@pytest.fixture(scope="session")
def tiktoken_ranks(tokenizer_file):
    """dict of bytes: the vocabulary of ``tokenizer_file`` without its special tokens."""
    from megatron_bfp.tokenizers.huggingface import HuggingFaceTokenizer

    tokenizer = HuggingFaceTokenizer(tokenizer_file, needs_eod=False)
    return {piece: rank for rank, piece in enumerate(tokenizer.pieces(range(2, tokenizer.vocab_size)))}


@pytest.fixture(scope="session")
def tiktoken_file(tiktoken_ranks, tmp_path_factory):
    """In tiktoken's own form."""
    pytest.importorskip("tiktoken")
    path = tmp_path_factory.mktemp("tiktoken") / "small.tiktoken"
    path.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in tiktoken_ranks.items()))
    return str(path)


@pytest.fixture(scope="session")
def megatron_tiktoken_file(tiktoken_ranks, tmp_path_factory):
    """In Megatron's form."""
    pytest.importorskip("tiktoken")
    path = tmp_path_factory.mktemp("tiktoken") / "small.vocab.json"
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode("utf-8", "replace")}
        for token, rank in tiktoken_ranks.items()
    ]
    path.write_text(json.dumps(entries))
    return str(path)


@pytest.fixture
def tokenizer_arguments(tokenizer_file, sentencepiece_file, tiktoken_file):
    """For each library, the command line's options for its tokenizer."""
    models = {
        "HuggingFaceTokenizer": (tokenizer_file, "--eod-token", EOD),
        "SentencePieceTokenizer": (sentencepiece_file,),
        "TikTokenizer": (tiktoken_file, "--tiktoken-pattern", "gpt2", "--tiktoken-special-tokens", EOD, "<|pad|>"),
    }
    return {name: ("--tokenizer-type", name, "--tokenizer-model", *options) for name, options in models.items()}


@pytest.fixture
def no_fast_library(tmp_path_factory):
    """An environment in which gigatoken is not installed."""
    folder = tmp_path_factory.mktemp("no_fast_library")
    (folder / "gigatoken.py").write_text("raise ImportError\n")
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}
