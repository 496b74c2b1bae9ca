"""An open sequence index: which chunks of which documents make up each training sequence.

Opening does not depend on the number of documents: it checks names, sizes, index.json and the table of runs,
both ends of the other arrays and a sampled fingerprint of the .idx. Each read of a sequence is checked against the
.idx. ``verify.verify`` makes the checks that need a full pass. ``format`` describes the files.
"""

import dataclasses
import hashlib
import io
import json
import os
from typing import Any, NoReturn

import numpy as np

from ..errors import SequenceIndexError
from ..indexed_dataset.format import idx_path
from ..indexed_dataset.memory_maps import expect_scattered_reads, load_array
from ..indexed_dataset.reader import IndexedDataset
from ..packing.chunks import ChunkSpan
from ..packing.table import SequenceTable, id_dtype
from ..samples.fill_in_the_middle import NUM_SENTINELS, longest_rearranged
from .fingerprints import ends_sha256, sampled_fingerprint
from .format import ARRAYS, FORMAT, VERSION, canonical_json, checksum, num_inputs
from .key import IndexKey, build_command, damaged, remedy


class SequenceIndex:
    """An open sequence index. ``index.chunk_spans(i)`` gives the chunks of sequence i.

    Instances are pickled as their paths and reopened.

    Args:
        path: the index's directory.
        dataset: the dataset it was built from.

    Attributes:
        key: what the index is for.
        counts: the counts of index.json: documents, empty_documents, tokens, sequences, padding; with targets only also
            one_token_documents, which are in no sequence; with fill-in-the-middle also fim_documents, which are
            rearranged, and fim_too_long_documents, which were chosen and have no room for sentinels.
        idx_sha256: of the whole .idx that it was built from, in hexadecimal.
        identity: what distinguishes it from other indexes, wherever it and its dataset lie: ``idx_sha256``, its name.
        checksum: of everything that it holds: sha256 in hexadecimal, the same for equal indexes on all hosts.
        was_built: whether it was built just now by this process.

    Raises:
        SequenceIndexError: it is missing, damaged, stale, or of another dataset; the message says what to do.
    """

    def __init__(self, path: str, dataset: IndexedDataset) -> None:
        self.path, self.dataset = str(path), dataset
        self.was_built = False
        self.key = _key_of(self.path, dataset)
        try:
            metadata = _read_metadata(self.path, self.key, dataset)
            _check_fingerprint(self.path, metadata["fingerprint"], dataset)
            self.table = _open_table(self.path, self.key, metadata, dataset)
        except OSError as error:
            raise SequenceIndexError(f"{error.filename or self.path}: cannot be read: {error.strerror}") from None
        self.counts: dict[str, int] = metadata["counts"]
        self._longest_rearranged = longest_rearranged(self.key.seq_length, self.key.targets_only)
        self._shift = _shift_to_sequences(dataset, self.key, self.counts)
        self.idx_sha256: str = metadata["fingerprint"]["sha256"]
        self.identity = f"{self.idx_sha256} {self.key.name}"
        self.checksum: str = metadata["checksum"]

    def __reduce__(self) -> tuple:
        return type(self), (self.path, self.dataset)

    def __repr__(self) -> str:
        return f"SequenceIndex({self.path!r}: {self.counts['tokens']} tokens in {len(self)} sequences)"

    def __len__(self) -> int:
        return self.table.num_sequences

    def chunk_spans(self, sequence: int) -> list[ChunkSpan]:
        """The chunks of one sequence, in order, in tokens from the start of the .bin.

        Raises:
            IndexError: no such sequence.
            SequenceIndexError: the entry contradicts the dataset or the sequence length.
        """
        entry, key = self.table.entry(sequence), self.key
        documents = entry.documents.tolist()
        for document in documents:
            if not key.first_document <= document < key.end_document:
                self._refuse(sequence, f"names document {document}")
        idx_sequences = None if self._shift is None else entry.documents + self._shift
        document_spans = self.dataset.spans(entry.documents, idx_sequences)
        chunks, sentinels = entry.chunk_spans(document_spans, key.seq_length, key.targets_only), 0
        if key.fim is not None:
            rule = self._longest_rearranged, key.targets_only
            sentinels = NUM_SENTINELS * key.fim.rearrange(chunks, entry.documents, document_spans, *rule)
        num_tokens = sentinels
        if entry.full_chunk is not None:
            ((start, end),) = document_spans
            if entry.full_chunks != (end - start - key.targets_only + sentinels) // key.seq_length:
                self._refuse(sequence, f"does not match the length of document {documents[0]}")
        for _, start, end, _ in chunks:
            if start == end:
                self._refuse(sequence, "has an empty chunk")
            num_tokens += end - start
        if num_tokens > key.seq_length:
            self._refuse(sequence, "has more tokens than fit")
        return chunks

    def work(self, sequences: Any) -> np.ndarray:
        """The work of sequences, from the index alone: no document is read. See ``SequenceTable.work``.

        Args:
            sequences: integers in [0, len(self)), of any shape.

        Returns:
            int64 of that shape, tokens squared.

        Raises:
            IndexError: there is no such sequence.
        """
        return self.table.work(sequences)

    def _refuse(self, sequence: int, reason: str) -> NoReturn:
        raise damaged(self.path, self.dataset, f"sequence {sequence} {reason}")


