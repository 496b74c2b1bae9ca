"""Whether every remainder chunk is in exactly one sequence of an index, and every sequence fits.

Looking up the length of each document that an index names takes a random read per document: minutes and gigabytes for
a billion. Two sequential passes in constant memory prove the same. The plan, made anew, claims for each entry of
``document_ids`` the length of its chunk. An index is right if its pairs (document, claimed length) are those of the
.idx, each once, in any order. So both multisets of pairs are added up as sums of ``hash(document) * weight(length)``
modulo 2**64, with a hash and weights drawn at random for each check. Equal multisets have equal sums. Others do with a
probability of about 2**-60, whatever they are: the index was there before the functions were drawn. So all lengths are
known from the plan, and whether sequences fit is checked once per run.

Nothing is taken on trust: a wrong plan would claim pairs that the .idx does not have. If anything differs from the
plan, every document is looked up after all. That finds out what is wrong, or that another planner made a right index.

Source: multiset hashing by sums, Clarke et al., "Incremental Multiset Hash Functions and Their Application to Memory
Integrity Checking" (ASIACRYPT 2003), section 5; here with secret random functions instead of a cryptographic hash.
"""

import secrets
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np

from ..indexed_dataset.memory_maps import expect_next
from ..packing.best_fit import Run
from ..packing.census import BLOCK, Census, blocks_of, num_blocks, remainder_lengths
from ..packing.table import run_rows
from ..progress import Progress
from .builder import planned_runs
from .key import damaged
from .reader import SequenceIndex

PIECE = 1 << 13
"""Documents hashed at once: few enough for the processor's cache, and for memory that is reused without page faults."""
_LOW_64_BITS = (1 << 64) - 1


def check_coverage(index: SequenceIndex, lengths: Any, census: Census, progress: Progress) -> None:
    """Check that each remainder chunk is in exactly one sequence and every sequence fits.

    Costs about 15 s of CPU time and some megabytes for a billion documents if the index is the plan's; otherwise 2
    bytes per document, 4 if L is above 65,536, and a random read for each.

    Args:
        lengths: of the index's documents, as ``packed_lengths`` gives them.
        census: of ``lengths``.

    Raises:
        SequenceIndexError: a chunk is missing or repeated, or a sequence has too many tokens or documents.
    """
    table, cap = index.table, index.key.max_documents_per_sequence
    if len(table.document_ids) != census.num_remainders:
        _refuse(index, "document_ids.npy does not name every document once")
    if cap and np.any(table.runs[:, 2] > cap):
        _refuse(index, "a sequence has more documents than max_documents_per_sequence")
    if not _is_as_planned(index, lengths, census, progress):
        _look_up_each(index, lengths, progress)


