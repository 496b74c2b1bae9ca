"""Datasets of computed documents, and tokenizers for them."""

import json
from collections.abc import Sequence

import numpy as np

from megatron_bfp.files import write_whole
from megatron_bfp.indexed_dataset.writer import IndexedDatasetWriter

EOD = "<eod>"


def write_documents(prefix: str, tokens: np.ndarray, lengths: np.ndarray) -> None:
    """Write a dataset.

    Args:
        tokens: of all documents, concatenated.
        lengths: int64 [documents].
    """
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        writer.add(tokens, lengths)
        writer.finalize()


def write_tokenizer(path: str, words: Sequence[str]) -> None:
    """Write a ``tokenizer.json`` in which a word's id is its position in ``words``, and EOD has the next id."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": len(words), "content": EOD, "special": True, **flags}],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {
            "type": "WordLevel",
            "vocab": {word: number for number, word in enumerate(words)},
            "unk_token": words[0],
        },
    }
    write_whole(path, json.dumps(tokenizer).encode())
