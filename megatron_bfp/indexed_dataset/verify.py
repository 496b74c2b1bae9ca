"""Check the tokens of a dataset, which no checksum covers: ids in the vocabulary, BOS and EOD of every document."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ..errors import IndexedDatasetError
from ..progress import Progress, without_progress
from .format import bin_path
from .reader import IndexedDataset

NUM_THREADS = min(4, os.cpu_count() or 1)
BLOCK_TOKENS = 1 << 20
"""That a thread checks at once: few enough to stay in its core's cache."""
BLOCK_DOCUMENTS = 1 << 18


def verify_tokens(
    dataset: IndexedDataset,
    vocab_size: int,
    eod: int | None = None,
    progress: Progress = without_progress,
    before: Sequence[int] = (),
) -> int:
    """Check every token of a dataset whose .bin is mapped, in constant memory. Empty documents are passed over.

    Args:
        eod: the token that must end every document; None for none.
        before: the tokens that every document must begin with, BOS as a rule.

    Returns:
        How many of its tokens are ``eod``.

    Raises:
        IndexedDatasetError: a token is outside the vocabulary, a document does not begin with ``before`` or does not
            end in EOD, or the .idx is damaged.
    """
    num_eods = 0
    at_once = NUM_THREADS * BLOCK_TOKENS
    steps = range(0, dataset.num_tokens, at_once)
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        for first in progress(steps, len(steps), "checking tokens"):
            blocks = range(first, min(first + at_once, dataset.num_tokens), BLOCK_TOKENS)
            num_eods += sum(threads.map(lambda start: _check_block(dataset, start, vocab_size, eod), blocks))
    if eod is not None or before:
        _check_ends(dataset, eod, tuple(before), progress)
    return num_eods


def _check_block(dataset: IndexedDataset, start: int, vocab_size: int, eod: int | None) -> int:
    """Check the ids of a block of tokens; returns how many are ``eod``."""
    tokens = dataset.tokens(start, min(BLOCK_TOKENS, dataset.num_tokens - start))
    unsigned = tokens.view(f"u{tokens.itemsize}")  # what is below 0 is far above any vocabulary
    if int(unsigned.max()) >= vocab_size:
        worst = int(unsigned.argmax())
        raise IndexedDatasetError(
            f"{bin_path(dataset.prefix)}: holds token {tokens[worst]}, outside the {vocab_size} of the tokenizer, "
            f"at token {start + worst} of the file; write the dataset again with this tokenizer"
        )
    return 0 if eod is None else int(np.count_nonzero(tokens == eod))


def _check_ends(dataset: IndexedDataset, eod: int | None, before: tuple[int, ...], progress: Progress) -> None:
    """Check the first tokens of each document, and the last one."""
    tokens = dataset.tokens(0, dataset.num_tokens)
    num_blocks = -(-dataset.num_documents // BLOCK_DOCUMENTS)
    for documents, begins, ends in progress(_spans(dataset), num_blocks, "checking ends of documents"):
        for offset, token in enumerate(before):
            inside = np.minimum(begins + offset, ends - 1)  # of a document with too few tokens, its last one
            others = documents[(tokens[inside] != token) | (begins + offset >= ends)]
            if len(others):
                raise IndexedDatasetError(
                    f"{bin_path(dataset.prefix)}: document {others[0]} does not begin with BOS ({_ids(before)}); write "
                    "the dataset again, or give --no-append-bos if it is to have none"
                )
        if eod is None:
            continue
        others = documents[tokens[ends - 1] != eod]
        if len(others):
            raise IndexedDatasetError(
                f"{bin_path(dataset.prefix)}: document {others[0]} does not end in EOD ({eod}); write the dataset "
                "again, with --append-eod"
            )


def _ids(tokens: Sequence[int]) -> str:
    return ", ".join(map(str, tokens))


def _spans(dataset: IndexedDataset) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Blocks of the documents that have tokens: int64 [documents], their numbers, first tokens and ends."""
    end = 0
    for first in range(0, dataset.num_documents, BLOCK_DOCUMENTS):
        lengths = dataset.document_lengths[first : first + BLOCK_DOCUMENTS].astype(np.int64)
        ends = end + np.cumsum(lengths)
        end = int(ends[-1])
        with_tokens = np.flatnonzero(lengths)
        yield first + with_tokens, (ends - lengths)[with_tokens], ends[with_tokens]
