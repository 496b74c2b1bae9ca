"""The files of a tokenizer that transformers loads: ``tokenizer.json`` and ``tokenizer_config.json``.

A ``tokenizer.json`` is copied. One of a SentencePiece or tiktoken vocabulary is made, and is used only if it gives the
ids of the vocabulary's own library for the texts of ``probes``. Unlike in preprocessing, transformers turns the text of
a special token into that token.
"""

import json
import os
from typing import Any

import numpy as np

from ..errors import OptionError
from ..tokenizers.fast.descriptions import NoDescription, description, normalization, unknown_token
from ..tokenizers.fast.probes import probes
from ..tokenizers.huggingface import BYTE_TOKEN, HuggingFaceTokenizer
from ..tokenizers.interface import Tokenizer, library_errors
from ..tokenizers.sentencepiece import SentencePieceTokenizer

COPIED = ("chat_template.jinja",)
"""Files of a tokenizer's folder that are copied as they are."""
LEFT_OUT = ("add_bos_token", "add_eos_token", "auto_map", "tokenizer_file", "vocab_file")
"""Entries of a folder's tokenizer_config.json. The post-processor in ``tokenizer.json`` says what is put around a text,
as in preprocessing."""
INSTEAD = "give --tokenizer-model a tokenizer.json of the same vocabulary"


def write_tokenizer(tokenizer: Tokenizer, path: str, folder: str, seq_length: int) -> None:
    """Write the files of a tokenizer.

    Args:
        path: that the tokenizer was loaded from, a file or a folder.
        folder: where the files go.
        seq_length: most tokens that the model was trained on at once.

    Raises:
        OptionError: no ``tokenizer.json`` gives its ids.
    """
    settings: dict[str, Any] = {}
    output = os.path.join(folder, "tokenizer.json")
    if isinstance(tokenizer, HuggingFaceTokenizer):
        _write(output, _read(tokenizer.path))
        if os.path.isdir(path):
            settings = _settings(path)
            for name in filter(lambda name: os.path.exists(os.path.join(path, name)), COPIED):
                _write(os.path.join(folder, name), _read(os.path.join(path, name)))
    else:
        _write(output, json.dumps(_described(tokenizer), ensure_ascii=False, indent=1).encode())
        _check(tokenizer, output)
    settings = {name: value for name, value in settings.items() if name not in LEFT_OUT}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": seq_length}
    texts = _texts(output)
    for name, number in (("eos_token", tokenizer.eod), ("bos_token", tokenizer.bos)):
        if number is not None:
            settings[name] = texts[number]
    _write(os.path.join(folder, "tokenizer_config.json"), json.dumps(settings, indent=2, sort_keys=True).encode())


def _settings(folder: str) -> dict[str, Any]:
    """A folder's tokenizer_config.json, completed by its special_tokens_map.json."""
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = os.path.join(folder, name)
        if os.path.exists(path):
            settings |= {key: value for key, value in json.loads(_read(path)).items() if value is not None}
    return settings


def _described(tokenizer: Tokenizer) -> dict[str, Any]:
    """The ``tokenizer.json`` of a SentencePiece or tiktoken vocabulary."""
    if normalization(tokenizer) or unknown_token(tokenizer) is not None:
        raise OptionError(
            f"--tokenizer-model {tokenizer.path}: it changes texts, or has no pieces for some characters, which a "
            f"tokenizer.json cannot say; {INSTEAD}"
        )
    try:
        with library_errors(lambda error: NoDescription(str(error))):
            described = description(tokenizer)
    except NoDescription as error:
        raise OptionError(f"--tokenizer-model {tokenizer.path}: {error}; {INSTEAD}") from None
    plain = set(tokenizer.user_defined_texts()) if isinstance(tokenizer, SentencePieceTokenizer) else set()
    added = [text for text in tokenizer.reserved_texts() if not BYTE_TOKEN.fullmatch(text)]
    described["added_tokens"] = [_added(text, tokenizer.token_id(text), text not in plain) for text in added]
    described["model"]["vocab"] |= {text: tokenizer.token_id(text) for text in added}
    if isinstance(tokenizer, SentencePieceTokenizer):
        spaces = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
        steps = [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}]
        if "Prepend" in json.dumps(described["normalizer"]):
            steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        described["decoder"] = {"type": "Sequence", "decoders": steps}
    return described


def _added(text: str, number: int | None, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": text, "special": special} | flags


def _check(tokenizer: Tokenizer, path: str) -> None:
    """Compare a written ``tokenizer.json`` with the vocabulary's own library.

    Raises:
        OptionError: they give different ids.
    """
    written = HuggingFaceTokenizer(path, needs_eod=False)
    texts = list(probes(tokenizer))
    for text, ids, expected in zip(texts, written.encode_batch(texts), tokenizer.encode_batch(texts), strict=True):
        if not np.array_equal(ids, expected):
            raise OptionError(
                f"--tokenizer-model {tokenizer.path}: made a tokenizer.json of it, but that gives other ids for "
                f"{text[:40]!r}; {INSTEAD}"
            )


def _texts(path: str) -> dict[int, str]:
    """The text of each token of a ``tokenizer.json``, as the file writes it."""
    from tokenizers import Tokenizer as Library

    vocabulary = Library.from_file(path).get_vocab(with_added_tokens=True)
    return {number: text for text, number in vocabulary.items()}


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _write(path: str, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
