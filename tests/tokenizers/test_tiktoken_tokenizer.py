"""tiktoken: the library's ids from either form of its file, with no special token found in a text."""

import base64
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

tiktoken = pytest.importorskip("tiktoken")

from helpers.tokenizer_fixtures import EOD

from megatron_bfp import OptionError
from megatron_bfp.tokenizers.huggingface import HuggingFaceTokenizer
from megatron_bfp.tokenizers.tiktoken import PATTERNS, SPECIAL_TOKENS, TikTokenizer, TiktokenOptions

GPT2 = TiktokenOptions("gpt2", special_tokens=(EOD, "<|pad|>"))
TEXTS = [
    "def open(self): pass",
    "",
    "  two  spaces \n\n",
    "日本 é\x00\n",
    "\u200b 12345 it's IT'S",
    f"a{EOD}b</s><|pad|>",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_ids_are_those_of_the_library(tiktoken_file, tiktoken_ranks, pattern):
    reference = tiktoken.Encoding(
        "reference", pat_str=PATTERNS[pattern], mergeable_ranks=tiktoken_ranks, special_tokens={}
    )
    tokenizer = TikTokenizer(tiktoken_file, options=TiktokenOptions(pattern), needs_eod=False)
    assert [ids.tolist() for ids in tokenizer.encode_batch(TEXTS)] == [
        reference.encode_ordinary(text) for text in TEXTS
    ]
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch(TEXTS)] == TEXTS


def test_the_gpt2_pattern_gives_what_the_tokenizers_library_gives(tiktoken_file, tokenizer_file):
    reference = HuggingFaceTokenizer(tokenizer_file, EOD)
    documents = TikTokenizer(tiktoken_file, options=GPT2).encode_batch(TEXTS)
    assert [ids.tolist() for ids in documents] == [(ids - 2).tolist() for ids in reference.encode_batch(TEXTS)]


def test_megatron_s_form_has_its_special_tokens_first(megatron_tiktoken_file, tiktoken_file):
    plain = TikTokenizer(tiktoken_file, options=TiktokenOptions("v2"), needs_eod=False)
    tokenizer = TikTokenizer(megatron_tiktoken_file)
    assert (tokenizer.eod, tokenizer.vocab_size, tokenizer.pad) == (2, 1598, -1)
    for shifted, ids in zip(tokenizer.encode_batch(TEXTS), plain.encode_batch(TEXTS), strict=True):
        assert shifted.tolist() == (ids + 1000).tolist()
    assert tokenizer.pieces([0, 2, 7, 999]) == [b"<unk>", b"</s>", b"<SPECIAL_7>", b"<SPECIAL_999>"]


def test_megatron_s_options_are_kept(megatron_tiktoken_file):
    options = TiktokenOptions("v1", num_special_tokens=10, special_tokens=("<end>", "<s>"), vocab_size=300)
    tokenizer = TikTokenizer(megatron_tiktoken_file, "<end>", options=options)
    assert (tokenizer.eod, tokenizer.vocab_size) == (0, 300)
    assert tokenizer.decode(tokenizer.encode_batch(["def open"])[0]) == "def open"


@pytest.mark.parametrize(
    "options",
    [
        TiktokenOptions(vocab_size=2000),
        TiktokenOptions(vocab_size=1100),
        TiktokenOptions(num_special_tokens=3),
        TiktokenOptions(special_tokens=("a", "a")),
    ],
)
def test_options_that_do_not_fit_megatron_s_form_are_refused(megatron_tiktoken_file, options):
    with pytest.raises(OptionError, match="--vocab-size|--tiktoken-special-tokens"):
        TikTokenizer(megatron_tiktoken_file, options=options)


