"""What an index consists of: a directory beside the dataset that numpy and ``cat`` can read::

    PREFIX.bfp/s2048-d0-969/           seq_length 2048, documents 0 to 968; -m8 is added for a cap of 8 documents,
                                       -e for even sequences, -t for targets only, -fim0.5-1234 for half of the
                                       documents rearranged with seed 1234
        index.json                     counts, fingerprint of PREFIX.idx, checksums of each array and of this file
        runs.npy                       the three arrays of packing.table.SequenceTable
        document_ids.npy
        long_documents.npy

index.json is canonical: one byte string for one content, so that it can be computed anew and compared. Nothing is ever
derived from modification times: datasets are copied.
"""

import hashlib
import json
import os
from typing import Any

import numpy as np

from ..indexed_dataset.reader import IndexedDataset
from ..packing.census import Census, blocks_of, num_blocks
from ..progress import Progress, without_progress
from ..samples.fill_in_the_middle import NUM_SENTINELS, longest_rearranged
from .fingerprints import ends_sha256, file_sha256, sampled_fingerprint
from .key import IndexKey

FORMAT = "megatron_bfp sequence index"
VERSION = 3
"""2 has checksums of index.json itself and of the ends of the arrays, which opening checks; 3 has the work of a
sequence in runs.npy."""

ARRAYS = ("document_ids", "long_documents", "runs")


def metadata(
    key: IndexKey,
    census: Census,
    num_sequences: int,
    directory: str,
    dataset: IndexedDataset,
    idx_sha256: str,
    progress: Progress = without_progress,
) -> dict[str, Any]:
    """What index.json must say, from the data itself.

    Args:
        idx_sha256: of the dataset, as ``fingerprints.idx_sha256`` computes it: once for all its indexes.
    """
    files = {}
    for name in ARRAYS:
        path = os.path.join(directory, f"{name}.npy")
        files[f"{name}.npy"] = {
            "bytes": os.path.getsize(path),
            "ends_sha256": ends_sha256(path),
            "sha256": file_sha256(path, progress),
        }
    fingerprint = sampled_fingerprint(dataset.idx_content) | {"sha256": idx_sha256}
    described = {
        "counts": _counts(key, census, num_sequences, dataset, progress),
        "documents": [key.first_document, key.end_document],
        "even_sequences": key.even_sequences,
        "files": files,
        "fingerprint": fingerprint,
        "format": FORMAT,
        "max_documents_per_sequence": key.max_documents_per_sequence,
        "seq_length": key.seq_length,
        "version": VERSION,
    }
    if key.targets_only:  # else there is no entry, so that older indexes stay as they are
        described["targets_only"] = True
    if key.fim is not None:
        described |= {"fim_rate": key.fim.rate, "fim_seed": key.fim.seed}
    return described | {"checksum": checksum(described)}


def _counts(
    key: IndexKey, census: Census, num_sequences: int, dataset: IndexedDataset, progress: Progress
) -> dict[str, int]:
    counts = {
        "documents": census.num_documents,
        "empty_documents": census.num_empty,
        "padding": num_sequences * key.seq_length - census.num_tokens,
        "sequences": num_sequences,
        "tokens": census.num_tokens,
    }
    if key.fim is None and not key.targets_only:
        return counts
    lengths = dataset.document_lengths.range(key.first_document, key.end_document)
    num_empty = num_rearranged = num_too_long = 0
    for first, block in progress(blocks_of(lengths), num_blocks(lengths), "counting documents"):
        num_empty += len(block) - int(np.count_nonzero(block))
        if key.fim is not None:
            longest = longest_rearranged(key.seq_length, key.targets_only)
            documents = np.arange(first, first + len(block)) + key.first_document
            num_rearranged += int(np.count_nonzero(key.fim.are_rearranged(documents, block, longest)))
            num_too_long += int(np.count_nonzero(key.fim.are_chosen(documents) & (block > longest)))
    if key.targets_only:  # the census is of all tokens but the last of each document
        counts["empty_documents"], counts["one_token_documents"] = num_empty, census.num_empty - num_empty
    if key.fim is not None:  # it is of sentinels, too
        counts["fim_documents"], counts["fim_too_long_documents"] = num_rearranged, num_too_long
    counts["tokens"] -= num_inputs(key, counts | {"tokens": 0})
    return counts


def num_inputs(key: IndexKey, counts: dict[str, int]) -> int:
    """Positions that hold a token, from the other counts: all tokens or, with targets only, those with a target; and
    the sentinels of fill-in-the-middle."""
    last_tokens = counts["documents"] - counts["empty_documents"] if key.targets_only else 0
    sentinels = NUM_SENTINELS * counts["fim_documents"] if key.fim is not None else 0
    return counts["tokens"] - last_tokens + sentinels


def canonical_json(metadata: dict[str, Any]) -> bytes:
    """The one byte string that stands for ``metadata`` in index.json."""
    return json.dumps(metadata, indent=2, sort_keys=True, ensure_ascii=True).encode("ascii")


def checksum(metadata: dict[str, Any]) -> str:
    """sha256 of what index.json says, but for the entry that holds it, in hexadecimal."""
    others = {name: value for name, value in metadata.items() if name != "checksum"}
    return hashlib.sha256(canonical_json(others)).hexdigest()
