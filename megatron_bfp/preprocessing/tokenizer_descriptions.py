"""Each library's tokenizer as the ``tokenizer.json`` of what it does to a document's text, to load with gigatoken.

Special tokens are left out of it: their texts are ordinary text in a document.
"""

import json
import re
from collections.abc import Iterable, Iterator
from functools import singledispatch
from typing import Any

from .huggingface_tokenizer import HuggingFaceTokenizer, byte_level_alphabet
from .sentencepiece_tokenizer import SentencePieceTokenizer
from .tiktoken_tokenizer import TikTokenizer
from .tokenizer_interface import Tokenizer

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
    """The pairs of tokens that are a token together."""
    known = set(tokens)
    for token in known:
        for place in range(1, len(token)):
            if token[:place] in known and token[place:] in known:
                yield token[:place], token[place:]


@description.register
def _(tokenizer: SentencePieceTokenizer) -> dict[str, Any]:
    from gigatoken._load.sentencepiece import sentencepiece_to_tokenizer_json

    described: dict[str, Any] = json.loads(sentencepiece_to_tokenizer_json(tokenizer.document_model()))
    if tokenizer.user_defined_texts() and _changes_texts(described["normalizer"]):
        raise NoDescription("its user-defined pieces are looked for after it has changed the text")
    # The converter also adds control pieces, and merges that make them out of a text's characters.
    described["added_tokens"] = []
    reserved = set(tokenizer.reserved_texts())
    model = described["model"]
    model["merges"] = [
        [left, right] for left, right in model["merges"] if reserved.isdisjoint((left, right, left + right))
    ]
    return described


def _changes_texts(normalizer: dict[str, Any]) -> bool:
    """Whether a SentencePiece model does more to a text than to write spaces in its own way, and one at the front."""
    steps = normalizer["normalizers"]
    return any(step["type"] != "Prepend" and step.get("pattern") != {"String": " "} for step in steps)


def described_otherwise(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Finds what ``description`` leaves out: a SentencePiece model's user-defined pieces that are no markers.

    The library cuts them out of a text first. None if there are none.
    """
    if not isinstance(tokenizer, SentencePieceTokenizer):
        return None
    pieces = tokenizer.user_defined_texts()
    # The model may put a space in front of a text, and the piece may begin with it.
    forms = [re.escape(piece) for piece in pieces]
    forms += [r"\A" + re.escape(piece[1:]) for piece in pieces if piece.startswith(SPACE)]
    return re.compile("|".join(forms).replace(SPACE, f"[ {SPACE}]")) if forms else None
