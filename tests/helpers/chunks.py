"""The chunks of a sequence index as ``Packing`` gives them, to compare both."""

import numpy as np


def chunk_rows(index, sequence):
    """int64 [k, 3]: document, offset in it and length of each chunk of a sequence, from its ``ChunkSpan``s."""
    rows = []
    for chunk in index.chunk_spans(sequence):
        ((document_start, document_end),) = index.dataset.spans(np.array([chunk.document]))
        assert document_start <= chunk.start < chunk.end <= chunk.document_end == document_end
        rows.append((chunk.document, chunk.start - document_start, chunk.end - chunk.start))
    return np.array(rows, dtype=np.int64)
