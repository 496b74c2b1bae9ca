"""Tokenizers give the library's ids, keep special-token strings as text, and know their EOD or say that they do not."""

import json

import pytest
from helpers.datasets import DATA

tokenizers = pytest.importorskip("tokenizers")

from helpers.tokenizer_fixtures import EOD

from megatron_bfp import OptionError
from megatron_bfp.preprocessing.readers.inputs import Piece, read_batches
from megatron_bfp.tokenizers.registry import load_tokenizer


def load(path, **options):
    return load_tokenizer("HuggingFaceTokenizer", path, **options)


def nasty_texts(name):
    batches = read_batches(Piece(str(DATA / "nasty" / name), 0), ["text"])
    return [record.texts[0] for batch, _ in batches for record in batch.records(["text"])]


def test_ids_are_those_of_the_library(tokenizer_file):
    reference = tokenizers.Tokenizer.from_file(tokenizer_file)
    documents = nasty_texts("00_good.jsonl") + ["", " ", "\U0001f600 é\x00"]
    encoded = load(tokenizer_file, eod_token=EOD).encode_batch(documents)
    assert [ids.tolist() for ids in encoded] == [reference.encode(text).ids for text in documents]


def test_special_tokens_in_a_text_stay_text(tokenizer_file):
    tokenizer = load(tokenizer_file, eod_token=EOD)
    library = tokenizers.Tokenizer.from_file(tokenizer_file)
    special = {library.token_to_id(EOD), library.token_to_id("<|pad|>")}
    documents = nasty_texts("30_special_tokens_in_text.jsonl") + [EOD, f"a{EOD}b", "<|pad|>"]
    assert any(special & set(library.encode(text).ids) for text in documents)  # what the library does by itself
    for text, ids in zip(documents, tokenizer.encode_batch(documents)):
        assert not special & set(ids.tolist())
        assert library.decode(ids.tolist(), skip_special_tokens=False) == text


def test_ordinary_added_tokens_keep_their_ids(tokenizer_file, tmp_path):
    """As in Qwen's files: special tokens and, after them, ordinary added ones, which the library would number anew."""
    library = tokenizers.Tokenizer.from_file(tokenizer_file)
    library.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    library.add_tokens(["<tool_call>", "</tool_call>"])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(str(tmp_path / "tokenizer.json"), eod_token="<|im_end|>")
    assert (tokenizer.eod, tokenizer.vocab_size) == (601, 604)
    documents = ["a<tool_call>b</tool_call>c", "<tool_call>", "plain"]
    for text, ids in zip(documents, tokenizer.encode_batch(documents), strict=True):
        assert ids.tolist() == library.encode(text).ids
    (ids,) = tokenizer.encode_batch(["<tool_call><|im_end|></tool_call>"])
    assert ids[0] == 602 and ids[-1] == 603 and tokenizer.eod not in ids
    assert library.decode(ids.tolist(), skip_special_tokens=False) == "<tool_call><|im_end|></tool_call>"


def test_a_model_that_has_its_special_tokens_in_itself_is_refused(tmp_path):
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "</s>": 1, "a": 2}, unk_token="[UNK]"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["</s>"])
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(OptionError, match="the text '</s>' into the special token"):
        load(str(tmp_path / "tokenizer.json"), eod_token="</s>")


def test_truncation_padding_and_templates_of_the_file_are_not_applied(tokenizer_file, tmp_path):
    description = json.loads(open(tokenizer_file).read())
    library = tokenizers.Tokenizer.from_file(tokenizer_file)
    library.enable_truncation(5)
    library.enable_padding(length=9)
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{EOD} $A {EOD}", special_tokens=[(EOD, description["added_tokens"][0]["id"])]
    )
    library.save(str(tmp_path / "tokenizer.json"))
    text = "one two three four five six seven " * 5
    plain, changed = (load(path, eod_token=EOD) for path in (tokenizer_file, str(tmp_path / "tokenizer.json")))
    assert changed.encode_batch([text])[0].tolist() == plain.encode_batch([text])[0].tolist()


@pytest.mark.parametrize("eos", [EOD, {"content": EOD, "special": True}])
def test_a_folder_s_configuration_names_the_eod(tokenizer_folder, eos):
    tokenizer = load(tokenizer_folder({"eos_token": eos}))
    assert (tokenizer.eod, tokenizer.vocab_size, tokenizer.pad) == (0, 600, -1)


