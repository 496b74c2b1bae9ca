"""Token ids that a model has no embedding for: found before they train, and named with their corpus and document.

What counts is the number of rows of the model's embedding, all tensor-parallel ranks together. With one rank such an id
is an IndexError, on a GPU a failed assertion of a kernel; with several, every rank takes it for a row of another rank,
and training goes on without a word.
"""

from bisect import bisect_right
from collections.abc import Iterable
from typing import NoReturn

import numpy as np

from ..errors import IndexedDatasetError
from ..indexed_dataset.format import bin_path
from ..indexed_dataset.reader import IndexedDataset

SAMPLED_BLOCKS = 256
BLOCK_TOKENS = 4096


def has_others(tokens: np.ndarray, vocab_size: int) -> bool:
    """Whether an id is not in 0 .. ``vocab_size`` - 1.

    Args:
        tokens: any integers [any], contiguous.
    """
    if not len(tokens):
        return False
    if tokens.dtype.kind != "u":
        vocab_size = min(vocab_size, 1 << (8 * tokens.itemsize - 1))
        tokens = tokens.view(f"u{tokens.itemsize}")  # what is below 0 is above all that the dtype holds
    return bool(np.maximum.reduce(tokens) >= vocab_size)  # without numpy's wrapper: it is done for each sample


def check_spans(dataset: IndexedDataset, spans: Iterable[tuple[int, int]], vocab_size: int) -> None:
    """Check the ids of parts of a .bin.

    Args:
        spans: start and end of each part, in tokens from the start of the .bin.
        vocab_size: rows of the model's embedding.

    Raises:
        IndexedDatasetError: an id is outside.
    """
    for start, end in spans:
        tokens = dataset.tokens(start, end - start)
        if has_others(tokens, vocab_size):
            wrong = int(np.argmax((tokens < 0) | (tokens >= vocab_size)))
            _refuse(dataset, start + wrong, int(tokens[wrong]), vocab_size)


def check_sampled_ids(dataset: IndexedDataset, vocab_size: int) -> None:
    """Check the ids of 256 blocks of 4,096 tokens, evenly over the .bin: all of a small one, 2 MB of a large one.

    Raises:
        IndexedDatasetError: an id is outside.
    """
    if np.iinfo(dataset.dtype).min == 0 and np.iinfo(dataset.dtype).max < vocab_size:
        return
    last = max(0, dataset.num_tokens - BLOCK_TOKENS)
    starts = np.unique(np.linspace(0, last, SAMPLED_BLOCKS, dtype=np.int64)).tolist()
    check_spans(dataset, ((start, min(start + BLOCK_TOKENS, dataset.num_tokens)) for start in starts), vocab_size)


def _refuse(dataset: IndexedDataset, position: int, token: int, vocab_size: int) -> NoReturn:
    """Name the document of a token.

    Args:
        position: where the token is, in tokens from the start of the .bin.
    """
    sequence = bisect_right(dataset.sequence_pointers, position * dataset.dtype.itemsize) - 1
    document = bisect_right(dataset.document_indices, sequence) - 1
    raise IndexedDatasetError(
        f"{bin_path(dataset.prefix)}: document {document} holds the token id {token}, the model's vocabulary ends at "
        f"{vocab_size - 1}; train with the tokenizer that the corpus was written with, or write the corpus again"
    )
