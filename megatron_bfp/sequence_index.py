"""The sequence index on disk: which document chunks make up which training sequence. Build, open, verify.

An index is a directory beside the dataset, named for what it holds, that numpy and ``cat`` can read::

    PREFIX.bfp/s2048-d0-969/           seq_length 2048, documents 0 to 968; -m8 is added for a cap of 8 documents
        index.json                     counts, fingerprint of PREFIX.idx, size and sha256 of each array file
        runs.npy                       the three arrays of packing.SequenceTable
        document_ids.npy
        long_documents.npy

It is written to a temporary sibling and renamed when it is whole and on disk, so a reader sees all of it or nothing. Of
several builders one works and the others take its result. Opening does not depend on the number of documents: it checks
names, sizes, the table of runs and a sampled fingerprint of the .idx. What only a full pass can find, ``verify`` finds,
and each read of a sequence checks what it got. Nothing is ever derived from modification times: datasets are copied.
"""

import errno
import hashlib
import io
import json
import logging
import operator
import os
import re
import secrets
import shutil
import socket
import time
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from .errors import OptionError, SequenceIndexError
from .files import locked_directory, sync_file
from .indexed_dataset import IndexedDataset, idx_path
from .packing import (
    BLOCK,
    Census,
    Progress,
    SequenceTable,
    checked_cap,
    checked_count,
    count_sequences,
    id_dtype,
    place_documents,
    plan_runs,
    run_rows,
    sort_documents,
    take_census,
    without_progress,
)

FORMAT = "megatron_bfp sequence index"
VERSION = 1
ARRAYS = ("document_ids", "long_documents", "runs")
NAME = re.compile(r"s([1-9][0-9]*)-d(0|[1-9][0-9]*)-(0|[1-9][0-9]*)(?:-m([1-9][0-9]*))?")
LEFTOVER_SECONDS = 24 * 3600
"""An unfinished build is taken for dead after this time, where no lock shows whether it is."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class IndexKey:
    """What an index is for. Two indexes of a dataset with the same key are the same bytes."""

    seq_length: int
    first_document: int
    end_document: int
    """Exclusive."""
    max_documents_per_sequence: int | None = None

    def __post_init__(self) -> None:
        checked = {"seq_length": checked_count("seq_length", self.seq_length)}
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


class SequenceIndex:
    """An open sequence index. ``index.chunks(i)`` gives the document chunks of sequence i.

    Instances are pickled as their paths and reopened.

    Args:
        path: the index's directory.
        dataset: the dataset it was built from.

    Attributes:
        key: what the index is for.
        counts: the counts of index.json: documents, empty_documents, tokens, sequences, padding.

    Raises:
        SequenceIndexError: it is missing, damaged, stale, or of another dataset; the message says what to do.
    """

    def __init__(self, path: str, dataset: IndexedDataset) -> None:
        self.path, self.dataset = str(path), dataset
        self.key = _key_of(self.path, dataset)
        try:
            metadata = _read_metadata(self.path, self.key, dataset)
            _check_fingerprint(self.path, metadata["fingerprint"], dataset)
            self.table = _open_table(self.path, self.key, metadata, dataset)
        except OSError as error:
            raise SequenceIndexError(f"{error.filename or self.path}: cannot be read: {error.strerror}") from None
        self.counts: dict[str, int] = metadata["counts"]
        self.idx_sha256: str = metadata["fingerprint"]["sha256"]

    def __reduce__(self) -> tuple:
        return type(self), (self.path, self.dataset)

    def __len__(self) -> int:
        return self.table.num_sequences

    def chunks(self, sequence: int) -> np.ndarray:
        """The chunks of one sequence.

        Returns:
            int64 [k, 3]: document, offset and length (tokens) of each, in order.

        Raises:
            IndexError: no such sequence.
            SequenceIndexError: the entry contradicts the dataset or the sequence length.
        """
        return self._read(sequence)[0]

    def positions(self, sequence: int) -> np.ndarray:
        """Where the chunks of one sequence lie in the .bin.

        Returns:
            int64 [k, 3]: start and end of each chunk and the end of its document, in tokens from the start of the .bin.

        Raises:
            As ``chunks``.
        """
        chunks, starts, ends = self._read(sequence)
        chunk_starts = starts + chunks[:, 1]
        return np.stack([chunk_starts, chunk_starts + chunks[:, 2], ends], axis=1)

    def _read(self, sequence: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Chunks, and the starts and ends of their documents in the .bin."""
        entry = self.table.entry(sequence)
        first, last = entry.documents.min(), entry.documents.max()
        if first < self.key.first_document or last >= self.key.end_document:
            self._refuse(sequence, f"names document {last if first >= self.key.first_document else first}")
        starts, ends = self.dataset.spans(entry.documents)
        lengths = ends - starts
        if entry.full_chunk is not None and entry.full_chunks != lengths[0] // self.key.seq_length:
            self._refuse(sequence, f"does not match the length of document {first}")
        chunks = entry.chunks(lengths, self.key.seq_length)
        if chunks[:, 2].min() < 1:
            self._refuse(sequence, "has an empty chunk")
        if chunks[:, 2].sum() > self.key.seq_length:
            self._refuse(sequence, "has more tokens than fit")
        return chunks, starts, ends

    def _refuse(self, sequence: int, reason: str) -> None:
        raise _damaged(self.path, self.dataset, f"sequence {sequence} {reason}")


