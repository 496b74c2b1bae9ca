"""Check the tokens of a dataset, which no checksum covers: ids in the vocabulary, an EOD at every document's end."""

from collections.abc import Iterator

import numpy as np

from .errors import IndexedDatasetError
from .indexed_dataset import IndexedDataset, bin_path
from .progress import Progress, without_progress

BLOCK_TOKENS = 1 << 22
BLOCK_DOCUMENTS = 1 << 18


def verify_tokens(
    dataset: IndexedDataset, vocab_size: int, eod: int | None = None, progress: Progress = without_progress
) -> int:
    """Check every token of a dataset whose .bin is mapped, in constant memory. Empty documents are passed over.

    Args:
        eod: the token that must end every document; None for none.

    Returns:
        How many of its tokens are ``eod``.

    Raises:
        IndexedDatasetError: a token is outside the vocabulary, a document does not end in EOD, or the .idx is damaged.
    """
    num_eods = 0
    blocks = range(0, dataset.num_tokens, BLOCK_TOKENS)
    for start in progress(blocks, len(blocks), "checking tokens"):
        tokens = dataset.tokens(start, min(BLOCK_TOKENS, dataset.num_tokens - start))
        lowest, highest = int(tokens.min()), int(tokens.max())
        if lowest < 0 or highest >= vocab_size:
            place = int(tokens.argmin() if lowest < 0 else tokens.argmax())
            raise IndexedDatasetError(
                f"{bin_path(dataset.prefix)}: holds token {tokens[place]}, outside the {vocab_size} of the tokenizer, "
                f"at place {start + place}; write the dataset again with this tokenizer"
            )
        num_eods += int(np.count_nonzero(tokens == eod)) if eod is not None else 0
    if eod is not None:
        _check_ends(dataset, eod, progress)
    return num_eods


def _check_ends(dataset: IndexedDataset, eod: int, progress: Progress) -> None:
    tokens = dataset.tokens(0, dataset.num_tokens)
    num_blocks = -(-dataset.num_documents // BLOCK_DOCUMENTS)
    for documents, places in progress(_last_tokens(dataset), num_blocks, "checking ends of documents"):
        others = documents[tokens[places] != eod]
        if len(others):
            raise IndexedDatasetError(
                f"{bin_path(dataset.prefix)}: document {others[0]} does not end in EOD ({eod}); write the dataset "
                "again, with --append-eod"
            )


def _last_tokens(dataset: IndexedDataset) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Blocks of the documents that have tokens: int64 [documents], their numbers and where their last tokens are."""
    end = 0
    for first in range(0, dataset.num_documents, BLOCK_DOCUMENTS):
        lengths = dataset.document_lengths[first : first + BLOCK_DOCUMENTS].astype(np.int64)
        ends = end + np.cumsum(lengths)
        end = int(ends[-1])
        with_tokens = np.flatnonzero(lengths)
        yield first + with_tokens, ends[with_tokens] - 1
