"""Datasets whose documents have any number of idx sequences."""

import numpy as np
from hypothesis import strategies as st

from megatron_bfp.indexed_dataset.writer import IndexedDatasetWriter

NESTED = st.lists(st.lists(st.lists(st.integers(0, 65535), max_size=6), max_size=4), max_size=8)
"""Documents of idx sequences of tokens."""


def write_nested(prefix, documents, dtype):
    with IndexedDatasetWriter(str(prefix), dtype) as writer:
        for document in documents:
            tokens = [token for sequence in document for token in sequence]
            lengths = np.array([len(sequence) for sequence in document], dtype=np.int64)
            writer.add(np.array(tokens, dtype=np.int64), lengths, [len(document)])
        writer.finalize()
