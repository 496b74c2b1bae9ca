"""The sequence index's format: names, index.json, fingerprints, and what to tell a user whose index is wrong.

An index is a directory beside the dataset, named for what it holds, that numpy and ``cat`` can read::

    PREFIX.bfp/s2048-d0-969/           seq_length 2048, documents 0 to 968; -m8 is added for a cap of 8 documents
        index.json                     counts, fingerprint of PREFIX.idx, checksums of each array and of this file
        runs.npy                       the three arrays of packing.SequenceTable
        document_ids.npy
        long_documents.npy

index.json is canonical: one byte string for one content, so that it can be computed anew and compared. Nothing is ever
derived from modification times: datasets are copied.
"""

import hashlib
import json
import operator
import os
import re
import shlex
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import OptionError, SequenceIndexError
from .indexed_dataset import IndexedDataset
from .memory_maps import expect_next
from .packing import Census, checked_cap, checked_seq_length
from .progress import Progress, without_progress
from .splits import SPLIT_NAMES, split_fractions

FORMAT = "megatron_bfp sequence index"
VERSION = 2
"""2 has checksums of index.json itself and of the ends of the arrays, which opening checks."""
HASHED_BYTES = 1 << 24
"""Bytes hashed in one step."""
END_BYTES = 1 << 14
"""Bytes at each end of an array file that are checked when the index is opened."""
ARRAYS = ("document_ids", "long_documents", "runs")
NAME = re.compile(r"s([1-9][0-9]*)-d(0|[1-9][0-9]*)-(0|[1-9][0-9]*)(?:-m([1-9][0-9]*))?")


@dataclass(frozen=True)
class IndexKey:
    """What an index is for. Two indexes of a dataset with the same key are the same bytes."""

    seq_length: int
    first_document: int
    end_document: int
    """Exclusive."""
    max_documents_per_sequence: int | None = None

    def __post_init__(self) -> None:
        checked = {"seq_length": checked_seq_length("seq_length", self.seq_length)}
        checked["max_documents_per_sequence"] = checked_cap(self.max_documents_per_sequence)
        checked |= {name: operator.index(getattr(self, name)) for name in ("first_document", "end_document")}
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if not 0 <= self.first_document <= self.end_document:
            raise OptionError(f"documents {self.first_document} to {self.end_document} are not a range")

    @property
    def name(self) -> str:
        """The directory's name."""
        cap = "" if self.max_documents_per_sequence is None else f"-m{self.max_documents_per_sequence}"
        return f"s{self.seq_length}-d{self.first_document}-{self.end_document}{cap}"

    @classmethod
    def for_split(
        cls,
        num_documents: int,
        seq_length: int,
        split: str | None,
        split_name: str = "train",
        max_documents_per_sequence: int | None = None,
    ) -> "IndexKey | None":
        """The index that a run's options mean: the one answer for datasets, tools and checks before a run.

        Args:
            num_documents: documents of the dataset.
            seq_length: the run's ``--seq-length``.
            split: the run's ``--split``, such as "969,30,1"; None for all documents, whatever ``split_name`` is.
            split_name: which of the splits: train, valid or test.
            max_documents_per_sequence: the run's cap on documents.

        Returns:
            None if ``split`` gives this split no share.

        Raises:
            OptionError: an argument is not what is described above.
        """
        documents = split_range(num_documents, split, split_name)
        return None if documents is None else cls(seq_length, *documents, max_documents_per_sequence)

    @classmethod
    def for_fractions(
        cls,
        num_documents: int,
        seq_length: int,
        fractions: tuple[float, float] | None,
        max_documents_per_sequence: int | None = None,
    ) -> "IndexKey | None":
        """As ``for_split``, for one entry of megatron-core's ``config.split_matrix``: where a split begins and ends."""
        if fractions is None:
            return None
        return cls(seq_length, *document_range(fractions, num_documents), max_documents_per_sequence)

    @classmethod
    def from_name(cls, name: str) -> "IndexKey | None":
        """The key that a directory's name stands for; None if it is no index's name."""
        match = NAME.fullmatch(name)
        if match is None:
            return None
        seq_length, first, end, cap = (None if group is None else int(group) for group in match.groups())
        try:
            return cls(seq_length, first, end, cap)
        except OptionError:
            return None


