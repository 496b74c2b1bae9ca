"""A byte-level BPE tokenizer, trained in a moment on this repository's text."""

import json

import pytest
from conftest import ROOT

tokenizers = pytest.importorskip("tokenizers")

EOD = "<|endoftext|>"


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
    tokenizer.train([str(path) for path in sorted((ROOT / "megatron_bfp").glob("*.py"))], trainer)
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
