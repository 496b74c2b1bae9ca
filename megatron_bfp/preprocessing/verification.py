"""A dataset just written, checked from what is on disk: its tokens, and where its documents end."""

from collections.abc import Iterator
from contextlib import suppress
from os import remove

import numpy as np

from ..errors import IndexedDatasetError
from ..indexed_dataset import IndexedDataset, bin_path, idx_path
from ..progress import Progress, without_progress

BLOCK_TOKENS = 1 << 22
BLOCK_DOCUMENTS = 1 << 18


def verify_documents(
    prefix: str, vocab_size: int, eod: int | None = None, progress: Progress = without_progress
) -> IndexedDataset:
    """Check every token of a dataset, in constant memory.

    Args:
        eod: the token that must end every document and stand nowhere else; None for none.

    Returns:
        The dataset, opened.

    Raises:
        IndexedDatasetError: a token is outside the vocabulary, a document does not end in EOD or holds one before its
            end, or the files cannot be read.
    """
    dataset = IndexedDataset(prefix)
    num_eods = 0
    blocks = range(0, dataset.num_tokens, BLOCK_TOKENS)
    for start in progress(blocks, len(blocks), "checking what was written"):
        tokens = dataset.tokens(start, min(BLOCK_TOKENS, dataset.num_tokens - start))
        lowest, highest = int(tokens.min()), int(tokens.max())
        if lowest < 0 or highest >= vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise IndexedDatasetError(
                f"{bin_path(prefix)}: holds token {wrong}, outside the {vocab_size} of the tokenizer"
            )
        num_eods += int(np.count_nonzero(tokens == eod)) if eod is not None else 0
    if eod is not None:
        _check_ends(dataset, eod)
        if num_eods != dataset.num_documents:
            raise IndexedDatasetError(
                f"{bin_path(prefix)}: holds {num_eods} EOD tokens ({eod}) in {dataset.num_documents} documents; the "
                "tokenizer makes one of a text: please report this tokenizer"
            )
    return dataset


def _check_ends(dataset: IndexedDataset, eod: int) -> None:
    tokens = dataset.tokens(0, dataset.num_tokens)
    for first, last_tokens in _last_tokens(dataset):
        others = np.flatnonzero(tokens[last_tokens] != eod)
        if len(others):
            raise IndexedDatasetError(
                f"{bin_path(dataset.prefix)}: document {first + others[0]} does not end in EOD ({eod}); run this again"
            )


def _last_tokens(dataset: IndexedDataset) -> Iterator[tuple[int, np.ndarray]]:
    """Blocks of documents: the first's number, and int64 [documents], the place of each one's last token."""
    end = 0
    for first in range(0, dataset.num_documents, BLOCK_DOCUMENTS):
        lengths = dataset.document_lengths[first : first + BLOCK_DOCUMENTS].astype(np.int64)
        ends = end + np.cumsum(lengths)
        end = int(ends[-1])
        yield first, ends - 1


def remove_dataset(prefix: str) -> None:
    """Remove a dataset's two files, the .idx first: without it there is no dataset."""
    for path in (idx_path(prefix), bin_path(prefix)):
        with suppress(FileNotFoundError):
            remove(path)