def index_directory(prefix: str) -> str:
    """The directory that holds a dataset's indexes, PREFIX.bfp."""
    return prefix + ".bfp"


def cached_index_directory(dataset: IndexedDataset, cache_path: str) -> str:
    """Where a dataset's indexes go if they cannot stand beside it: a folder named for it and its .idx's content."""
    sampled = sampled_fingerprint(dataset.idx_content)["sampled_sha256"]
    return os.path.join(cache_path, f"{os.path.basename(dataset.prefix)}-{sampled[:16]}.bfp")


def open_or_build(
    dataset: IndexedDataset, key: IndexKey, cache_path: str | None = None, progress: Progress = without_progress
) -> SequenceIndex:
    """Open an index beside the dataset or under ``cache_path``; build it where it is missing.

    It is built beside the dataset, or, if that place is not writable, under the cache path.

    Raises:
        SequenceIndexError: an index is there but wrong, or neither place can be written.
    """
    places = [index_directory(dataset.prefix)]
    if cache_path:
        places.append(cached_index_directory(dataset, cache_path))
    for place in places:
        if os.path.isdir(os.path.join(place, key.name)):
            return SequenceIndex(os.path.join(place, key.name), dataset)
    reasons = []
    for place in places:
        try:
            os.makedirs(place, exist_ok=True)
            if not os.access(place, os.W_OK):
                raise PermissionError(13, "not writable")
        except OSError as error:
            reasons.append(f"{place} ({error.strerror})")
            continue
        return build(dataset, key, place, progress=progress)
    raise SequenceIndexError(
        f"{dataset.prefix}: there is no sequence index {key.name} and no place to build it: {', '.join(reasons)}. "
        f"Give a writable --data-cache-path, or build it where that place is writable: {_build_command(dataset, key)}"
    )


def build(
    dataset: IndexedDataset,
    key: IndexKey,
    directory: str,
    overwrite: bool = False,
    progress: Progress = without_progress,
) -> SequenceIndex:
    """Build an index, or take the one that is there.

    Any number of processes may build the same index: one works, the others wait for it and open its result. What killed
    builders left behind is removed.

    Args:
        directory: where the index's own directory goes.
        overwrite: replace an index that is there.

    Raises:
        SequenceIndexError: an index is there and wrong, and ``overwrite`` is off; or it cannot be written.
        IndexedDatasetError: the .idx has impossible pointers.
    """
    if key.end_document > dataset.num_documents:
        raise OptionError(f"{dataset.prefix}: has {dataset.num_documents} documents, none up to {key.end_document}")
    target = os.path.join(directory, key.name)
    try:
        os.makedirs(directory, exist_ok=True)
        with locked_directory(directory) as is_locked:
            _remove_leftovers(directory, is_locked)
            if overwrite or not os.path.isdir(target):
                _build_and_rename(dataset, key, target, overwrite, progress)
    except OSError as error:
        raise SequenceIndexError(f"{target}: cannot be written: {error.strerror or error}") from error
    return SequenceIndex(target, dataset)


