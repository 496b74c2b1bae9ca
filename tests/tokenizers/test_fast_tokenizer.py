"""The fast tokenizer gives the reference's ids, or is not used."""

import sys

import pytest
from helpers.texts import code_files
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("tokenizers")
pytest.importorskip("sentencepiece")
pytest.importorskip("tiktoken")
gigatoken = pytest.importorskip("gigatoken")

from helpers.tokenizer_fixtures import EOD

from megatron_bfp.tokenizers.fast import tokenizer as fast_tokenizer
from megatron_bfp.tokenizers.fast.probes import PROBES, probes
from megatron_bfp.tokenizers.fast.tokenizer import DifferentIds, FastTokenizer, NoFastTokenizer, load_fast_tokenizer
from megatron_bfp.tokenizers.registry import load_tokenizer
from megatron_bfp.tokenizers.tiktoken import TiktokenOptions

KINDS = (
    *("huggingface", "sentencepiece", "plain sentencepiece", "default sentencepiece", "changed sentencepiece"),
    *("tiktoken", "megatron tiktoken"),
)
SOURCES = code_files()


@pytest.fixture(scope="session")
def references(tokenizer_file, sentencepiece_file, train_sentencepiece, tiktoken_file, megatron_tiktoken_file):
    """The SentencePiece models with user-defined pieces as Gemma's, without as Llama's, as the library trains them by
    default (without bytes, with its own rules for characters), and so with user-defined pieces."""
    unchanged = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    gpt2 = TiktokenOptions("gpt2", special_tokens=(EOD, "<|pad|>"))
    return {
        "huggingface": load_tokenizer("HuggingFaceTokenizer", tokenizer_file, EOD),
        "sentencepiece": load_tokenizer("SentencePieceTokenizer", sentencepiece_file),
        "plain sentencepiece": load_tokenizer("SentencePieceTokenizer", train_sentencepiece(**unchanged)),
        "default sentencepiece": load_tokenizer("SentencePieceTokenizer", train_sentencepiece(byte_fallback=False)),
        "changed sentencepiece": load_tokenizer(
            "SentencePieceTokenizer", train_sentencepiece(user_defined_symbols=["self.", "<|im_end|>", "fi"])
        ),
        "tiktoken": load_tokenizer("TikTokenizer", tiktoken_file, tiktoken=gpt2),
        "megatron tiktoken": load_tokenizer("TikTokenizer", megatron_tiktoken_file),
    }


@pytest.fixture(scope="session")
def pairs(references):
    """Each reference and its fast tokenizer."""
    return {kind: (reference, load_fast_tokenizer(reference)) for kind, reference in references.items()}


def differs(fast, reference, texts):
    """The texts with other ids."""
    documents, expected = fast.encode_batch(texts), reference.encode_batch(texts)
    return [
        text for text, ids, expected_ids in zip(texts, documents, expected) if ids.tolist() != expected_ids.tolist()
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_the_reference(kind, pairs):
    reference, fast = pairs[kind]
    assert not differs(fast, reference, [*SOURCES, *probes(reference)])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=300, deadline=None)
@given(texts=st.lists(st.text(max_size=200), max_size=4))
def test_ids_of_any_text(kind, pairs, texts):
    reference, fast = pairs[kind]
    assert not differs(fast, reference, texts)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_special_tokens_stay_text(kind, pairs):
    reference, fast = pairs[kind]
    for text in reference.reserved_texts():
        assert fast.eod not in fast.encode_batch([f"a{text}b"])[0]


@pytest.mark.parametrize("kind", KINDS)
def test_everything_else_is_the_reference_s(kind, pairs):
    reference, fast = pairs[kind]
    for name in ("path", "vocab_size", "eod", "pad", "unique_identifiers"):
        assert getattr(fast, name) == getattr(reference, name)
    ids = reference.encode_batch(["some text"])[0]
    assert fast.decode(ids) == reference.decode(ids)
    assert fast.reserved_texts() == reference.reserved_texts()


def test_added_tokens_keep_their_ids(tokenizer_file, tmp_path):
    """The reference's library numbers ordinary added tokens anew when special ones are left out; gigatoken does not."""
    import tokenizers

    library = tokenizers.Tokenizer.from_file(tokenizer_file)
    library.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    library.add_tokens(["<tool_call>", "</tool_call>"])
    library.save(str(tmp_path / "tokenizer.json"))
    reference = load_tokenizer("HuggingFaceTokenizer", str(tmp_path / "tokenizer.json"), "<|im_end|>")
    fast = load_fast_tokenizer(reference)
    (ids,) = fast.encode_batch(["<tool_call><|im_end|></tool_call>"])
    assert ids[0] == 602 and ids[-1] == 603
    assert not differs(fast, reference, ["<tool_call><|im_end|></tool_call>", "a <tool_call> b"])


