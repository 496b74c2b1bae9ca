"""Texts that are encoded in parts have the ids of the whole text."""

import random

import numpy as np
import pytest
from helpers.texts import code_files

pytest.importorskip("tokenizers")
pytest.importorskip("sentencepiece")

from megatron_bfp.tokenizers import long_texts
from megatron_bfp.tokenizers.fast.probes import PROBES
from megatron_bfp.tokenizers.registry import load_tokenizer

TEXT = "".join(code_files())
CHINESE = "".join(random.Random(0).choice("的一是不了在人有我他这中大来上\u3002\uff0c") for _ in range(30000))


@pytest.fixture(scope="session")
def cutting_tokenizers(tokenizer_file, sentencepiece_file, train_sentencepiece):
    import tokenizers

    def huggingface(name, path=tokenizer_file, **parts):
        library = tokenizers.Tokenizer.from_file(path)
        for part, value in parts.items():
            setattr(library, part, value)
        changed = f"{path}.{name}.json"
        library.save(changed)
        return load_tokenizer("HuggingFaceTokenizer", changed, needs_eod=False)

    split = tokenizers.pre_tokenizers
    return {
        "huggingface": huggingface("as it is"),
        "prefix": huggingface("prefix", pre_tokenizer=split.ByteLevel(add_prefix_space=True)),
        "no words": huggingface("no words", pre_tokenizer=split.ByteLevel(add_prefix_space=False, use_regex=False)),
        "sentencepiece": load_tokenizer("SentencePieceTokenizer", sentencepiece_file),
        "nmt_nfkc": load_tokenizer("SentencePieceTokenizer", train_sentencepiece()),
        "across words": load_tokenizer("SentencePieceTokenizer", train_sentencepiece(split_by_whitespace=False)),
    }


NAMES = ("huggingface", "prefix", "no words", "sentencepiece", "nmt_nfkc", "across words")


@pytest.fixture
def parts(monkeypatch):
    """The parts that texts are cut into, small ones."""
    monkeypatch.setattr(long_texts, "LONG", 1000)
    monkeypatch.setattr(long_texts, "PART", 700)
    encode_long, counts = long_texts._encode_long, []

    def counted(text, encode):
        counts.append(len(list(long_texts._parts(text, encode))))
        return encode_long(text, encode)

    monkeypatch.setattr(long_texts, "_encode_long", counted)
    return counts


@pytest.mark.case(4)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "text", [TEXT, "".join(PROBES), TEXT.replace("\n", "\r\n"), CHINESE], ids="code probes crlf zh".split()
)
def test_ids_are_those_of_the_whole_text(name, text, cutting_tokenizers, parts):
    tokenizer = cutting_tokenizers[name]
    short = ["a short one", ""]
    documents = tokenizer.encode_batch([short[0], text, short[1], text[5:]])
    expected = tokenizer._encode([short[0], text, short[1], text[5:]])
    assert [ids.tolist() for ids in documents] == [ids.tolist() for ids in expected]
    assert len(parts) == 2
    if text == TEXT:
        assert parts[0] > len(text) / 1500


def test_a_text_without_a_safe_place_stays_whole(cutting_tokenizers, parts):
    for text in ("a" * 5000, " " * 5000, "\n" * 5000):
        for name in NAMES:
            tokenizer = cutting_tokenizers[name]
            (ids,) = tokenizer.encode_batch([text])
            assert np.array_equal(ids, tokenizer._encode([text])[0])
    assert set(parts) == {1}


def test_a_tokenizer_without_a_safe_place_gets_texts_whole(tokenizer_file, tmp_path, parts):
    """This one puts in front of each text what is nowhere else."""
    import tokenizers

    library = tokenizers.Tokenizer.from_file(tokenizer_file)
    library.normalizer = tokenizers.normalizers.Prepend("\u2581")
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer("HuggingFaceTokenizer", str(tmp_path), needs_eod=False)
    (ids,) = tokenizer.encode_batch([TEXT[:10000]])
    assert np.array_equal(ids, tokenizer._encode([TEXT[:10000]])[0])
    assert parts == [1]


def test_unigram_models_get_texts_whole(train_sentencepiece, parts):
    tokenizer = load_tokenizer("SentencePieceTokenizer", train_sentencepiece(model_type="unigram"))
    assert len(tokenizer.encode_batch([TEXT])[0]) and not parts


def test_parts_of_their_true_size(cutting_tokenizers):
    text = TEXT * (2 * long_texts.LONG // len(TEXT) + 1)
    for name in ("huggingface", "sentencepiece"):
        tokenizer = cutting_tokenizers[name]
        assert 4 <= len(list(long_texts._parts(text, tokenizer._encode))) <= len(text) // long_texts.PART + 1
        assert np.array_equal(tokenizer.encode_batch([text])[0], tokenizer._encode([text])[0])
