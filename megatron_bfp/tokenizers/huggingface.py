"""A Hugging Face ``tokenizer.json``, run by the ``tokenizers`` library."""

import json
import os
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ..errors import OptionError
from .files import file_in_folder, is_hub_name, not_of_type
from .hub import downloaded
from .interface import Tokenizer, TokenizingError, first_line, has_no_eod, library_errors
from .long_texts import encode_in_parts

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
"""A token that stands for one byte in models with ``byte_fallback``."""


class HuggingFaceTokenizer(Tokenizer):
    """A ``tokenizer.json``.

    Args:
        path: the file, a folder that holds it, or a name on the Hugging Face Hub.
        eod_token: text of the end-of-document token. Without it, a folder's tokenizer_config.json must name an
            ``eos_token``.
        needs_eod: whether a missing EOD is an error.
        bos_token: text of the token that begins a document. Without it, the ``bos_token`` of a folder's
            tokenizer_config.json, else the first token that the post-processor puts before a text.

    Raises:
        OptionError: the file cannot be read, is not a tokenizer, or there is no EOD.
    """

    def __init__(
        self, path: str, eod_token: str | None = None, needs_eod: bool = True, *, bos_token: str | None = None
    ) -> None:
        path = downloaded(path) if is_hub_name(path) else path
        file_path = file_in_folder(path) if os.path.isdir(path) else path
        config = _configuration(path)
        eod_token = eod_token if eod_token is not None else config.eos
        bos_name = bos_token if bos_token is not None else config.bos
        self._markers = {token for token in (eod_token, bos_name) if token is not None}
        vocabulary = self._load(file_path)
        if eod_token is None and needs_eod:
            raise has_no_eod(path)
        for option, token in (("--eod-token", eod_token), ("--bos-token", bos_token)):
            if token is not None and token not in vocabulary:
                raise OptionError(f"{option} {token!r}: not in the vocabulary of {file_path}")
        self._vocabulary = vocabulary
        self.eod = None if eod_token is None else vocabulary[eod_token]
        if bos_name is not None and bos_name in vocabulary:
            self.bos = vocabulary[bos_name]
        else:
            self.bos = self.library_adds_before[0] if self.library_adds_before else None
        self.warning = self._disagreement(config)
        if needs_eod and eod_token is not None and self.eod in self.encode_batch([eod_token])[0]:
            raise self._eod_is_in_texts(eod_token)

    def token_id(self, text: str) -> int | None:
        """As ``Tokenizer.token_id``."""
        return self._vocabulary.get(text)

    def _load(self, path: str) -> dict[str, int]:
        """Load the file; returns its vocabulary, token -> id.

        Raises:
            OptionError: it cannot be read, or is not a tokenizer.
        """
        try:
            from tokenizers import Tokenizer as Library
        except ImportError:
            raise OptionError("the tokenizers package is missing: pip install 'megatron-bfp[preprocess]'") from None
        content = self._read(path)
        with library_errors(lambda error: not_of_type(path, content, "HuggingFaceTokenizer", error)):
            description = json.loads(content)
            library = Library.from_str(json.dumps(description))
            vocabulary = library.get_vocab(with_added_tokens=True)
            self._library = Library.from_str(json.dumps(self.document_description()))
            self.library_adds_before, self.library_adds_after = _added_around(library, vocabulary)
        self._ids = _renumbering(self._library.get_vocab(with_added_tokens=True), vocabulary)
        # Unigram models weigh the ways through a whole text, with sums that lose digits in a long one.
        self._is_local = description["model"].get("type") != "Unigram"
        self._refuse_special_texts(description, vocabulary)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        return vocabulary

    def _disagreement(self, config: "_Configuration") -> str | None:
        """A warning if the configuration and the post-processor disagree about a BOS."""
        if config.adds_bos is None or config.adds_bos == bool(self.library_adds_before):
            return None
        return (
            f"{self.path} {'adds' if self.library_adds_before else 'adds no'} BOS, which is what Megatron with "
            f"transformers 5 writes; its tokenizer_config.json has add_bos_token {str(config.adds_bos).lower()}, "
            "which older versions go by. --append-bos or --no-append-bos decides"
        )

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """As ``Tokenizer.encode_batch``."""
        return encode_in_parts(texts, self._encode) if self._is_local else self._encode(texts)

    def _encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        with library_errors(lambda error: TokenizingError(first_line(error))):  # it raises bare Exceptions
            encodings = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [self._ids[np.array(encoding.ids, dtype=np.int64)] for encoding in encodings]

    def document_description(self) -> dict[str, Any]:
        """The ``tokenizer.json`` for a document's text: without special tokens, truncation and post-processing."""
        return _without_special_tokens(json.loads(self._content), self._markers)

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
        """Refuse models that have their special tokens in the vocabulary itself, and so can make them of a text."""
        for token in description.get("added_tokens") or []:
            text = token["content"]
            if token.get("special") and vocabulary[text] in self.encode_batch([text])[0]:
                raise OptionError(
                    f"--tokenizer-model {self.path}: its model turns the text {text!r} into the special token, which "
                    "would end documents where they do not end; use a tokenizer that keeps them out of its model"
                )


