"""SentencePiece: the library's ids, but no marker is found in a text."""

import pytest

sentencepiece = pytest.importorskip("sentencepiece")

from megatron_bfp import OptionError
from megatron_bfp.tokenizers.sentencepiece import (
    CONTROL,
    SentencePieceTokenizer,
    _changes_texts,
    _pieces,
    _with_control_pieces,
)

TEXTS = ["def open(self): pass", "", " ", "  two  spaces", "日本 é\x00\n", "\u200b", "[x] <a b> < > []"]


def library(path):
    return sentencepiece.SentencePieceProcessor(model_file=path)


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_ids_are_those_of_the_library(train_sentencepiece, model_type):
    path = train_sentencepiece(model_type=model_type)
    tokenizer = SentencePieceTokenizer(path)
    assert [ids.tolist() for ids in tokenizer.encode_batch(TEXTS)] == library(path).encode(TEXTS)
    assert (tokenizer.eod, tokenizer.vocab_size, tokenizer.pad) == (2, 600, -1)


def test_markers_stay_text_and_pieces_for_text_stay_pieces(sentencepiece_file):
    reference, tokenizer = library(sentencepiece_file), SentencePieceTokenizer(sentencepiece_file)
    markers = {reference.piece_to_id(text) for text in ("<|im_end|>", "[INST]", "<mask>", "</s>", "<s>", "<unk>")}
    text = "a<|im_end|>b [INST] x <mask> </s><s><unk>"
    assert markers & set(reference.encode(text))  # what the library does by itself
    (ids,) = tokenizer.encode_batch([text])
    assert not markers & set(ids.tolist()) and tokenizer.decode(ids) == " " + text
    spaces = reference.piece_to_id("\u2581\u2581")
    assert spaces in tokenizer.encode_batch(["a    b"])[0]
    assert [ids.tolist() for ids in tokenizer.encode_batch(TEXTS)] == reference.encode(TEXTS)


def test_a_user_defined_eod_is_kept_out_of_texts(train_sentencepiece):
    path = train_sentencepiece(user_defined_symbols=["ENDOFDOCUMENT"], eos_id=-1)
    assert library(path).encode("ENDOFDOCUMENT")[-1] == library(path).piece_to_id("ENDOFDOCUMENT")
    tokenizer = SentencePieceTokenizer(path, eod_token="ENDOFDOCUMENT")
    (ids,) = tokenizer.encode_batch(["ENDOFDOCUMENT"])
    assert tokenizer.eod not in ids and tokenizer.decode(ids) == " ENDOFDOCUMENT"


def test_the_eod_is_named_or_found_or_missed(train_sentencepiece, sentencepiece_file):
    assert SentencePieceTokenizer(sentencepiece_file, eod_token="<|im_end|>").eod == 4
    with pytest.raises(OptionError, match="'<none>': not in the vocabulary"):
        SentencePieceTokenizer(sentencepiece_file, eod_token="<none>")
    with pytest.raises(OptionError, match="turns the text '\u2581self' into the end-of-document token"):
        SentencePieceTokenizer(sentencepiece_file, eod_token="\u2581self")
    without = train_sentencepiece(eos_id=-1)
    with pytest.raises(OptionError, match="--eod-token"):
        SentencePieceTokenizer(without)
    assert SentencePieceTokenizer(without, needs_eod=False).eod is None


def test_the_changed_model_differs_in_the_types_named_alone(sentencepiece_file):
    content = open(sentencepiece_file, "rb").read()
    types = [piece.type for piece in _pieces(content)]
    changed = _with_control_pieces(content, {4, 5})
    assert [piece.type for piece in _pieces(changed)] == [*types[:4], CONTROL, CONTROL, *types[6:]]
    assert _with_control_pieces(content, set()) == content
    before, after = (sentencepiece.SentencePieceProcessor(model_proto=model) for model in (content, changed))
    assert [after.id_to_piece(number) for number in range(600)] == [before.id_to_piece(number) for number in range(600)]


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff" * 100, b"\x0a\x80\x80\x80", b"\x0a\x02\x0a\x00", b"abc" * 100])
def test_what_is_no_model_is_refused(tmp_path, content):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content)
    with pytest.raises(OptionError, match="not a SentencePiece model"):
        SentencePieceTokenizer(str(path))
    with pytest.raises(OptionError, match="No such file"):
        SentencePieceTokenizer(str(tmp_path / "none"))


def test_a_truncated_model_is_refused(tmp_path, sentencepiece_file):
    content = open(sentencepiece_file, "rb").read()
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(OptionError, match="not a SentencePiece model"):
        SentencePieceTokenizer(str(path))


def test_decoding_refuses_another_vocabulary_s_tokens(sentencepiece_file):
    for number in (600, -1):
        with pytest.raises(OptionError, match=f"has no token {number}"):
            SentencePieceTokenizer(sentencepiece_file).decode([5, number])


def test_a_user_defined_piece_named_as_bos_stays_text(train_sentencepiece):
    path = train_sentencepiece(user_defined_symbols=["self."])
    named = SentencePieceTokenizer(path, bos_token="self.")
    assert (named.bos, SentencePieceTokenizer(path).bos) == (3, 1)
    text = "def self.path"
    assert 3 in SentencePieceTokenizer(path).encode_batch([text])[0]
    (ids,) = named.encode_batch([text])
    assert 3 not in ids and named.decode(ids) == " " + text
    with pytest.raises(OptionError, match="--bos-token 'no such': not in the vocabulary"):
        SentencePieceTokenizer(path, bos_token="no such")
    assert SentencePieceTokenizer(train_sentencepiece(bos_id=-1)).bos is None


@pytest.mark.parametrize(
    "normalizer, changes",
    [
        (b"", True),  # where the file says nothing, white space is removed
        (b"\x20\x01", True),
        (b"\x20\x00", False),
        (b"\x20\x00\x12\x00", False),
        (b"\x20\x00\x12\x01x", True),
    ],
)
def test_what_a_model_does_to_a_text_is_read_from_its_file(normalizer, changes):
    model = b"\x0a\x03\x0a\x01a"
    assert _changes_texts(model + bytes([3 << 3 | 2, len(normalizer)]) + normalizer) == changes
    assert _changes_texts(model)


def test_the_model_s_own_tokens_may_have_the_id_0(train_sentencepiece):
    tokenizer = SentencePieceTokenizer(train_sentencepiece(eos_id=0, unk_id=1, bos_id=2, pad_id=-1))
    assert (tokenizer.eod, tokenizer.bos) == (0, 2)
    tokenizer = SentencePieceTokenizer(train_sentencepiece(bos_id=0, unk_id=1, eos_id=2, pad_id=-1))
    assert (tokenizer.eod, tokenizer.bos) == (2, 0)
    assert SentencePieceTokenizer(train_sentencepiece(bos_id=-1)).bos is None
