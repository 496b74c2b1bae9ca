"""A batch of raw documents to token ids."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..tokenizers.interface import Tokenizer, TokenizingError, first_line
from ..tokenizers.special_tokens import DocumentTemplate
from .readers.documents import BadDocument, Batch, Record


@dataclass(frozen=True)
class TokenizedTexts:
    """The texts of a batch under one key."""

    tokens: np.ndarray
    """int32 [sum of lengths]."""
    lengths: np.ndarray
    """int64 [documents], special tokens included."""
    num_empty: int
    """Texts that are empty, hold only white space, or give no token; they are left out."""


@dataclass(frozen=True)
class TokenizedBatch:
    """The documents of a batch."""

    texts: tuple[TokenizedTexts, ...]
    """[keys]."""
    bad: tuple[BadDocument, ...]
    """Documents that cannot be used, left out under every key."""
    num_documents: int
    """All of them, good and bad."""
    sample: tuple[str, ...]
    """The texts of one of them."""


def tokenize(batch: Batch, keys: Sequence[str], tokenizer: Tokenizer, template: DocumentTemplate) -> TokenizedBatch:
    """Parse and tokenize a batch. A document that is bad under one key is bad under all keys.

    Args:
        template: the special tokens around each document.

    Raises:
        OptionError: a library that the batch needs is not installed.
    """
    documents = list(batch.records(keys))
    records = [document for document in documents if isinstance(document, Record)]
    bad = [document for document in documents if isinstance(document, BadDocument)]
    try:
        texts = _tokenize_records(records, len(keys), tokenizer, template)
    except TokenizingError:
        records, more_bad = _encodable(records, tokenizer)
        bad = sorted([*bad, *more_bad], key=_position)
        texts = _tokenize_records(records, len(keys), tokenizer, template)
    sample = tuple(records[len(records) // 2].texts) if records else ()
    return TokenizedBatch(texts, tuple(bad), len(documents), sample)


def _position(document: BadDocument) -> int:
    return document.location.row or document.location.line or 0


def _tokenize_records(
    records: list[Record], num_keys: int, tokenizer: Tokenizer, template: DocumentTemplate
) -> tuple[TokenizedTexts, ...]:
    return tuple(
        _tokenize_texts([record.texts[key] for record in records], tokenizer, template) for key in range(num_keys)
    )


def _tokenize_texts(texts: list[str], tokenizer: Tokenizer, template: DocumentTemplate) -> TokenizedTexts:
    with_text = [text for text in texts if text and not text.isspace()]
    documents = [document for document in tokenizer.encode_batch(with_text) if len(document)]
    before, after = (np.array(ids, dtype=np.int32) for ids in (template.before, template.after))
    lengths = np.array([len(before) + len(document) + len(after) for document in documents], dtype=np.int64)
    tokens = np.concatenate([part for document in documents for part in (before, document, after)] or [before[:0]])
    return TokenizedTexts(tokens, lengths, len(texts) - len(lengths))


def _encodable(records: list[Record], tokenizer: Tokenizer) -> tuple[list[Record], list[BadDocument]]:
    """Encode records one by one: those that the tokenizer's library can encode, and the others."""
    good, bad = [], []
    for record in records:
        try:
            tokenizer.encode_batch(record.texts)
            good.append(record)
        except TokenizingError as error:
            bad.append(BadDocument(record.location, f"the tokenizer's library cannot encode it: {first_line(error)}"))
    return good, bad
