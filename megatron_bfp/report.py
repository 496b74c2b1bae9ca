"""What packing a corpus saves: documents cut by concatenation and by packing, sequences and padding of both."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .packing import BLOCK
from .sequence_index import SequenceIndex


@dataclass(frozen=True)
class Truncation:
    """Documents that a way of making sequences cuts: all, and those that would have fitted into one sequence."""

    documents: int
    needlessly: int
    """Documents of at most L tokens."""


def cut_by_concatenation(lengths: Any, seq_length: int) -> Truncation:
    """Documents cut when all are joined in file order and cut every L tokens, the usual way.

    Args:
        lengths: integers [documents], tokens; anything with a length whose slices are numpy arrays.
    """
    documents = needlessly = position = 0
    for first in range(0, len(lengths), BLOCK):
        block = np.asarray(lengths[first : first + BLOCK], dtype=np.int64)
        ends = position + np.cumsum(block)
        starts = ends - block
        cut = (starts // seq_length + 1) * seq_length < ends
        documents += int(np.count_nonzero(cut))
        needlessly += int(np.count_nonzero(cut & (block <= seq_length)))
        position = int(ends[-1])
    return Truncation(documents, needlessly)


def cut_by_packing(index: SequenceIndex) -> Truncation:
    """Documents that an index puts into more than one sequence, by counting the chunks it has of each."""
    table, key = index.table, index.key
    chunks = np.zeros(key.end_document - key.first_document, dtype=np.uint32)
    for first in range(0, len(table.document_ids), BLOCK):
        block = table.document_ids[first : first + BLOCK].astype(np.int64)
        np.add.at(chunks, block - key.first_document, 1)
    full_chunks = np.diff(table.long_documents[:, 1], prepend=0)
    np.add.at(chunks, table.long_documents[:, 0] - key.first_document, full_chunks.astype(np.uint32))
    documents = np.flatnonzero(chunks > 1) + key.first_document
    needlessly = 0
    for first in range(0, len(documents), BLOCK):
        lengths = index.dataset.document_lengths[documents[first : first + BLOCK]]
        needlessly += int(np.count_nonzero(lengths <= key.seq_length))
    return Truncation(len(documents), needlessly)


def format_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Rows as aligned text: numbers to the right with thousands separated, the rest to the left."""
    cells = [[str(cell) if isinstance(cell, str) else f"{cell:,}" for cell in row] for row in [header, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    left = [all(isinstance(row[column], str) for row in rows) for column in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(width) if to_left else cell.rjust(width) for cell, width, to_left in zip(row, widths, left)
        )
        for row in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)
