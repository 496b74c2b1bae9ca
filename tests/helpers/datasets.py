"""Datasets on disk from lists of documents, and where the repository and the tests' data are."""

from pathlib import Path

import numpy as np

from megatron_bfp.indexed_dataset.reader import IndexedDataset
from megatron_bfp.indexed_dataset.writer import IndexedDatasetWriter

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"


def write(prefix, documents, dtype=np.uint16):
    """Write documents (lists of token ids, or of such lists for several sequences a document) and open them."""
    with IndexedDatasetWriter(str(prefix), dtype) as writer:
        for document in documents:
            nested = len(document) and isinstance(document[0], list)
            sequences = document if nested else [document]
            tokens = np.concatenate([np.asarray(sequence, dtype=np.int64) for sequence in sequences])
            writer.add(tokens, np.array([len(sequence) for sequence in sequences]), [len(sequences)])
        writer.finalize()
    return IndexedDataset(str(prefix))


def documents_of(lengths, first_token=1):
    """Documents whose tokens are all different, so that a misplaced one cannot hide."""
    ends = np.cumsum(lengths)
    return [list(range(first_token + end - length, first_token + end)) for end, length in zip(ends, lengths)]
