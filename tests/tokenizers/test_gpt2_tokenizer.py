"""GPT2BPETokenizer from vocab.json and merges.txt, and Megatron's other names for tokenizers."""

import importlib.util
import json
import os
from pathlib import Path

import numpy as np
import pytest
from helpers.tokenizer_fixtures import EOD
from helpers.tokenizer_zoo import TEXTS

pytest.importorskip("tokenizers")

from megatron_bfp import OptionError
from megatron_bfp.commands import preprocess as command
from megatron_bfp.indexed_dataset.reader import IndexedDataset
from megatron_bfp.tokenizers.fast.tokenizer import load_fast_tokenizer
from megatron_bfp.tokenizers.registry import OTHER_NAMES, REFUSED, load_tokenizer

END = "<|endoftext|>"


@pytest.fixture(scope="module")
def gpt2_files(tmp_path_factory):
    """A vocabulary and merges, trained on a few texts, as GPT-2's are written."""
    from tokenizers import ByteLevelBPETokenizer

    folder = tmp_path_factory.mktemp("gpt2")
    library = ByteLevelBPETokenizer()
    library.train_from_iterator(TEXTS, vocab_size=500, special_tokens=[END], show_progress=False)
    library.save_model(str(folder))
    return str(folder / "vocab.json"), str(folder / "merges.txt")


def test_ids_are_those_of_the_library(gpt2_files):
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = load_tokenizer("GPT2BPETokenizer", gpt2_files[0], merge_file=gpt2_files[1])
    library = ByteLevelBPETokenizer(*gpt2_files)
    ours = tokenizer.encode_batch(TEXTS)
    assert [ids.tolist() for ids in ours] == [library.encode(text).ids for text in TEXTS]
    fast = load_fast_tokenizer(tokenizer).encode_batch(TEXTS)
    assert all(map(np.array_equal, ours, fast))
    assert tokenizer.eod == json.load(open(gpt2_files[0]))[END] and tokenizer.bos is None
    assert tokenizer.eod not in tokenizer.encode_batch([f"a{END}b"])[0]
    for text, ids in zip(TEXTS, ours, strict=True):
        assert tokenizer.decode(ids) == text


@pytest.mark.integration
def test_ids_are_those_of_megatron_deepspeed_s_own(gpt2_files):
    checkout = os.environ.get("MEGATRON_DEEPSPEED_PATH")
    if not checkout:
        pytest.skip("MEGATRON_DEEPSPEED_PATH does not name a checkout")
    path = Path(checkout) / "megatron" / "tokenizer" / "gpt2_tokenization.py"
    spec = importlib.util.spec_from_file_location("gpt2_tokenization", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    theirs = module.GPT2Tokenizer(*gpt2_files, errors="replace", special_tokens=[], max_len=None)
    tokenizer = load_tokenizer("GPT2BPETokenizer", gpt2_files[0], merge_file=gpt2_files[1])
    assert [ids.tolist() for ids in tokenizer.encode_batch(TEXTS)] == [theirs.encode(text) for text in TEXTS]
    assert tokenizer.eod == theirs.encoder[END]


@pytest.fixture
def call(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))

    def call(*options, output="out"):
        given = ["--input", str(tmp_path / "a.jsonl"), "--seq-length", "64", "--append-eod"]
        command.main([*given, "--output-prefix", str(tmp_path / output), *options])
        return capsys.readouterr().err, (tmp_path / f"{output}_text_document.bin").read_bytes()

    return call


def test_the_command_takes_both_files(call, gpt2_files, tmp_path):
    files = ["--vocab-file", gpt2_files[0], "--merge-file", gpt2_files[1]]
    err, _ = call("--tokenizer-type", "GPT2BPETokenizer", *files)
    assert "warning" not in err
    eod = json.load(open(gpt2_files[0]))[END]
    dataset = IndexedDataset(str(tmp_path / "out_text_document"))
    assert dataset.tokens(0, dataset.num_tokens)[-1] == eod
    with pytest.raises(OptionError, match="--tokenizer-type GPT2BPETokenizer: needs --vocab-file and --merge-file"):
        call("--tokenizer-type", "GPT2BPETokenizer", *files[:2], output="other")
    _, of_files = call("--tokenizer-type", "GPT2BPETokenizer", *files, output="files")
    folder = ["--tokenizer-model", os.path.dirname(gpt2_files[0])]
    assert call("--tokenizer-type", "GPT2BPETokenizer", *folder, output="folder")[1] == of_files
    with pytest.raises(OptionError, match="--tokenizer-model is needed with --input"):
        call(*files, output="other")
    for index, option in ((1, "--vocab-file"), (3, "--merge-file")):
        wrong = [*files]
        wrong[index] = str(tmp_path / "a.jsonl")
        with pytest.raises(OptionError, match=f"{option} .*a.jsonl: "):
            call("--tokenizer-type", "GPT2BPETokenizer", *wrong, output="other")


def test_other_names_give_the_same_tokens_and_say_so(call, sentencepiece_file, tokenizer_file):
    models = {
        "SentencePieceTokenizer": [sentencepiece_file],
        "HuggingFaceTokenizer": [tokenizer_file, "--eod-token", EOD],
    }
    for name, same in OTHER_NAMES.items():
        model = ["--tokenizer-model", *models[same]]
        _, wanted = call("--tokenizer-type", same, *model, "--overwrite", output="same")
        err, tokens = call("--tokenizer-type", name, *model, "--overwrite")
        assert tokens == wanted
        assert f"warning: --tokenizer-type {name} is {same} here: its ids are the same" in err


@pytest.mark.parametrize("name", REFUSED)
def test_types_that_cannot_be_used_are_refused_by_name(call, name):
    with pytest.raises(OptionError, match=f"^--tokenizer-type {name}: "):
        call("--tokenizer-type", name, "--tokenizer-model", "x")