class PairSums:
    """Sums of ``hash(document) * weight(length)`` modulo 2**64; a new instance draws its functions anew.

    A length of 0 has weight 0: a document without a remainder chunk counts for nothing.
    """

    def __init__(self, seq_length: int) -> None:
        drawn = np.frombuffer(secrets.token_bytes(8 * (seq_length + 2)), dtype=np.uint64)
        self._weights = np.append(np.uint64(0), drawn[3:])
        self._key, self._factor, self._second_factor = drawn[0], drawn[1] | np.uint64(1), drawn[2] | np.uint64(1)

    def of_documents(self, first: int, lengths: np.ndarray) -> int:
        """The sum over consecutive documents.

        Args:
            first: number of the first one.
            lengths: integers [documents] in [0, L), of their remainder chunks.
        """
        total = 0
        for offset in range(0, len(lengths), PIECE):
            weights = self._weights[lengths[offset : offset + PIECE]]
            begin = first + offset
            total += int(self._hash(np.arange(begin, begin + len(weights), dtype=np.uint64)) @ weights)
        return total & _LOW_64_BITS

    def of_sequences(self, pieces: Iterator[np.ndarray], lengths: np.ndarray) -> int:
        """The sum over sequences that hold chunks of the same lengths.

        Args:
            pieces: document ids, sequence by sequence, each piece some whole sequences.
            lengths: integers [chunks per sequence] in [0, L).
        """
        weights = np.tile(self._weights[lengths], max(1, PIECE // len(lengths)))
        total = 0
        for ids in pieces:
            for offset in range(0, len(ids), len(weights)):
                hashes = self._hash(ids[offset : offset + len(weights)].astype(np.uint64))
                total += int(hashes @ weights[: len(hashes)])
        return total & _LOW_64_BITS

    def _hash(self, mixed: np.ndarray) -> np.ndarray:
        """A 64-bit mix of documents with random numbers, by two rounds of multiply and shift, in place."""
        mixed ^= self._key
        for factor in (self._factor, self._second_factor):
            mixed *= factor
            mixed ^= mixed >> np.uint64(32)
        return mixed


def _is_as_planned(index: SequenceIndex, lengths: Any, census: Census, progress: Progress) -> bool:
    """Whether the index holds the documents whose lengths the plan wants, and all sequences of the plan fit."""
    key, table, first_document = index.key, index.table, index.key.first_document
    runs = planned_runs(key, census)
    if not np.array_equal(run_rows(runs, census.num_full_chunks), table.runs):
        return False
    sums = PairSums(key.seq_length)
    of_dataset = of_index = entry = 0
    for first, block in progress(blocks_of(lengths), num_blocks(lengths), "reading lengths"):
        of_dataset += sums.of_documents(first_document + first, remainder_lengths(block, key.seq_length))
    ends = np.cumsum(census.remainders[::-1])  # of each length, among all remainder chunks, longest first
    for run in progress(runs, len(runs), "checking sequences"):
        in_sequence = _chunk_lengths(run, ends)
        if in_sequence.sum() > key.seq_length or in_sequence @ in_sequence != run.work:
            return False
        end = entry + run.num_sequences * run.chunks
        of_index += sums.of_sequences(_pieces(table.document_ids, entry, end, run.chunks), in_sequence)
        entry = end
    return (of_dataset - of_index) & _LOW_64_BITS == 0


def _chunk_lengths(run: Run, ends: np.ndarray) -> np.ndarray:
    """int64 [chunks]: tokens of the chunks of one sequence of a run."""
    starts, counts, move = [], [], run.last_move
    while move is not None:
        starts.append(move.start)
        counts.append(move.per_sequence)
        move = move.previous
    lengths = len(ends) - 1 - ends.searchsorted(starts, side="right")
    return np.repeat(lengths, counts)[::-1]


def _pieces(ids: np.ndarray, entry: int, end: int, chunks: int) -> Iterator[np.ndarray]:
    """``ids[entry:end]`` in steps of a pass, each of whole sequences."""
    step = max(1, BLOCK // chunks) * chunks
    for first in range(entry, end, step):
        yield expect_next(ids, first, min(first + step, end))


def _look_up_each(index: SequenceIndex, lengths: Any, progress: Progress) -> None:
    """Check an index document by document, whatever made it."""
    key, table = index.key, index.table
    remainders = np.empty(len(lengths), dtype=np.uint16 if key.seq_length <= 1 << 16 else np.uint32)
    for first, block in progress(blocks_of(lengths), num_blocks(lengths), "reading lengths"):
        remainders[first : first + len(block)] = remainder_lengths(block, key.seq_length)
    ends = np.append(table.runs[1:, 1], len(table.document_ids))
    for row, end in progress(zip(table.runs.tolist(), ends.tolist()), len(ends), "looking up documents"):
        _, entry, chunks, work = row
        for ids in _pieces(table.document_ids, entry, end, chunks):
            documents = ids.astype(np.int64) - key.first_document
            if documents.min() < 0 or documents.max() >= len(lengths):
                _refuse(index, "document_ids.npy names documents outside the range")
            num_tokens = remainders[documents]
            remainders[documents] = 0  # so that a second mention has no tokens left
            if num_tokens.min() < 1:
                _refuse(index, "document_ids.npy does not name every document once")
            of_sequences = num_tokens.reshape(-1, chunks).astype(np.int64)
            if of_sequences.sum(axis=1).max() > key.seq_length:
                _refuse(index, "document_ids.npy has a sequence that does not fit")
            if np.any((of_sequences**2).sum(axis=1) != work):
                _refuse(index, "the work in runs.npy is not that of the sequences in document_ids.npy")
    # A document named twice in one piece was read before it was marked. As there are as many entries as documents with
    # a remainder, another one was not named.
    if remainders.any():
        _refuse(index, "document_ids.npy does not name every document once")


def _refuse(index: SequenceIndex, reason: str) -> NoReturn:
    raise damaged(index.path, index.dataset, reason)