@pytest.mark.parametrize("pattern", ["cl100k_base", "o200k_base", "v2"])
def test_patterns_of_tiktoken(pattern, tiktoken_file):
    options = TiktokenOptions(pattern, special_tokens=(EOD,))
    load_fast_tokenizer(load_tokenizer("TikTokenizer", tiktoken_file, tiktoken=options))


@pytest.mark.parametrize("pattern", ["v1", r"\w+|\W"])
def test_patterns_that_gigatoken_does_not_know(pattern, tiktoken_file):
    options = TiktokenOptions(pattern, special_tokens=(EOD,))
    with pytest.raises(NoFastTokenizer, match="cannot run it"):
        load_fast_tokenizer(load_tokenizer("TikTokenizer", tiktoken_file, tiktoken=options))


def test_user_defined_pieces_are_the_reference_s(pairs):
    """Two spaces are a piece of this model's own, and a text's first space follows the one the model puts there."""
    reference, fast = pairs["sentencepiece"]
    assert reference.user_defined_texts() == ["\u2581\u2581"]
    texts = ["no such", "two  spaces", " at the front", "\u2581at the front", "a \u2581b", "[INST] <|im_end|>", "last"]
    assert [fast._left_out.search(text) is not None for text in texts] == [False, *[True] * 4, False, False]
    assert not differs(fast, reference, texts)
    used = []
    failing = FastTokenizer(
        reference, lambda: Backend(fast._backend, lambda text: used.append(text) or text), fast._left_out
    )
    assert not differs(failing, reference, texts)
    assert used == ["no such", "[INST] <|im_end|>", "last"]


def test_sentencepiece_models_without_a_fast_tokenizer(train_sentencepiece):
    reference = load_tokenizer("SentencePieceTokenizer", train_sentencepiece(model_type="unigram"))
    with pytest.raises(NoFastTokenizer, match="SentencePiece models of type BPE only, and this is a unigram"):
        load_fast_tokenizer(reference)


def test_fault_C10_a_sentencepiece_model_of_default_training_is_fast(pairs):
    """Its normalizer changes characters and removes spaces, and what is in no piece is unknown, once for a run."""
    reference, fast = pairs["default sentencepiece"]
    unknown = reference.unknown
    texts = [
        "a\U0001f600\U0001f601b",
        "\U0001f600 \U0001f600",
        "ﬁle  n\u0303\t x ",
        "\U0001f600",
        "",
        " ",
        "\0a\0\0 \0",
    ]
    assert not differs(fast, reference, texts)
    documents = [ids.tolist() for ids in fast.encode_batch(texts[:2])]
    assert [ids.count(unknown) for ids in documents] == [1, 2]
    used = []
    watched = FastTokenizer(
        reference,
        lambda: Backend(fast._backend, lambda text: used.append(text) or text),
        prepare=reference.normalize,
        unknown=unknown,
    )
    assert not differs(watched, reference, texts)
    assert len(used) == len(texts)  # and none by the reference
    assert used[2] == "\u2581file\u2581\xf1\u2581x"


def test_user_defined_pieces_in_a_text_that_the_model_changes(pairs):
    """They are looked for in the changed text, and not changed themselves."""
    reference, fast = pairs["changed sentencepiece"]
    texts = ["self.\ufb01", "a self. b", "ﬁ", "fi", "x <|im_end|> y", "\uff53elf.", "other"]
    assert not differs(fast, reference, texts)
    prepared = [reference.normalize(text) for text in texts]
    assert [fast._left_out.search(text) is not None for text in prepared] == [True] * 4 + [False, True, False]


def test_pieces_that_look_like_bytes(train_sentencepiece):
    path = train_sentencepiece(byte_fallback=False, user_defined_symbols=["<0x41>"])
    with pytest.raises(NoFastTokenizer, match="written as bytes are"):
        load_fast_tokenizer(load_tokenizer("SentencePieceTokenizer", path))


class Backend:
    """Gigatoken's tokenizer, made to go wrong."""

    def __init__(self, backend, change=lambda text: text, error=None):
        self._backend, self._change, self._error = backend, change, error

    def encode(self, text):
        if self._error is not None:
            raise self._error
        return self._backend.encode(self._change(text))


class PanicException(BaseException):
    """As pyo3's: not an Exception."""