def _added_around(library: Any, vocabulary: dict[str, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that the library's post-processor adds before and after a text.

    Raises:
        ValueError: it does something else with a text.
    """
    library.no_truncation()
    library.no_padding()
    for text in ("a", *vocabulary):
        ids = library.encode(text, add_special_tokens=False).ids
        if ids:
            break
    else:
        return (), ()
    processed = library.encode(text)
    of_text = [index for index, sequence in enumerate(processed.sequence_ids) if sequence is not None]
    begin, end = of_text[0], of_text[-1] + 1
    if processed.ids[begin:end] != ids:
        raise ValueError("its post-processor does more than to add tokens before and after a text")
    before, after = tuple(processed.ids[:begin]), tuple(processed.ids[end:])
    strange = {*before, *after} - set(vocabulary.values())
    if strange:
        raise ValueError(f"its post-processor adds token {min(strange)}, which is not in its vocabulary")
    return before, after


def _without_special_tokens(description: dict[str, Any], markers: set[str]) -> dict[str, Any]:
    """The tokenizer as it must treat a document: no special token in a text, nothing cut, nothing added."""
    added = description.get("added_tokens") or []
    added = [token for token in added if not token.get("special") and token["content"] not in markers]
    return description | {"added_tokens": added, "post_processor": None, "truncation": None, "padding": None}


def _renumbering(renumbered: dict[str, int], vocabulary: dict[str, int]) -> np.ndarray:
    """int32 [tokens]: the true id of each id that the tokenizer without special tokens gives.

    If added tokens are left out, the library renumbers the other added tokens that are not in the model.

    Args:
        renumbered: token -> id without special tokens.
        vocabulary: token -> true id.
    """
    ids = np.full(max(renumbered.values(), default=-1) + 1, -1, dtype=np.int32)
    for token, number in renumbered.items():
        ids[number] = vocabulary[token]
    return ids


def _is_byte_level(description: dict[str, Any]) -> bool:
    """Whether the vocabulary writes tokens in characters that each stand for a byte, as GPT-2's does."""
    decoder = description.get("decoder") or {}
    return "ByteLevel" in [step.get("type") for step in [decoder, *decoder.get("decoders", [])]]


def byte_level_alphabet() -> dict[str, bytes]:
    """GPT-2's character for each byte: visible ones stand for themselves, the rest are numbered from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    characters = [*map(chr, visible), *(chr(0x100 + number) for number in range(len(hidden)))]
    return {character: bytes([byte]) for character, byte in zip(characters, visible + hidden)}


class _Configuration(NamedTuple):
    """What a tokenizer's folder says in files beside its ``tokenizer.json``."""

    eos: str | None = None
    bos: str | None = None
    adds_bos: bool | None = None
    """``add_bos_token``; None if it is missing."""


def _configuration(path: str) -> _Configuration:
    """A tokenizer folder's configuration; empty for a file. As in Megatron, [SEP] and [CLS] replace EOS and BOS."""
    settings = _read_configuration(os.path.join(path, "special_tokens_map.json"))
    config_path = os.path.join(path, "tokenizer_config.json")
    settings |= {name: value for name, value in _read_configuration(config_path).items() if value is not None}
    tokens = {name: _token_text(settings.get(f"{name}_token"), config_path) for name in ("eos", "sep", "bos", "cls")}
    adds_bos = settings.get("add_bos_token")
    return _Configuration(
        tokens["eos"] if tokens["eos"] is not None else tokens["sep"],
        tokens["bos"] if tokens["bos"] is not None else tokens["cls"],
        adds_bos if isinstance(adds_bos, bool) else None,
    )


def _read_configuration(path: str) -> dict[str, Any]:
    if not os.path.isfile(path):
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            settings = json.load(file)
    except (OSError, ValueError) as error:
        raise OptionError(f"--tokenizer-model {path}: not a tokenizer's configuration: {error}") from None
    if not isinstance(settings, dict):
        raise OptionError(f"--tokenizer-model {path}: not a tokenizer's configuration: it is not a JSON object")
    return settings


def _token_text(token: Any, path: str) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    if token is not None and not isinstance(token, str):
        raise OptionError(f"--tokenizer-model {path}: one of its special tokens is not text: {token!r}")
    return token
