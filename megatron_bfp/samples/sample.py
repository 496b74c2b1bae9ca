"""One training sequence to the arrays a model trains on: tokens, labels, loss mask, positions, boundaries.

A sample has L positions, all inputs. Each label is the next token of the same document, read from the document itself:
at the end of a chunk that is not its document's last, it is the first token of the next chunk; at the end of a document
there is none. So over an epoch every token is an input exactly once, and every token but a document's first is a target
exactly once. With targets only, a document's last token is no input, so every input has a target.

The index decides which positions have a target, never the value of a token: padding may equal EOD, and EOD may occur
inside a text.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..indexed_dataset.reader import IndexedDataset
from ..packing.chunks import ChunkSpan
from .fill_in_the_middle import NUM_SENTINELS, FimEpoch, RearrangedSpan
from .reused_memory import empty_array
from .vocabulary import check_spans, has_others


class Sample(NamedTuple):
    """The arrays of one sample of L positions. None shares memory with another one that is in use."""

    tokens: np.ndarray
    """int64 [L]: the chunks one after another, then padding (0)."""
    labels: np.ndarray
    """int64 [L]: the next token of the same document, 0 at positions without a target."""
    loss_mask: np.ndarray
    """float32 [L]: 1 at positions with a target, else 0."""
    position_ids: np.ndarray
    """int64 [L]: 0 .. L - 1, or from 0 in every chunk with ``reset_position_ids``."""
    cu_seqlens: np.ndarray
    """int32 [L + 1]: chunk boundaries 0 < b1 < b2 < ..., then L to the end. Padding is a segment of its own."""
    max_seqlen: np.ndarray
    """int32 []: positions of the longest segment, the padding's included."""


def build_sample(
    dataset: IndexedDataset,
    chunks: list[ChunkSpan],
    seq_length: int,
    reset_position_ids: bool = False,
    masked_input: int | None = None,
    vocab_size: int | None = None,
    fim: FimEpoch | None = None,
) -> Sample:
    """Read the chunks of one sequence.

    Args:
        chunks: as ``SequenceIndex.chunk_spans`` gives them.
        reset_position_ids: positions restart at every chunk.
        masked_input: a token id whose positions get no loss (EOD with Megatron's ``eod_mask_loss``).
        vocab_size: rows of the model's embedding; None to take any id.
        fim: how rearranged documents are shown; needed if the index has such ones.

    Raises:
        IndexedDatasetError: the dataset is damaged, or an id is not in the vocabulary.
    """
    row = empty_array(seq_length + 1, dataset.dtype)
    into = row.data  # half the time of copying to slices of an array, and this is done for each chunk
    boundaries, last_positions, last_targets, without_target, longest = [0], [], [], [], 0
    end = num_read = 0
    for chunk in chunks:
        document, chunk_start, chunk_end, document_end = chunk
        length, continues = chunk_end - chunk_start, chunk_end < document_end
        if type(chunk) is RearrangedSpan:
            length += NUM_SENTINELS
        begin, end = end, end + length
        num_read = end + continues  # if it goes on, its next token is the last target
        if type(chunk) is RearrangedSpan:
            if fim is None:
                raise ValueError("the index has documents for fill-in-the-middle: say how they are shown")
            fim.write(document, dataset.view(chunk_start, document_end - chunk_start), into[begin:num_read])
        else:
            into[begin:num_read] = dataset.view(chunk_start, num_read - begin)
        if continues:
            last_targets.append(into[end])
        else:
            last_targets.append(0)
            without_target.append(end - 1)
        last_positions.append(end - 1)
        boundaries.append(end)
        if length > longest:
            longest = length
    if vocab_size is not None and has_others(row[:num_read], vocab_size):
        spans = [(start, stop + (stop < document_end)) for _, start, stop, document_end in chunks]
        check_spans(dataset, spans, vocab_size)
    row[end:] = 0
    tokens, labels = empty_array(seq_length, np.int64), empty_array(seq_length, np.int64)
    tokens[:], labels[:] = row[:-1], row[1:]
    labels[last_positions] = last_targets
    loss_mask = empty_array(seq_length, np.float32)
    loss_mask[:end], loss_mask[end:] = 1.0, 0.0
    loss_mask[without_target] = 0.0
    if masked_input is not None:
        loss_mask[:end][tokens[:end] == masked_input] = 0.0
    position_ids = empty_array(seq_length, np.int64)
    position_ids[:] = _positions(seq_length)
    if reset_position_ids:
        position_ids -= np.repeat(boundaries, np.diff(boundaries, append=seq_length))
    cu_seqlens = empty_array(seq_length + 1, np.int32)
    cu_seqlens[: len(boundaries)], cu_seqlens[len(boundaries) :] = boundaries, seq_length
    max_seqlen = np.array(max(longest, seq_length - end), dtype=np.int32)
    return Sample(tokens, labels, loss_mask, position_ids, cu_seqlens, max_seqlen)


@lru_cache(maxsize=4)
def _positions(seq_length: int) -> np.ndarray:
    """int64 [L]: 0 .. L - 1, to be copied."""
    return np.arange(seq_length)


def dense_attention_mask(cu_seqlens: np.ndarray) -> np.ndarray:
    """Megatron's attention mask of a sample, quadratic in L; only for users who ask for one.

    Args:
        cu_seqlens: int32 [L + 1].

    Returns:
        bool [1, L, L]: True where a query (second axis) must not see a key (third axis).
    """
    positions = np.arange(cu_seqlens[-1])
    segment = np.searchsorted(cu_seqlens, positions, side="right")
    visible = (segment[:, None] == segment[None, :]) & (positions[:, None] >= positions[None, :])
    return ~visible[None]
