"""The id of a token that is named by its text, as the sentinels of fill-in-the-middle are."""

from helpers.tokenizer_fixtures import EOD

from megatron_bfp.tokenizers.fast.tokenizer import FastTokenizer
from megatron_bfp.tokenizers.registry import load_tokenizer


def test_a_hugging_face_token_is_found_whether_special_or_not(tokenizer_file):
    tokenizer = load_tokenizer("HuggingFaceTokenizer", tokenizer_file, EOD)
    assert (tokenizer.token_id(EOD), tokenizer.token_id("<|pad|>")) == (0, 1)
    number = tokenizer.token_id("self")
    assert number is not None and tokenizer.decode([number]) == "self"
    assert tokenizer.token_id("<fim_prefix>") is None


def test_a_piece_of_sentencepiece_is_found(train_sentencepiece):
    path = train_sentencepiece(user_defined_symbols=["<PRE>", "<MID>"])
    tokenizer = load_tokenizer("SentencePieceTokenizer", path, "</s>")
    for text in ("<PRE>", "<MID>"):
        assert tokenizer.pieces([tokenizer.token_id(text)]) == [text.encode()]
    assert tokenizer.token_id("<SUF>") is None


def test_a_token_of_tiktoken_is_found(megatron_tiktoken_file):
    tokenizer = load_tokenizer("TikTokenizer", megatron_tiktoken_file, "</s>")
    number = tokenizer.token_id("</s>")
    assert number == tokenizer.eod and tokenizer.pieces([number]) == [b"</s>"]
    assert tokenizer.decode([tokenizer.token_id("a")]) == "a" and tokenizer.token_id("<fim_prefix>") is None


def test_the_fast_tokenizer_asks_its_reference(tokenizer_file):
    class Reference:
        def token_id(self, text):
            return {"<fim_prefix>": 5}.get(text)

    fast = FastTokenizer.__new__(FastTokenizer)
    fast._reference = Reference()
    assert fast.token_id("<fim_prefix>") == 5 and fast.token_id("x") is None
