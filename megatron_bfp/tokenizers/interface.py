"""What every tokenizer gives: token ids, and what Megatron asks of a tokenizer (``vocab_size``, ``eod``, ``pad``).

Text is text: a document may contain the characters ``<|endoftext|>``, and they must not become the end-of-document
token. Tokenizer libraries turn the texts of special tokens into these tokens, so they encode without knowing them.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import BFPError, OptionError
from .files import read_tokenizer_file


class Tokenizer(ABC):
    """A tokenizer of one library.

    Attributes:
        path: of the file it was loaded from.
        vocab_size: the highest token id and one more.
        eod: id of the end-of-document token; None for none.
        bos: id of the token that begins a document if one is asked for; None for none.
        library_adds_before, library_adds_after: ids that the library adds to each text when it is called as Megatron's
            tool calls it. ``encode_batch`` leaves them out; ``special_tokens`` says what is written.
        warning: what people should know before they tokenize with it; None for nothing.
        pad: always -1, the id Megatron uses for "none": masks come from positions.
    """

    pad = -1
    path: str
    vocab_size: int
    eod: int | None
    bos: int | None
    library_adds_before: tuple[int, ...] = ()
    library_adds_after: tuple[int, ...] = ()
    warning: str | None = None
    _content: bytes

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, int32 [length], without any special token.

        Raises:
            TokenizingError: the library cannot encode one of them.
        """

    @abstractmethod
    def reserved_texts(self) -> list[str]:
        """Texts of tokens that are not ordinary pieces: special, control, user-defined and added ones."""

    @abstractmethod
    def token_id(self, text: str) -> int | None:
        """The id of the token of this text, special or not; None if there is none."""

    @abstractmethod
    def pieces(self, ids: Sequence[int]) -> list[bytes]:
        """The text of each token, in UTF-8. A token may hold only some of a character's bytes.

        Raises:
            OptionError: a token is not in the vocabulary.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, special ones included. Characters that are cut at either end are U+FFFD.

        Raises:
            As ``pieces``.
        """
        return b"".join(self.pieces(ids)).decode("utf-8", errors="replace")

    @cached_property
    def unique_identifiers(self) -> dict[str, Any]:
        """What distinguishes this tokenizer from others, for Megatron's dataset caches."""
        return {
            "class": type(self).__name__,
            "sha256": hashlib.sha256(self._content).hexdigest(),
            "eod": self.eod,
        }

    def _read(self, path: str) -> bytes:
        self.path = path
        self._content = read_tokenizer_file(path)
        return self._content

    def _eod_is_in_texts(self, text: str) -> OptionError:
        """What to raise if a text's own characters can become the EOD."""
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


@contextmanager
def library_errors(replaced_by: Callable[[BaseException], Exception]) -> Iterator[None]:
    """Replace errors of a tokenizer's library, panics of its Rust code included, by those of ``replaced_by``."""
    try:
        yield
    except (BFPError, TokenizingError):
        raise
    except BaseException as error:
        if not is_from_library(error):
            raise
        raise replaced_by(error) from None


def is_from_library(error: BaseException) -> bool:
    """Whether an error is a library's. A panic of Rust code (``pyo3_runtime.PanicException``) is not an Exception."""
    if isinstance(error, MemoryError):
        return False
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def first_line(error: BaseException) -> str:
    """What an error says, shortened to a line."""
    return (str(error).strip() or type(error).__name__).split("\n")[0]


def has_no_eod(path: str) -> OptionError:
    """What to raise if a tokenizer names no EOD and none was given."""
    return OptionError(f"--tokenizer-model {path}: names no end-of-document token; give it with --eod-token")