def verify(path: str, dataset: IndexedDataset, progress: Progress = without_progress) -> SequenceIndex:
    """Check everything about an index: each byte of its files, and what it says against the .idx.

    All of index.json is computed anew from the .idx and the arrays and compared byte for byte. Then every remainder
    chunk must be in exactly one sequence and every sequence must fit.

    Raises:
        SequenceIndexError, IndexedDatasetError: something is wrong.
    """
    index = SequenceIndex(path, dataset)
    lengths = dataset.document_lengths.range(index.key.first_document, index.key.end_document)
    census = take_census(lengths, index.key.seq_length, progress)
    try:
        expected = _metadata(index.key, census, index.table.num_sequences, path, dataset)
        with open(os.path.join(path, "index.json"), "rb") as file:
            found = file.read()
        names = set(os.listdir(path))
    except OSError as error:
        raise SequenceIndexError(f"{error.filename or path}: cannot be read: {error.strerror}") from None
    if found != canonical_json(expected):
        wrong = _first_difference(expected, json.loads(found))
        raise _damaged(path, dataset, f"index.json: {wrong} does not match the data")
    if names != {"index.json", *(f"{name}.npy" for name in ARRAYS)}:
        raise _damaged(path, dataset, "there are files that do not belong to it")
    _check_coverage(index, lengths, census, progress)
    return index


def verify_all(
    prefix: str, cache_path: str | None = None, progress: Progress = without_progress
) -> list[SequenceIndex]:
    """Verify every index of a dataset, beside it and under ``cache_path``.

    Raises:
        SequenceIndexError: one is wrong, or there is none.
        IndexedDatasetError: the dataset is wrong.
    """
    dataset = IndexedDataset(prefix)
    dataset.check_pointers()
    places = [index_directory(prefix)] + ([cached_index_directory(dataset, cache_path)] if cache_path else [])
    paths = [
        os.path.join(place, name)
        for place in places
        if os.path.isdir(place)
        for name in sorted(os.listdir(place))
        if not name.startswith(".")
    ]
    if not paths:
        raise SequenceIndexError(f"{places[0]}: there is no sequence index; build one with --indexed {prefix}")
    return [verify(path, dataset, progress) for path in paths]


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


def canonical_json(metadata: dict[str, Any]) -> bytes:
    """The one byte string that stands for ``metadata`` in index.json."""
    return json.dumps(metadata, indent=2, sort_keys=True, ensure_ascii=True).encode("ascii")


def _build_and_rename(dataset: IndexedDataset, key: IndexKey, target: str, overwrite: bool, progress: Progress) -> None:
    temporary = os.path.join(
        os.path.dirname(target), f".{key.name}.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"
    )
    replaced = temporary + ".replaced"
    os.mkdir(temporary)
    try:
        _write(dataset, key, temporary, progress)
        if overwrite and os.path.isdir(target):
            os.rename(target, replaced)
        os.rename(temporary, target)
    except OSError as error:
        # a builder whose lock this file system did not show us may have been faster; its result is as good
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            if os.path.isdir(replaced):
                os.rename(replaced, target)
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)
    sync_file(os.path.dirname(target))