def document_range(fractions: tuple[float, float], num_documents: int) -> tuple[int, int]:
    """First and end document of a split, rounded as megatron-core's BlendedMegatronDatasetBuilder rounds.

    Args:
        fractions: where the split begins and ends, as in ``config.split_matrix``.
    """
    first, end = (int(round(fraction * float(num_documents))) for fraction in fractions)
    return first, end


def split_range(num_documents: int, split: str | None, split_name: str = "train") -> tuple[int, int] | None:
    """First and end document of a split, given as ``--split`` gives it; None if the split has no share.

    Args:
        split: such as "969,30,1"; None for all documents.
        split_name: train, valid or test.

    Raises:
        OptionError: there is no such split.
    """
    if split_name not in SPLIT_NAMES:
        raise OptionError(f"there is no split {split_name!r}; splits are {', '.join(SPLIT_NAMES)}")
    fractions = (0.0, 1.0) if split is None else split_fractions(split)[SPLIT_NAMES.index(split_name)]
    return None if fractions is None else document_range(fractions, num_documents)


def index_directory(prefix: str) -> str:
    """The directory that holds a dataset's indexes, PREFIX.bfp."""
    return prefix + ".bfp"


def cached_index_directory(dataset: IndexedDataset, cache_path: str) -> str:
    """Where a dataset's indexes go if they cannot stand beside it: a folder named for it and its .idx's content."""
    sampled = sampled_fingerprint(dataset.idx_content)["sampled_sha256"]
    return os.path.join(cache_path, f"{os.path.basename(dataset.prefix)}-{sampled[:16]}.bfp")


def index_places(dataset: IndexedDataset, cache_path: str | None = None) -> list[str]:
    """The directories where a dataset's indexes may be, in the order in which they are looked for."""
    beside = index_directory(dataset.prefix)
    return [beside, cached_index_directory(dataset, cache_path)] if cache_path else [beside]


def metadata(
    key: IndexKey,
    census: Census,
    num_sequences: int,
    directory: str,
    dataset: IndexedDataset,
    progress: Progress = without_progress,
) -> dict[str, Any]:
    """What index.json must say, from the data itself."""
    files = {}
    for name in ARRAYS:
        path = os.path.join(directory, f"{name}.npy")
        files[f"{name}.npy"] = {
            "bytes": os.path.getsize(path),
            "ends_sha256": ends_sha256(path),
            "sha256": file_sha256(path, progress),
        }
    fingerprint = sampled_fingerprint(dataset.idx_content) | {"sha256": idx_sha256(dataset, progress)}
    described = {
        "counts": {
            "documents": census.num_documents,
            "empty_documents": census.num_empty,
            "padding": num_sequences * key.seq_length - census.num_tokens,
            "sequences": num_sequences,
            "tokens": census.num_tokens,
        },
        "documents": [key.first_document, key.end_document],
        "files": files,
        "fingerprint": fingerprint,
        "format": FORMAT,
        "max_documents_per_sequence": key.max_documents_per_sequence,
        "seq_length": key.seq_length,
        "version": VERSION,
    }
    return described | {"checksum": checksum(described)}


def canonical_json(metadata: dict[str, Any]) -> bytes:
    """The one byte string that stands for ``metadata`` in index.json."""
    return json.dumps(metadata, indent=2, sort_keys=True, ensure_ascii=True).encode("ascii")


def checksum(metadata: dict[str, Any]) -> str:
    """sha256 of what index.json says, but for the entry that holds it, in hexadecimal."""
    others = {name: value for name, value in metadata.items() if name != "checksum"}
    return hashlib.sha256(canonical_json(others)).hexdigest()


