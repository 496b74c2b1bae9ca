"""What the tests of sequence indexes share."""

import hashlib
import json
import os

import numpy as np

from megatron_bfp.sequence_index.fingerprints import ends_sha256
from megatron_bfp.sequence_index.format import canonical_json, checksum

LENGTHS = [5, 0, 12, 3, 16, 2, 2, 9, 7, 1, 20, 8]


def content_of(folder):
    """Bytes of each file of a folder, by name."""
    return {name: (folder / name).read_bytes() for name in sorted(os.listdir(folder))}


def write_metadata(folder, metadata):
    """An index.json that says this, with the right checksum of its own."""
    (folder / "index.json").write_bytes(canonical_json(metadata | {"checksum": checksum(metadata)}))


def forge(folder, key, **arrays):
    """Make an index say something else, with every checksum right."""
    metadata = json.loads((folder / "index.json").read_bytes())
    for name, array in arrays.items():
        path = folder / f"{name}.npy"
        np.save(path, array)
        metadata["files"][path.name] = {
            "bytes": path.stat().st_size,
            "ends_sha256": ends_sha256(path),
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
    metadata["max_documents_per_sequence"] = key.max_documents_per_sequence
    metadata["even_sequences"] = key.even_sequences
    if key.targets_only:
        metadata["targets_only"] = True
    write_metadata(folder, metadata)
    return folder.rename(folder.with_name(key.name))
