"""What the tests of sequence indexes share."""

import os

from megatron_bfp.sequence_index.format import canonical_json, checksum

LENGTHS = [5, 0, 12, 3, 16, 2, 2, 9, 7, 1, 20, 8]


def content_of(folder):
    """Bytes of each file of a folder, by name."""
    return {name: (folder / name).read_bytes() for name in sorted(os.listdir(folder))}


def write_metadata(folder, metadata):
    """An index.json that says this, with the right checksum of its own."""
    (folder / "index.json").write_bytes(canonical_json(metadata | {"checksum": checksum(metadata)}))