def _key_of(path: str, dataset: IndexedDataset) -> IndexKey:
    key = IndexKey.from_name(os.path.basename(os.path.normpath(path)))
    if key is None:
        raise SequenceIndexError(f"{path}: not a sequence index; one is a directory with a name like s2048-d0-969")
    if not os.path.isdir(path):
        raise SequenceIndexError(f"{path}: no such sequence index; build it: {build_command(dataset, key)}")
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
        raise damaged(path, dataset, f"index.json cannot be read: {error}") from None
    if not canonical or not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise damaged(path, dataset, "index.json was altered")
    if metadata.get("version") != VERSION:
        raise SequenceIndexError(
            f"{path}: the index has format {metadata.get('version')}, and this megatron_bfp reads format {VERSION}. "
            f"Rebuild the index: {remedy(path, dataset)}"
        )
    if not _has_form(metadata) or metadata["checksum"] != checksum(metadata):
        raise damaged(path, dataset, "index.json was altered")
    described = (metadata["seq_length"], *metadata["documents"], metadata["max_documents_per_sequence"])
    fim = (metadata["fim_rate"], metadata["fim_seed"]) if "fim_rate" in metadata else None
    described += (metadata["even_sequences"], metadata.get("targets_only", False), fim)
    if described != dataclasses.astuple(key):
        raise damaged(path, dataset, "index.json describes another index; the directory was renamed")
    return metadata


def _has_form(metadata: dict[str, Any]) -> bool:
    """Whether index.json has the entries that ``format.metadata`` writes, with their types."""
    counts = ["documents", "empty_documents", "padding", "sequences", "tokens"]
    if_asked_for: dict[str, Any] = {}
    if "targets_only" in metadata:
        counts.append("one_token_documents")
        if_asked_for["targets_only"] = True
    if "fim_rate" in metadata:
        counts += ["fim_documents", "fim_too_long_documents"]
        if_asked_for |= {"fim_rate": 0.5, "fim_seed": 0}
    example = {
        "checksum": "",
        "counts": dict.fromkeys(counts, 0),
        "documents": [0, 0],
        "even_sequences": False,
        "files": {f"{name}.npy": {"bytes": 0, "ends_sha256": "", "sha256": ""} for name in ARRAYS},
        "fingerprint": {"bytes": 0, "sampled_sha256": "", "sha256": ""},
        "format": "",
        "seq_length": 0,
        "version": 0,
    } | if_asked_for

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
    current = sampled_fingerprint(dataset.idx_content)
    if any(current[name] != fingerprint[name] for name in current):
        raise SequenceIndexError(
            f"{path}: it was built from another {idx_path(dataset.prefix)} than the one that is there now (the "
            f"fingerprint differs). If the dataset was written anew, rebuild the index: {remedy(path, dataset)}"
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
            if ends_sha256(file_path) != described["ends_sha256"]:
                raise ValueError("it was altered, or is another index's")
            arrays[name] = load_array(file_path)
            expect_scattered_reads(arrays[name])
            if name == "runs":  # small whatever the corpus: read and checked whole
                with open(file_path, "rb") as file:
                    content = file.read()
                if hashlib.sha256(content).hexdigest() != described["sha256"]:
                    raise ValueError("it was altered")
                arrays[name] = np.load(io.BytesIO(content), allow_pickle=False)
        except Exception as error:  # numpy's parser of array headers raises many kinds on damaged ones
            if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
                raise
            raise damaged(path, dataset, f"{name}.npy cannot be read: {error}") from None
    counts = metadata["counts"]
    table = SequenceTable(key.seq_length, counts["sequences"], **arrays)
    if counts["documents"] != key.end_document - key.first_document or not _is_sound(table, counts, key):
        raise damaged(path, dataset, "its arrays contradict index.json")
    return table


def _shift_to_sequences(dataset: IndexedDataset, key: IndexKey, counts: dict[str, int]) -> int | None:
    """What to add to a document's id to get its sequence's, if each document is one sequence, as nearly always.

    That is certain if there are as many sequences as documents and no document is empty: a document without a sequence
    would be empty.
    """
    if counts["empty_documents"] or key.first_document == key.end_document:
        return None
    first, end = (int(dataset.document_indices[document]) for document in (key.first_document, key.end_document))
    return first - key.first_document if end - first == key.end_document - key.first_document else None


def _is_sound(table: SequenceTable, counts: dict[str, int], key: IndexKey) -> bool:
    """Whether the runs cover all sequences and entries, and the arrays have the right dtypes and shapes."""
    runs, ids, long = table.runs, table.document_ids, table.long_documents
    for array, columns in ((runs, 4), (long, 2)):
        if array.dtype != np.int64 or array.ndim != 2 or array.shape[1] != columns:
            return False
    if not long.flags.c_contiguous or ids.dtype != id_dtype(key.end_document) or ids.ndim != 1:
        return False
    if counts["padding"] != counts["sequences"] * key.seq_length - num_inputs(key, counts) or min(counts.values()) < 0:
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
        and bool(np.all((runs[:, 3] >= runs[:, 2]) & (runs[:, 3] <= key.seq_length**2)))
        and bool(np.all(np.diff(entries) == per_run * runs[:, 2]))
    )
