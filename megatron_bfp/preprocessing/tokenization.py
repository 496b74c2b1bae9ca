"""A batch of raw documents to token ids: what a worker process does with it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .documents import BadDocument, Batch, Record
from .tokenizer_interface import Tokenizer, TokenizingError
from .tokenizers import TiktokenOptions, load_tokenizer


@dataclass(frozen=True)
class TokenizerOptions:
    """What a worker process needs to load the tokenizer."""

    tokenizer_type: str
    path: str
    eod_token: str | None
    append_eod: bool
    tiktoken: TiktokenOptions = TiktokenOptions()

    def load(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            OptionError: it cannot be loaded, or has no EOD to append.
        """
        return load_tokenizer(self.tokenizer_type, self.path, self.eod_token, self.append_eod, self.tiktoken)


@dataclass(frozen=True)
class TokenizedTexts:
    """The texts of a batch under one key."""

    tokens: np.ndarray
    """int32 [sum of lengths]."""
    lengths: np.ndarray
    """int64 [documents], EOD included."""
    num_empty: int
    """Texts without a character but white space, or without a token; they are left out."""


@dataclass(frozen=True)
class TokenizedBatch:
    """The documents of a batch."""

    texts: tuple[TokenizedTexts, ...]
    """[keys]."""
    bad: tuple[BadDocument, ...]
    """Documents that cannot be used, left out under every key."""


def tokenize(batch: Batch, keys: Sequence[str], tokenizer: Tokenizer, append_eod: bool) -> TokenizedBatch:
    """Parse and tokenize a batch. A document that is bad under one key is bad under all.

    Raises:
        OptionError: a library that the batch needs is not installed.
    """
    records, bad = [], []
    for document in batch.records(keys):
        (records if isinstance(document, Record) else bad).append(document)
    try:
        ids = [_encode([record.texts[place] for record in records], tokenizer) for place in range(len(keys))]
    except TokenizingError:
        records, more_bad = _encodable(records, tokenizer)
        bad = sorted([*bad, *more_bad], key=lambda document: document.place.row or document.place.line)
        ids = [_encode([record.texts[place] for record in records], tokenizer) for place in range(len(keys))]
    end = np.array([tokenizer.eod] if append_eod else [], dtype=np.int32)
    return TokenizedBatch(tuple(_joined(documents, end) for documents in ids), tuple(bad))


def _encode(texts: list[str], tokenizer: Tokenizer) -> list[np.ndarray]:
    """int32 [length] for each text; of length 0 for texts of white space."""
    with_text = [place for place, text in enumerate(texts) if text and not text.isspace()]
    ids = [np.empty(0, dtype=np.int32)] * len(texts)
    for place, tokens in zip(with_text, tokenizer.encode_batch([texts[place] for place in with_text]), strict=True):
        ids[place] = tokens
    return ids


def _encodable(records: list[Record], tokenizer: Tokenizer) -> tuple[list[Record], list[BadDocument]]:
    """The records that the tokenizer's library can encode, one by one, and the others."""
    good, bad = [], []
    for record in records:
        try:
            tokenizer.encode_batch(record.texts)
            good.append(record)
        except TokenizingError as error:
            reason = str(error).strip().split("\n")[0]
            bad.append(BadDocument(record.place, f"the tokenizer's library cannot encode it: {reason}"))
    return good, bad


def _joined(documents: list[np.ndarray], end: np.ndarray) -> TokenizedTexts:
    """Documents one after another, each with ``end`` behind it."""
    with_tokens = [document for document in documents if len(document)]
    lengths = np.array([len(document) + len(end) for document in with_tokens], dtype=np.int64)
    pieces = [piece for document in with_tokens for piece in (document, end)]
    tokens = np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int32)
    return TokenizedTexts(tokens, lengths, len(documents) - len(with_tokens))