def test_the_eod_is_named_or_found_or_missed(tiktoken_file):
    assert TikTokenizer(tiktoken_file, options=GPT2).eod == 598
    assert TikTokenizer(tiktoken_file, "<|pad|>", options=GPT2).eod == 599
    with pytest.raises(OptionError, match="'</s>': no special token of .* are <|endoftext|>, <|pad|>"):
        TikTokenizer(tiktoken_file, "</s>", options=GPT2)
    with pytest.raises(OptionError, match="--eod-token"):
        TikTokenizer(tiktoken_file, options=TiktokenOptions("gpt2"))
    with pytest.raises(OptionError, match="--tiktoken-pattern, one of v1, v2, gpt2"):
        TikTokenizer(tiktoken_file)
    with pytest.raises(OptionError, match=r"--tiktoken-pattern \(: "):
        TikTokenizer(tiktoken_file, needs_eod=False, options=TiktokenOptions("("))


def test_a_whole_public_vocabulary_has_its_special_tokens(tmp_path):
    path = tmp_path / "gpt2.tiktoken"
    tokens = [bytes([byte]) for byte in range(256)] + [b"%05d" % number for number in range(50_000)]
    path.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)))
    tokenizer = TikTokenizer(str(path), options=TiktokenOptions("gpt2"))
    assert (tokenizer.eod, tokenizer.vocab_size) == (50256, 50257)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.sampled_from(" \t\r\n\x1c\x85\u3000aAé'sſ1²日-/"), max_size=30) | st.text(max_size=30))
def test_splitting_by_the_other_library_gives_the_same_ids(tiktoken_file, text):
    for pattern in PATTERNS:
        tokenizer = TikTokenizer(tiktoken_file, needs_eod=False, options=TiktokenOptions(pattern))
        assert tokenizer._encode_by_pieces(text).tolist() == tokenizer.encode_batch([text])[0].tolist()


@pytest.fixture
def public_encodings(monkeypatch):
    """The library's own definitions, without the vocabularies, which it would fetch."""
    public = pytest.importorskip("tiktoken_ext.openai_public")
    for loader in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
        monkeypatch.setattr(public, loader, lambda *_, **__: {})
    return {name: getattr(public, name)() for name in ("gpt2", "cl100k_base", "o200k_base")}


def test_public_encodings_are_those_of_the_library(public_encodings, tiktoken_ranks):
    alphabet = st.text(st.sampled_from(" \t\r\n\x1c\u3000aAbsSé'ſ1²日-/"), max_size=30) | st.text(max_size=30)
    for name, definition in public_encodings.items():
        ours, theirs = (
            tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=tiktoken_ranks, special_tokens={})
            for pattern in (PATTERNS[name], definition["pat_str"])
        )
        assert SPECIAL_TOKENS[name] == definition["special_tokens"]

        @settings(max_examples=300, deadline=None)
        @given(text=alphabet)
        def check(text):
            assert ours.encode_ordinary(text) == theirs.encode_ordinary(text)

        check()


@pytest.mark.parametrize(
    "content",
    [b"", b"abc", b"AA== x\n", b"{}", b"[]", b"[1]", b'[{"rank": 0}]', b"\xff\xfe", b"AA== 0\n", b"!!!! 0\n"],
)
def test_what_is_no_vocabulary_is_refused(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(OptionError, match=f"--tokenizer-model {path}: "):
        TikTokenizer(str(path), options=GPT2)
    with pytest.raises(OptionError, match="No such file"):
        TikTokenizer(str(tmp_path / "none"))


def test_ranks_with_gaps_are_no_form_of_megatron_s(megatron_tiktoken_file, tmp_path):
    entries = json.load(open(megatron_tiktoken_file))
    (tmp_path / "file.json").write_text(json.dumps(entries[:300] + entries[301:]))
    with pytest.raises(OptionError, match="its ranks are not 0 to 596, once each"):
        TikTokenizer(str(tmp_path / "file.json"))


def test_decoding_refuses_another_vocabulary_s_tokens(tiktoken_file):
    for number in (600, -1):
        with pytest.raises(OptionError, match=f"has no token {number}"):
            TikTokenizer(tiktoken_file, options=GPT2).decode([5, number])
