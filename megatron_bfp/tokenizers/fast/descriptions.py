"""Each library's tokenizer as the ``tokenizer.json`` of what it does to a document's text, to load with gigatoken.

Special tokens are left out of it: their texts are ordinary text in a document.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import singledispatch
from typing import Any

from ..huggingface import HuggingFaceTokenizer, byte_level_alphabet
from ..interface import Tokenizer
from ..sentencepiece import SentencePieceTokenizer
from ..tiktoken import TikTokenizer

SPACE = "\u2581"
"""What SentencePiece writes for a space."""


class NoDescription(Exception):
    """There is no such description of a tokenizer. Its message is the reason."""


@singledispatch
def description(tokenizer: Tokenizer) -> dict[str, Any]:
    """The ``tokenizer.json`` for documents.

    Raises:
        NoDescription: there is none. Other exceptions are those of gigatoken's converter of SentencePiece models.
    """
    raise NoDescription(f"there is none for a {type(tokenizer).__name__}")


@description.register
def _(tokenizer: HuggingFaceTokenizer) -> dict[str, Any]:
    return tokenizer.document_description()


@description.register
def _(tokenizer: TikTokenizer) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": tokenizer.pattern}, "behavior": "Isolated", "invert": False}
    bytes_to_characters = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, bytes_to_characters]},
        "post_processor": None,
        "decoder": bytes_to_characters,
        "model": _byte_pair_model(tokenizer.ranks),
    }


def _byte_pair_model(ranks: dict[bytes, int]) -> dict[str, Any]:
    """The library merges the pair that makes the token of the lowest rank, and looks whole words up before it does."""
    alphabet = {byte[0]: character for character, byte in byte_level_alphabet().items()}
    texts = {token: "".join(map(alphabet.__getitem__, token)) for token in ranks}
    merges = sorted((ranks[left + right], ranks[left], ranks[right], left, right) for left, right in _pairs(ranks))
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": True,
        "vocab": {texts[token]: rank for token, rank in ranks.items()},
        "merges": [[texts[left], texts[right]] for *_, left, right in merges],
    }


def _pairs(tokens: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """The pairs of tokens that together are a token."""
    known = set(tokens)
    for token in known:
        for cut in range(1, len(token)):
            if token[:cut] in known and token[cut:] in known:
                yield token[:cut], token[cut:]


@description.register
def _(tokenizer: SentencePieceTokenizer) -> dict[str, Any]:
    from gigatoken._load.sentencepiece import sentencepiece_to_tokenizer_json

    if not tokenizer.is_bpe:
        raise NoDescription(
            "gigatoken runs SentencePiece models of type BPE only, and this is a unigram, word or char one"
        )
    described: dict[str, Any] = json.loads(
        sentencepiece_to_tokenizer_json(tokenizer.document_model(byte_fallback=True))
    )
    if normalization(tokenizer):
        described["normalizer"] = None
    vocabulary = described["model"]["vocab"]
    if unknown_token(tokenizer) is not None:
        of_bytes = {f"<0x{byte:02X}>": tokenizer.vocab_size + byte for byte in range(256)}
        if not vocabulary.keys().isdisjoint(of_bytes):
            raise NoDescription("some of its pieces are written as bytes are, but are none")
        vocabulary |= of_bytes
    # The converter also adds control pieces, and merges that make them out of a text's characters.
    described["added_tokens"] = []
    reserved = set(tokenizer.reserved_texts())
    model = described["model"]
    model["merges"] = [
        [left, right] for left, right in model["merges"] if reserved.isdisjoint((left, right, left + right))
    ]
    return described


def normalization(tokenizer: Tokenizer) -> Callable[[str], str] | None:
    """What changes a text before it is encoded with the description; None for nothing.

    SentencePiece's own normalizer, for models that do more to a text than to write spaces in their own way, and one at
    the front: those of its default training do, and gigatoken's normalizer does other things with some characters.
    """
    if isinstance(tokenizer, SentencePieceTokenizer) and tokenizer.changes_texts:
        return tokenizer.normalize
    return None


def unknown_token(tokenizer: Tokenizer) -> int | None:
    """The id of the characters that are in no token of a SentencePiece model without bytes; None for other models.

    In the description, such characters are bytes, with ids from the size of the vocabulary on.
    """
    if isinstance(tokenizer, SentencePieceTokenizer) and not tokenizer.has_bytes:
        return tokenizer.unknown
    return None


def described_otherwise(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Finds what ``description`` leaves out: a SentencePiece model's user-defined pieces that are not markers.

    The library cuts them out of a text first. None if there are none.
    """
    if not isinstance(tokenizer, SentencePieceTokenizer):
        return None
    pieces = tokenizer.user_defined_texts()
    # The model may put a space in front of a text, and the piece may begin with it.
    forms = [re.escape(piece) for piece in pieces]
    forms += [r"\A" + re.escape(piece[1:]) for piece in pieces if piece.startswith(SPACE)]
    return re.compile("|".join(forms).replace(SPACE, f"[ {SPACE}]")) if forms else None
