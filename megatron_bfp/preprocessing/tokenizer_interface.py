"""What every tokenizer gives: token ids, and what Megatron asks of a tokenizer (``vocab_size``, ``eod``, ``pad``).

Text is text: a document may contain the characters ``<|endoftext|>``, and they must not become the end-of-document
token. Tokenizer libraries do that to special tokens they find in a text, so encoding runs without them.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import OptionError


class Tokenizer(ABC):
    """A tokenizer of one library.

    Attributes:
        path: of the file it was loaded from.
        vocab_size: the highest token id and one more.
        eod: id of the end-of-document token, None for none.
        pad: always -1, the id Megatron uses for "none": masks come from positions.
    """

    pad = -1
    path: str
    vocab_size: int
    eod: int | None
    _content: bytes

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, int32 [length], without any special token.

        Raises:
            TokenizingError: the library cannot encode one of them.
        """

    @abstractmethod
    def reserved_texts(self) -> list[str]:
        """Texts of tokens that are no ordinary piece: special, control, user-defined and added ones."""

    @abstractmethod
    def pieces(self, ids: Sequence[int]) -> list[bytes]:
        """The text of each token, in UTF-8. A token may hold a part of a character's bytes.

        Raises:
            OptionError: a token is not in the vocabulary.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, special ones included; U+FFFD for what is cut off of a character at either end.

        Raises:
            As ``pieces``.
        """
        return b"".join(self.pieces(ids)).decode("utf-8", errors="replace")

    @cached_property
    def unique_identifiers(self) -> dict[str, Any]:
        """What tells this tokenizer from others, for Megatron's dataset caches."""
        return {
            "class": type(self).__name__,
            "sha256": hashlib.sha256(self._content).hexdigest(),
            "eod": self.eod,
        }

    def _read(self, path: str) -> bytes:
        self.path = path
        try:
            with open(path, "rb") as file:
                self._content = file.read()
        except OSError as error:
            raise OptionError(f"--tokenizer-model {path}: {error.strerror}") from None
        return self._content

    def _eod_is_in_texts(self, text: str) -> OptionError:
        """What to raise where a text's own characters can become the EOD."""
        return OptionError(
            f"--tokenizer-model {self.path}: turns the text {text!r} into the end-of-document token, which would end "
            "documents where they do not end; choose another --eod-token, or a tokenizer that keeps it out of its model"
        )

    def _has_no_token(self, number: int) -> OptionError:
        return OptionError(
            f"--tokenizer-model {self.path}: has no token {number}; give the tokenizer the dataset was made with"
        )


class TokenizingError(Exception):
    """A text that a tokenizer's library cannot encode. Its message is the library's."""


def has_no_eod(path: str) -> OptionError:
    """What to raise where a tokenizer names no EOD and none was given."""
    return OptionError(f"--tokenizer-model {path}: names no end-of-document token; give it with --eod-token")