def _write(dataset: IndexedDataset, key: IndexKey, directory: str, progress: Progress) -> None:
    lengths = dataset.document_lengths.range(key.first_document, key.end_document)
    census = take_census(lengths, key.seq_length, progress)
    runs = plan_runs(census.remainders, key.seq_length, key.max_documents_per_sequence)
    sorted_ids = sort_documents(lengths, census.remainders, id_dtype(key.end_document), key.first_document, progress)
    with open(
        os.path.join(directory, "document_ids.npy"), "wb"
    ) as file:  # written, not mapped: a full disk is an error
        header = np.lib.format.header_data_from_array_1_0(sorted_ids)
        np.lib.format.write_array_header_1_0(file, header)
        for piece in place_documents(runs, sorted_ids, progress):
            file.write(piece.data)
    long_documents = census.long_documents + np.array([key.first_document, 0])
    np.save(os.path.join(directory, "runs.npy"), run_rows(runs, census.num_full_chunks), allow_pickle=False)
    np.save(os.path.join(directory, "long_documents.npy"), long_documents, allow_pickle=False)
    metadata = _metadata(key, census, count_sequences(census, runs), directory, dataset)
    with open(os.path.join(directory, "index.json"), "wb") as file:
        file.write(canonical_json(metadata))
    for name in os.listdir(directory):
        sync_file(os.path.join(directory, name))
    sync_file(directory)


