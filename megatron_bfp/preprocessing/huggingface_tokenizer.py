"""A Hugging Face ``tokenizer.json``, run by the ``tokenizers`` library."""

import json
import os
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import OptionError
from .long_texts import encode_in_parts
from .tokenizer_interface import Tokenizer, TokenizingError, has_no_eod

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
"""A token that stands for one byte in models with ``byte_fallback``."""


class HuggingFaceTokenizer(Tokenizer):
    """A ``tokenizer.json``.

    Args:
        path: the file, or a folder that holds it.
        eod_token: text of the end-of-document token. Without it, a folder's tokenizer_config.json must name an
            ``eos_token``.
        needs_eod: whether it is an error that there is none.

    Raises:
        OptionError: there is no such file, it is not a tokenizer, or there is no EOD.
    """

    def __init__(self, path: str, eod_token: str | None = None, needs_eod: bool = True) -> None:
        try:
            from tokenizers import Tokenizer as Library
        except ImportError:
            raise OptionError("the tokenizers package is missing: pip install 'megatron-bfp[preprocess]'") from None
        file_path = os.path.join(path, "tokenizer.json") if os.path.isdir(path) else path
        content = self._read(file_path)
        eod_token = eod_token if eod_token is not None else _configured_eod(path)
        try:
            description = json.loads(content)
            vocabulary = Library.from_str(json.dumps(description)).get_vocab(with_added_tokens=True)
            self._eod_token = eod_token
            self._library = Library.from_str(json.dumps(self.document_description()))
        except Exception as error:  # the library raises bare Exceptions
            raise OptionError(f"--tokenizer-model {file_path}: not a Hugging Face tokenizer: {error}") from None
        self._ids = _renumbering(self._library.get_vocab(with_added_tokens=True), vocabulary)
        # Unigram models weigh the ways through a whole text, with sums that lose digits in a long one.
        self._is_local = description["model"].get("type") != "Unigram"
        self._refuse_special_texts(description, vocabulary)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if eod_token is None and needs_eod:
            raise has_no_eod(path)
        if eod_token is not None and eod_token not in vocabulary:
            raise OptionError(f"--eod-token {eod_token!r}: not in the vocabulary of {file_path}")
        self.eod = None if eod_token is None else vocabulary[eod_token]
        if needs_eod and self.eod in self.encode_batch([eod_token])[0]:
            raise self._eod_is_in_texts(eod_token)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """As ``Tokenizer.encode_batch``."""
        return encode_in_parts(texts, self._encode) if self._is_local else self._encode(texts)

    def _encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        try:
            encodings = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises bare Exceptions
            raise TokenizingError(str(error)) from None
        return [self._ids[np.array(encoding.ids, dtype=np.int64)] for encoding in encodings]

    def document_description(self) -> dict[str, Any]:
        """The ``tokenizer.json`` for a document's text: without special tokens, truncation and post-processing."""
        return _without_special_tokens(json.loads(self._content), self._eod_token)

    def reserved_texts(self) -> list[str]:
        """As ``Tokenizer.reserved_texts``."""
        return [token["content"] for token in json.loads(self._content).get("added_tokens") or []]

    def pieces(self, ids: Sequence[int]) -> list[bytes]:
        """As ``Tokenizer.pieces``."""
        return [self._piece(int(number)) for number in ids]

    def _piece(self, number: int) -> bytes:
        library, added, bytes_of = self._decoding
        if number in added:
            return added[number].encode()
        token = library.id_to_token(number) if number >= 0 else None
        if token is None:
            raise self._has_no_token(number)
        if bytes_of:
            return b"".join(bytes_of.get(character) or character.encode() for character in token)
        byte = BYTE_TOKEN.fullmatch(token)
        return bytes.fromhex(byte[1]) if byte else token.replace("\u2581", " ").encode()

    @cached_property
    def _decoding(self) -> tuple[Any, dict[int, str], dict[str, bytes]]:
        """The library's own tokenizer, the added tokens, and the bytes of a byte-level vocabulary's characters.

        Made when first used: processes that only encode need none of it.
        """
        from tokenizers import Tokenizer as Library

        description = json.loads(self._content)
        library = Library.from_str(json.dumps(description))
        added = {number: token.content for number, token in library.get_added_tokens_decoder().items()}
        return library, added, byte_level_alphabet() if _is_byte_level(description) else {}

    def _refuse_special_texts(self, description: dict[str, Any], vocabulary: dict[str, int]) -> None:
        """Some models have their special tokens in the vocabulary itself, and would find them in a text."""
        for token in description.get("added_tokens") or []:
            text = token["content"]
            if token.get("special") and vocabulary[text] in self.encode_batch([text])[0]:
                raise OptionError(
                    f"--tokenizer-model {self.path}: its model turns the text {text!r} into the special token, which "
                    "would end documents where they do not end; use a tokenizer that keeps them out of its model"
                )


def _without_special_tokens(description: dict[str, Any], eod_token: str | None) -> dict[str, Any]:
    """The tokenizer as it must treat a document: no special token in a text, nothing cut, nothing added."""
    added = description.get("added_tokens") or []
    added = [token for token in added if not token.get("special") and token["content"] != eod_token]
    return description | {"added_tokens": added, "post_processor": None, "truncation": None, "padding": None}


def _renumbering(found: dict[str, int], wanted: dict[str, int]) -> np.ndarray:
    """int32 [tokens]: the true id of each id that the tokenizer without special tokens gives.

    The library numbers added tokens that are not in the model anew when others are left out.
    """
    ids = np.full(max(found.values(), default=-1) + 1, -1, dtype=np.int32)
    for token, number in found.items():
        ids[number] = wanted[token]
    return ids


def _is_byte_level(description: dict[str, Any]) -> bool:
    """Whether the vocabulary writes tokens in characters that each stand for a byte, as GPT-2's does."""
    decoder = description.get("decoder") or {}
    return "ByteLevel" in [step.get("type") for step in [decoder, *decoder.get("decoders", [])]]


def byte_level_alphabet() -> dict[str, bytes]:
    """GPT-2's character for each byte: visible ones stand for themselves, the rest are numbered from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    characters = [*map(chr, visible), *(chr(0x100 + place) for place in range(len(hidden)))]
    return {character: bytes([byte]) for character, byte in zip(characters, visible + hidden)}


def _configured_eod(path: str) -> str | None:
    """The ``eos_token`` of a tokenizer's folder."""
    config_path = os.path.join(path, "tokenizer_config.json")
    if not os.path.isfile(config_path):
        return None
    try:
        with open(config_path, encoding="utf-8") as file:
            token = json.load(file).get("eos_token")
    except (OSError, ValueError, AttributeError) as error:
        raise OptionError(f"--tokenizer-model {config_path}: not a tokenizer's configuration: {error}") from None
    if isinstance(token, dict):
        token = token.get("content")
    if token is not None and not isinstance(token, str):
        raise OptionError(f"--tokenizer-model {config_path}: its eos_token is no text")
    return token