def test_the_eod_given_wins(tokenizer_folder):
    assert load(tokenizer_folder({"eos_token": EOD}), eod_token="<|pad|>").eod == 1


@pytest.mark.parametrize("config", [[], {"eos_token": ["a"]}, {"eos_token": 3}])
def test_a_configuration_that_is_none_is_refused(tokenizer_folder, config):
    with pytest.raises(OptionError, match="tokenizer_config.json"):
        load(tokenizer_folder(config))


@pytest.mark.parametrize("config", [None, {}, {"eos_token": None}])
def test_without_an_eod_the_option_is_named(tokenizer_folder, config):
    with pytest.raises(OptionError, match="--eod-token"):
        load(tokenizer_folder(config))


def test_an_eod_that_is_no_token_is_refused(tokenizer_file):
    with pytest.raises(OptionError, match="'</s>': not in the vocabulary"):
        load(tokenizer_file, eod_token="</s>")


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff", b'{"model": 1}'])
def test_what_is_no_tokenizer_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(OptionError, match="not a Hugging Face tokenizer"):
        load(str(tmp_path / "tokenizer.json"), eod_token=EOD)


def test_an_eod_that_is_no_special_token_is_kept_out_of_texts(tokenizer_file, tmp_path):
    """Some files mark their EOD as an ordinary added token, which the library finds in texts."""
    library = tokenizers.Tokenizer.from_file(tokenizer_file)
    library.add_tokens(["<|end|>"])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(str(tmp_path / "tokenizer.json"), eod_token="<|end|>")
    (ids,) = tokenizer.encode_batch(["a<|end|>b"])
    assert tokenizer.eod == 600 and 600 not in ids and tokenizer.decode(ids) == "a<|end|>b"


def test_a_word_as_eod_is_refused(tokenizer_file):
    with pytest.raises(OptionError, match="turns the text 'self' into the end-of-document token"):
        load(tokenizer_file, eod_token="self")


def test_a_missing_file_and_an_unknown_type_are_refused(tmp_path):
    with pytest.raises(OptionError, match="No such file"):
        load(str(tmp_path / "none"))
    with pytest.raises(OptionError, match="HuggingFaceTokenizer"):
        load_tokenizer("AnotherTokenizer", "x")


def test_decoding_gives_the_text_back(tokenizer_file):
    library = tokenizers.Tokenizer.from_file(tokenizer_file)
    tokenizer = load(tokenizer_file, eod_token=EOD)
    documents = nasty_texts("00_good.jsonl") + ["", " ", "\U0001f600 é\x00\n", f"a{EOD}b"]
    for text, ids in zip(documents, tokenizer.encode_batch(documents), strict=True):
        assert tokenizer.decode(ids) == text == library.decode(ids.tolist(), skip_special_tokens=False)
        assert b"".join(tokenizer.pieces(ids)) == text.encode()
    assert tokenizer.pieces([0, 1]) == [EOD.encode(), b"<|pad|>"]


def test_a_part_of_a_character_is_bytes_in_a_piece_and_a_replacement_in_a_text(tokenizer_file):
    tokenizer = load(tokenizer_file, eod_token=EOD)
    (ids,) = tokenizer.encode_batch(["\U0001f600"])
    assert tokenizer.pieces(ids) == [b"\xf0", b"\x9f", b"\x98", b"\x80"]
    assert tokenizer.decode(ids[:2]) == "\ufffd"


def test_pieces_of_a_vocabulary_with_marked_spaces_and_byte_tokens(tmp_path):
    """As in Llama 2's file."""
    vocabulary = {"<unk>": 0, "<0xE2>": 1, "\u2581the": 2, "\u0120": 3}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    decoders = tokenizers.decoders
    library.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(str(tmp_path / "tokenizer.json"), needs_eod=False)
    assert tokenizer.pieces([2, 1, 3]) == [b" the", b"\xe2", "\u0120".encode()]


@pytest.mark.parametrize("number", [600, -1])
def test_decoding_refuses_another_vocabulary_s_tokens(tokenizer_file, number):
    with pytest.raises(OptionError, match=f"has no token {number}; give the tokenizer the dataset was made with"):
        load(tokenizer_file, eod_token=EOD).decode([5, number])
