"""A second, faster implementation of the same tokenizer, by the ``gigatoken`` library, held against the reference.

Only ids equal to the reference's are of use, and no implementation is trusted to give them. When it is loaded, both
encode the texts of ``probes``, and a tokenizer that differs in one of them is not used. Callers that encode documents
also call ``check`` on some of them.
"""

import json
import re
from collections.abc import Callable, Sequence
from mmap import PAGESIZE
from typing import Any

import numpy as np

from ...errors import BFPError
from ..interface import Tokenizer, TokenizingError, first_line, is_from_library
from .descriptions import NoDescription, described_otherwise, description, normalization, unknown_token
from .probes import probes

FEWEST_CHARACTERS, MOST_CHARACTERS = 1 << 26, 1 << 31
MOST_GROWTH = 512 << 20
"""Gigatoken's tokenizer is replaced after so many characters, or sooner if the process has grown by so many bytes."""


class NoFastTokenizer(Exception):
    """There is no fast tokenizer for a reference. Its message is the reason."""


class DifferentIds(BFPError):
    """The fast tokenizer gives other token ids for a text than the reference."""


class FastTokenizer(Tokenizer):
    """Encodes with gigatoken; all else is the reference's.

    Args:
        reference: whose ids it gives.
        load: gigatoken's tokenizer of the same vocabulary, a new one at each call.
        left_out: finds what the backend does not know; texts that contain it are encoded by the reference.
        prepare: changes a text into the one that the backend is given.
        unknown: id of what is not in the vocabulary. The backend then numbers that from ``vocab_size`` on, and the
            reference writes a single ``unknown`` for a run of it. None if there are tokens for everything.
    """

    def __init__(
        self,
        reference: Tokenizer,
        load: Callable[[], Any],
        left_out: re.Pattern[str] | None = None,
        prepare: Callable[[str], str] | None = None,
        unknown: int | None = None,
    ) -> None:
        self._left_out, self._prepare, self._unknown = left_out, prepare, unknown
        self._reference = reference
        self._load = load
        self._renew()
        self.path, self.vocab_size = reference.path, reference.vocab_size
        self.eod, self.bos = reference.eod, reference.bos
        self.library_adds_before = reference.library_adds_before
        self.library_adds_after = reference.library_adds_after

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """As ``Tokenizer.encode_batch``. What gigatoken cannot encode, the reference encodes or refuses."""
        if self._remembers_too_much():
            try:
                self._renew()
            except BaseException as error:  # the reference encodes then
                if not is_from_library(error):
                    raise
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> np.ndarray:
        try:
            prepared = self._prepare(text) if self._prepare else text
            if self._left_out is None or not self._left_out.search(prepared):
                return self._encode_prepared(prepared)
        except BaseException as error:
            if not is_from_library(error):
                raise
        return self._reference.encode_batch([text])[0]

    def encode_without_reference(self, text: str) -> np.ndarray:
        """Token ids by gigatoken alone, int32 [length]: it fails if that fails, and differs if ``left_out`` matches.

        Raises:
            Whatever gigatoken raises. A panic of its Rust code is not derived from Exception.
        """
        return self._encode_prepared(self._prepare(text) if self._prepare else text)

    def _encode_prepared(self, text: str) -> np.ndarray:
        self._encoded += len(text)
        # Text by text: a batch is not faster, and its ids would have to be split.
        ids = self._backend.encode(text).view(np.int32)
        return ids if self._unknown is None else _with_unknown(ids, self.vocab_size, self._unknown)

    def _renew(self) -> None:
        """Load a backend without words. Each remembers all words it has met, 80 bytes each, for as long as it lives."""
        self._backend: Any = None  # to be freed before there is another
        self._backend = self._load()
        self._encoded, self._resident = 0, _resident_bytes()

    def _remembers_too_much(self) -> bool:
        if self._encoded < FEWEST_CHARACTERS:
            return False
        return self._encoded > MOST_CHARACTERS or _resident_bytes() - self._resident > MOST_GROWTH

    def check(self, texts: Sequence[str]) -> None:
        """Compare with the reference. Both encode the texts whole, so they should be short.

        Raises:
            DifferentIds: the ids of a text differ. The message says which one and where, not what it is.
            TokenizingError: the reference cannot encode one of them.
        """
        documents, expected = self.encode_batch(texts), self._reference.encode_batch(texts)
        for number, (ids, expected_ids) in enumerate(zip(documents, expected, strict=True)):
            if not np.array_equal(ids, expected_ids):
                raise DifferentIds(
                    f"{self.path}: gigatoken's tokens differ from its own library's in text {number} of {len(texts)}, "
                    f"{len(texts[number])} characters long, at token {_first_difference(ids, expected_ids)}"
                )

    def reserved_texts(self) -> list[str]:
        """As ``Tokenizer.reserved_texts``."""
        return self._reference.reserved_texts()

    def token_id(self, text: str) -> int | None:
        """As ``Tokenizer.token_id``."""
        return self._reference.token_id(text)

    def pieces(self, ids: Sequence[int]) -> list[bytes]:
        """As ``Tokenizer.pieces``."""
        return self._reference.pieces(ids)

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        """The reference's: datasets are the same."""
        return self._reference.unique_identifiers


def _with_unknown(ids: np.ndarray, vocab_size: int, unknown: int) -> np.ndarray:
    """``ids`` with one ``unknown`` for each run of ids from ``vocab_size`` on."""
    is_unknown = ids >= vocab_size
    if not is_unknown.any():
        return ids
    is_first = is_unknown.copy()
    is_first[1:] &= ~is_unknown[:-1]
    return np.where(is_unknown, np.int32(unknown), ids)[~is_unknown | is_first]


def load_fast_tokenizer(reference: Tokenizer) -> FastTokenizer:
    """A tokenizer that gives the reference's ids in less time.

    Raises:
        NoFastTokenizer: gigatoken is not installed, it does not know such a tokenizer, or its ids differ.
    """
    try:
        from gigatoken import gigatoken_rs
    except ImportError:
        raise NoFastTokenizer("the gigatoken package is missing: pip install 'megatron-bfp[preprocess]'") from None
    texts = list(probes(reference))
    try:
        described = json.dumps(description(reference))
        fast = FastTokenizer(
            reference,
            lambda: gigatoken_rs.load_hf_json(described),
            described_otherwise(reference),
            normalization(reference),
            unknown_token(reference),
        )
        for text in texts:
            fast.encode_without_reference(text)
    except NoDescription as error:
        raise NoFastTokenizer(str(error)) from None
    except BaseException as error:
        if not is_from_library(error):
            raise
        raise NoFastTokenizer(f"gigatoken cannot run it: {first_line(error)}") from None
    try:
        fast.check(texts)
    except (DifferentIds, TokenizingError) as error:
        raise NoFastTokenizer(f"gigatoken's tokens differ from those of its own library ({error})") from None
    return fast


def _resident_bytes() -> int:
    """This process's resident memory; 0 if the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * PAGESIZE
    except OSError:
        return 0


def _first_difference(ids: np.ndarray, expected: np.ndarray) -> int:
    shorter = min(len(ids), len(expected))
    different = np.flatnonzero(ids[:shorter] != expected[:shorter])
    return int(different[0]) if len(different) else shorter
