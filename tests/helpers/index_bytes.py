"""Two sequence indexes of real lengths, and the digests of their bytes. As a script it prints them, for other Pythons:

python tests/helpers/index_bytes.py FOLDER
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_bfp.indexed_dataset.reader import IndexedDataset
from megatron_bfp.indexed_dataset.writer import IndexedDatasetWriter
from megatron_bfp.sequence_index.builder import build
from megatron_bfp.sequence_index.key import IndexKey, index_directory
from megatron_bfp.sequence_index.verify import verify

LENGTHS = Path(__file__).parents[1] / "data" / "text_lengths.npy"
KEYS = (IndexKey(2048, 0, 3000), IndexKey(2048, 100, 2900, 4))


def index_digests(folder):
    """For the name of each index, sha256 of the names and contents of its files."""
    lengths = np.load(LENGTHS)[:3000]
    tokens = np.arange(lengths.sum()) % 60_000
    prefix = os.path.join(folder, "data")
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        writer.add(tokens, lengths)
        writer.finalize()
    dataset = IndexedDataset(prefix)
    return {key.name: _digest(build(dataset, key, index_directory(prefix)).path, dataset) for key in KEYS}


def sequences_digest(folder, name):
    """sha256 of which documents are in which sequence, as far as format 2 said it too."""
    path = Path(folder, "data.bfp", name)
    runs, ids, long = (np.load(path / f"{array}.npy") for array in ("runs", "document_ids", "long_documents"))
    chunks = runs[:, 2]
    runs_of_format_2 = runs[np.diff(chunks, prepend=0) != 0][:, :3]
    return hashlib.sha256(b"".join(array.tobytes() for array in (ids, long, runs_of_format_2))).hexdigest()


def _digest(path, dataset):
    verify(path, dataset)
    digest = hashlib.sha256()
    for name in sorted(os.listdir(path)):
        digest.update(name.encode() + Path(path, name).read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    print(json.dumps(index_digests(sys.argv[1])))