def _metadata(
    key: IndexKey, census: Census, num_sequences: int, directory: str, dataset: IndexedDataset
) -> dict[str, Any]:
    """What index.json must say, from the data itself."""
    files = {}
    for name in ARRAYS:
        path = os.path.join(directory, f"{name}.npy")
        files[f"{name}.npy"] = {"bytes": os.path.getsize(path), "sha256": _file_sha256(path)}
    fingerprint = sampled_fingerprint(dataset.idx_content) | {"sha256": hashlib.sha256(dataset.idx_content).hexdigest()}
    return {
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


def _file_sha256(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _key_of(path: str, dataset: IndexedDataset) -> IndexKey:
    key = IndexKey.from_name(os.path.basename(os.path.normpath(path)))
    if key is None:
        raise SequenceIndexError(f"{path}: not a sequence index; one is a directory with a name like s2048-d0-969")
    if not os.path.isdir(path):
        raise SequenceIndexError(f"{path}: no such sequence index; build it: {_build_command(dataset, key)}")
    if key.end_document > dataset.num_documents:
        raise SequenceIndexError(
            f"{path}: is for documents up to {key.end_document}, {idx_path(dataset.prefix)} has {dataset.num_documents}"
        )
    return key


def _read_metadata(path: str, key: IndexKey, dataset: IndexedDataset) -> dict[str, Any]:
    """index.json, if it has the form of one and agrees with its directory's name."""
    try:
        with open(os.path.join(path, "index.json"), "rb") as file:
            content = file.read()
        metadata = json.loads(content)
        canonical = canonical_json(metadata) == content
    except (FileNotFoundError, ValueError, RecursionError) as error:
        raise _damaged(path, dataset, f"index.json cannot be read: {error}") from None
    if not canonical or not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise _damaged(path, dataset, "index.json was altered")
    if metadata.get("version") != VERSION:
        raise SequenceIndexError(
            f"{path}: format version {metadata.get('version')}, this megatron_bfp reads {VERSION}; update it, or "
            f"rebuild the index: {_remedy(path, dataset)}"
        )
    if not _has_form(metadata):
        raise _damaged(path, dataset, "index.json was altered")
    described = (metadata["seq_length"], *metadata["documents"], metadata["max_documents_per_sequence"])
    if described != (key.seq_length, key.first_document, key.end_document, key.max_documents_per_sequence):
        raise _damaged(path, dataset, "index.json describes another index; the directory was renamed")
    return metadata


def _has_form(metadata: dict[str, Any]) -> bool:
    """Whether index.json has the entries that ``_metadata`` writes, with their types."""
    example = {
        "counts": dict.fromkeys(("documents", "empty_documents", "padding", "sequences", "tokens"), 0),
        "documents": [0, 0],
        "files": {f"{name}.npy": {"bytes": 0, "sha256": ""} for name in ARRAYS},
        "fingerprint": {"bytes": 0, "sampled_sha256": "", "sha256": ""},
        "format": "",
        "seq_length": 0,
        "version": 0,
    }

    def same_form(value: Any, model: Any) -> bool:
        if type(value) is not type(model):
            return False
        if isinstance(model, dict):
            return value.keys() == model.keys() and all(same_form(value[name], model[name]) for name in model)
        if isinstance(model, list):
            return len(value) == len(model) and all(map(same_form, value, model))
        return True

    without_cap = {name: value for name, value in metadata.items() if name != "max_documents_per_sequence"}
    return "max_documents_per_sequence" in metadata and same_form(without_cap, example)


def _check_fingerprint(path: str, fingerprint: dict[str, Any], dataset: IndexedDataset) -> None:
    found = sampled_fingerprint(dataset.idx_content)
    if any(found[name] != fingerprint[name] for name in found):
        raise SequenceIndexError(
            f"{path}: it was built from another {idx_path(dataset.prefix)} than the one that is there now (the "
            f"fingerprint differs). If the dataset was written anew, rebuild the index: {_remedy(path, dataset)}"
        )


def _open_table(path: str, key: IndexKey, metadata: dict[str, Any], dataset: IndexedDataset) -> SequenceTable:
    """Map the arrays and check all that does not depend on the number of documents."""
    arrays = {}
    for name in ARRAYS:
        file_path = os.path.join(path, f"{name}.npy")
        described = metadata["files"][f"{name}.npy"]
        try:
            if os.path.getsize(file_path) != described["bytes"]:
                raise ValueError("its size is not what index.json says")
            arrays[name] = np.asarray(np.load(file_path, mmap_mode="r", allow_pickle=False))
            if name == "runs":  # small whatever the corpus: read and checked whole
                with open(file_path, "rb") as file:
                    content = file.read()
                if hashlib.sha256(content).hexdigest() != described["sha256"]:
                    raise ValueError("it was altered")
                arrays[name] = np.load(io.BytesIO(content), allow_pickle=False)
        except Exception as error:  # numpy's parser of array headers raises many kinds on damaged ones
            if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
                raise
            raise _damaged(path, dataset, f"{name}.npy cannot be read: {error}") from None
    counts = metadata["counts"]
    table = SequenceTable(key.seq_length, counts["sequences"], **arrays)
    if counts["documents"] != key.end_document - key.first_document or not _is_sound(table, counts, key):
        raise _damaged(path, dataset, "its arrays contradict index.json")
    return table


def _is_sound(table: SequenceTable, counts: dict[str, int], key: IndexKey) -> bool:
    """Whether the runs cover all sequences and entries, and the arrays have the right dtypes and shapes."""
    runs, ids, long = table.runs, table.document_ids, table.long_documents
    for array, columns in ((runs, 3), (long, 2)):
        if array.dtype != np.int64 or array.ndim != 2 or array.shape[1] != columns:
            return False
    if not long.flags.c_contiguous or ids.dtype != id_dtype(key.end_document) or ids.ndim != 1:
        return False
    if counts["padding"] != counts["sequences"] * key.seq_length - counts["tokens"] or counts["padding"] < 0:
        return False
    num_full = int(long[-1, 1]) if len(long) else 0
    firsts = np.append(runs[:, 0], counts["sequences"])
    entries = np.append(runs[:, 1], len(ids))
    per_run = np.diff(firsts)
    return (
        firsts[0] == num_full
        and entries[0] == 0
        and bool(np.all(per_run > 0))
        and bool(np.all(runs[:, 2] > 0))
        and bool(np.all(np.diff(entries) == per_run * runs[:, 2]))
    )


def _check_coverage(index: SequenceIndex, lengths: Any, census: Census, progress: Progress) -> None:
    """Every full chunk is listed, every remainder chunk is in exactly one sequence, and every sequence fits."""
    key, table = index.key, index.table

    def refuse(reason: str) -> NoReturn:
        raise _damaged(index.path, index.dataset, reason)

    if not np.array_equal(table.long_documents, census.long_documents + np.array([key.first_document, 0])):
        refuse("long_documents.npy does not match the lengths in the .idx")
    if len(table.document_ids) != census.num_remainders:
        refuse("document_ids.npy does not name every document once")
    if key.max_documents_per_sequence and np.any(table.runs[:, 2] > key.max_documents_per_sequence):
        refuse("a sequence has more documents than max_documents_per_sequence")
    remainders = np.empty(len(lengths), dtype=np.uint32)
    for first in progress(range(0, len(lengths), BLOCK), -(-len(lengths) // BLOCK), "reading lengths"):
        remainders[first : first + BLOCK] = lengths[first : first + BLOCK] % key.seq_length
    firsts = np.append(table.runs[:, 0], table.num_sequences)
    for (_, entry, chunks), count in progress(
        zip(table.runs.tolist(), np.diff(firsts).tolist()), len(table.runs), "checking sequences"
    ):
        step = max(1, BLOCK // chunks)
        for first in range(0, count, step):
            rows = table.document_ids[entry + first * chunks : entry + min(first + step, count) * chunks]
            documents = rows.astype(np.int64) - key.first_document
            if documents.min() < 0 or documents.max() >= len(lengths):
                refuse("document_ids.npy names documents outside the range")
            found = remainders[documents].astype(np.int64)
            remainders[documents] = 0  # so that a second mention of a document has no tokens left
            if found.min() < 1 or len(np.unique(documents)) != len(documents):
                refuse("document_ids.npy does not name every document once")
            if found.reshape(-1, chunks).sum(axis=1).max() > key.seq_length:
                refuse("document_ids.npy has a sequence that does not fit")


def _remove_leftovers(directory: str, is_locked: bool) -> None:
    """Remove what dead builders left.

    Builders of this host are dead if we hold the directory's lock; of others, and without locks, only age tells.
    """
    for name in os.listdir(directory):
        parts = name.split(".")
        if not name.startswith(".s") or len(parts) < 5 or IndexKey.from_name(parts[1]) is None:
            continue
        path = os.path.join(directory, name)
        host = ".".join(parts[2:]).removesuffix(".replaced").rsplit(".", 2)[0]
        try:
            is_old = time.time() - os.path.getmtime(path) > LEFTOVER_SECONDS
        except FileNotFoundError:
            continue
        if is_old or (is_locked and host == socket.gethostname()):
            logger.info("removing %s, left by a builder that was killed", path)
            shutil.rmtree(path, ignore_errors=True)


def _first_difference(expected: Any, found: Any, name: str = "") -> str:
    if isinstance(expected, dict) and isinstance(found, dict):
        for entry in expected:
            if expected[entry] != found.get(entry):
                return _first_difference(expected[entry], found.get(entry), f"{name}.{entry}" if name else entry)
    return name or "its form"


def _damaged(path: str, dataset: IndexedDataset, reason: str) -> SequenceIndexError:
    return SequenceIndexError(f"{path}: the sequence index is damaged: {reason}. Rebuild it: {_remedy(path, dataset)}")


def _remedy(path: str, dataset: IndexedDataset) -> str:
    """What to do about an index that cannot be used."""
    path = os.path.normpath(path)
    key = IndexKey.from_name(os.path.basename(path))
    if key is None or os.path.dirname(path) != os.path.normpath(index_directory(dataset.prefix)):
        return f"remove {path}; the next start builds it"
    return f"{_build_command(dataset, key)} --overwrite"


def _build_command(dataset: IndexedDataset, key: IndexKey) -> str:
    command = f"megatron-bfp-preprocess --indexed {dataset.prefix} --seq-length {key.seq_length}"
    if key.max_documents_per_sequence is not None:
        command += f" --max-documents-per-sequence {key.max_documents_per_sequence}"
    if (key.first_document, key.end_document) != (0, dataset.num_documents):
        command += " --split (as in training)"
    return command