def sampled_fingerprint(content: np.ndarray) -> dict[str, Any]:
    """Size and sampled sha256 of a file's content, in constant time: its first and last 64 KiB, and 256 blocks of 4 KiB
    evenly spaced over all of it.

    Args:
        content: uint8 [bytes], usually a memory map. The fingerprint is of the bytes that are read, and not of a file
            that may have taken their place.

    Returns:
        {"bytes": int, "sampled_sha256": str}
    """
    size = len(content)
    digest = hashlib.sha256()
    offsets = [(0, 1 << 16), (max(0, size - (1 << 16)), 1 << 16)]
    offsets += [(max(0, size - 4096) * block // 255, 4096) for block in range(256)]
    for offset, count in offsets:
        digest.update(content[offset : offset + count])
    return {"bytes": size, "sampled_sha256": digest.hexdigest()}


def ends_sha256(path: str) -> str:
    """sha256 of a file's first and last ``END_BYTES``, in hexadecimal: of a small file, of every byte."""
    with open(path, "rb") as file:
        digest = hashlib.sha256(file.read(END_BYTES))
        file.seek(max(0, os.path.getsize(path) - END_BYTES))
        digest.update(file.read(END_BYTES))
    return digest.hexdigest()


def file_sha256(path: str, progress: Progress) -> str:
    """sha256 of a whole file, in hexadecimal."""
    digest, size = hashlib.sha256(), os.path.getsize(path)
    with open(path, "rb") as file:
        for _ in progress(range(0, size, HASHED_BYTES), -(-size // HASHED_BYTES), f"hashing {os.path.basename(path)}"):
            digest.update(file.read(HASHED_BYTES))
    return digest.hexdigest()


def idx_sha256(dataset: IndexedDataset, progress: Progress) -> str:
    """sha256 of the .idx as it was when it was opened, in hexadecimal."""
    digest, size = hashlib.sha256(), len(dataset.idx_content)
    for first in progress(range(0, size, HASHED_BYTES), -(-size // HASHED_BYTES), "hashing the .idx"):
        digest.update(expect_next(dataset.idx_content, first, first + HASHED_BYTES))
    return digest.hexdigest()


def damaged(path: str, dataset: IndexedDataset, reason: str) -> SequenceIndexError:
    """The error for an index that is not what was built; says how to mend it."""
    return SequenceIndexError(f"{path}: the sequence index is damaged: {reason}. Rebuild it: {remedy(path, dataset)}")


def remedy(path: str, dataset: IndexedDataset) -> str:
    """What to do about an index that cannot be used."""
    path = os.path.normpath(path)
    key = IndexKey.from_name(os.path.basename(path))
    if key is None or os.path.dirname(path) != os.path.normpath(index_directory(dataset.prefix)):
        return f"remove {path}; the next start builds it"
    return f"{build_command(dataset, key)} --overwrite"


def build_command(dataset: IndexedDataset, key: IndexKey, split: str | None = None) -> str:
    """The command line that builds an index beside its dataset, quoted for a shell.

    Args:
        split: the --split that the key comes from, if it is known. Else one that has the key's documents as one of its
            parts is given.
    """
    words = ["megatron-bfp-preprocess", "--indexed", dataset.prefix, "--seq-length", str(key.seq_length)]
    if key.max_documents_per_sequence is not None:
        words += ["--max-documents-per-sequence", str(key.max_documents_per_sequence)]
    if (key.first_document, key.end_document) != (0, dataset.num_documents):
        words += ["--split", split or _split_with(key, dataset.num_documents)]
    return shlex.join(words)


def _split_with(key: IndexKey, num_documents: int) -> str:
    """A --split of a dataset that has the documents of an index as one of its parts."""
    share = key.end_document - key.first_document or 0.001  # rounded to no document, but a share
    shares = [key.first_document, share, num_documents - key.end_document]
    return ",".join(map(str, shares[1:] if key.first_document == 0 else shares))