def test_other_ids_are_found(pairs, monkeypatch):
    reference, fast = pairs["huggingface"]

    def change(text):
        return text.replace("\u2167", "8")

    other = FastTokenizer(reference, lambda: Backend(fast._backend, change))
    other.check(["the same"])
    first = len(reference.encode_batch(["some"])[0])
    with pytest.raises(DifferentIds, match=f"text 1 of 2, 14 characters long, at token {first}$") as caught:
        other.check(["the same", "some\u2167 document"])
    assert "document" not in str(caught.value)
    monkeypatch.setattr(
        gigatoken.gigatoken_rs, "load_hf_json", lambda description: Backend(fast._backend, change), raising=True
    )
    with pytest.raises(NoFastTokenizer, match="gigatoken's tokens differ from those of its own library"):
        load_fast_tokenizer(reference)


@pytest.mark.parametrize("error", [ValueError("no"), PanicException("called `Option::unwrap()` on a `None` value")])
def test_the_reference_encodes_where_gigatoken_fails(error, pairs):
    reference, fast = pairs["huggingface"]
    failing = FastTokenizer(reference, lambda: Backend(fast._backend, error=error))
    assert not differs(failing, reference, ["a text", ""])


@pytest.mark.parametrize("grown", [False, True])
def test_a_backend_that_remembers_too_much_is_replaced(grown, pairs, monkeypatch):
    reference, fast = pairs["huggingface"]
    made = []
    replaced = FastTokenizer(reference, lambda: made.append(1) or fast._backend)
    monkeypatch.setattr(fast_tokenizer, "FEWEST_CHARACTERS", 100)
    monkeypatch.setattr(fast_tokenizer, "MOST_CHARACTERS", 10**9 if grown else 300)
    monkeypatch.setattr(fast_tokenizer, "_resident_bytes", lambda: 10**9 if len(made) == 1 and grown else 0)
    replaced._resident = 0
    for _ in range(8):
        assert not differs(replaced, reference, ["a" * 50])
    assert len(made) == 2


def test_interrupts_are_not_swallowed(pairs):
    reference, fast = pairs["huggingface"]
    with pytest.raises(KeyboardInterrupt):
        FastTokenizer(reference, lambda: Backend(fast._backend, error=KeyboardInterrupt())).encode_batch(["a"])


def test_a_panic_while_loading(references, monkeypatch):
    def panic(description):
        raise PanicException("a\npanic")

    monkeypatch.setattr(gigatoken.gigatoken_rs, "load_hf_json", panic)
    with pytest.raises(NoFastTokenizer, match="cannot run it: a$"):
        load_fast_tokenizer(references["huggingface"])


def test_gigatoken_is_missing(references, monkeypatch):
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    with pytest.raises(NoFastTokenizer, match="the gigatoken package is missing"):
        load_fast_tokenizer(references["huggingface"])


def test_a_panic_while_encoding_probes(pairs, monkeypatch):
    """The reference must not stand in for gigatoken when the two are compared."""
    reference, fast = pairs["huggingface"]
    failing = Backend(fast._backend, error=PanicException("index out of bounds"))
    monkeypatch.setattr(gigatoken.gigatoken_rs, "load_hf_json", lambda description: failing)
    with pytest.raises(NoFastTokenizer, match="cannot run it: index out of bounds$"):
        load_fast_tokenizer(reference)


@pytest.mark.parametrize("model", ["WordPiece", "Unigram", "WordLevel"])
def test_models_without_a_fast_tokenizer(model, tmp_path):
    import tokenizers

    models = {
        "WordPiece": tokenizers.models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"),
        "Unigram": tokenizers.models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0),
        "WordLevel": tokenizers.models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"),
    }
    tokenizers.Tokenizer(models[model]).save(str(tmp_path / "tokenizer.json"))
    reference = load_tokenizer("HuggingFaceTokenizer", str(tmp_path / "tokenizer.json"), needs_eod=False)
    with pytest.raises(NoFastTokenizer, match=f"(?i)cannot run it: .*{model}"):
        load_fast_tokenizer(reference)


def test_probes_have_what_tokenizers_differ_in():
    assert {"", "\0", "\u2028", "\ufeff"} <= set(PROBES)
    assert len(set(PROBES)) > 1000 and fast_tokenizer.probes is probes


def test_the_pieces_of_a_small_vocabulary_are_all_among_the_probes(tokenizer_file):
    reference = load_tokenizer("HuggingFaceTokenizer", tokenizer_file, EOD)
    texts = set(probes(reference))
    pieces = [reference.decode([number]) for number in range(reference.vocab_size)]
    assert len(pieces) == 600 and texts.issuperset(pieces) and "".join(pieces) in texts
