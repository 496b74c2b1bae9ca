"""Build sequence indexes. Readers see a complete index or none, even if builders are killed or race each other.

An index is written to a temporary folder beside its own and renamed when it is complete and on disk. Of several
builders one works and the others take its result. The next builder removes what killed ones left, if they have
certainly ended or if it is old.
"""

import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ..console import tell
from ..errors import OptionError, SequenceIndexError
from ..files import has_ended, locked_directory, process_label, sync_file
from ..indexed_dataset.reader import IndexedDataset
from ..packing.best_fit import Run, count_sequences
from ..packing.census import Census, take_census
from ..packing.even import plan
from ..packing.placing import place_documents, sort_documents
from ..packing.positions import positions_of
from ..packing.table import id_dtype, run_rows
from ..progress import Progress, without_progress
from ..samples.fill_in_the_middle import FimLengths, longest_rearranged
from .fingerprints import idx_sha256
from .format import canonical_json, metadata
from .key import IndexKey, build_command, index_directories
from .reader import SequenceIndex

LEFTOVER_SECONDS = 24 * 3600
"""What is left of a build on another machine or in another container is removed after this time, counted from its last
change: whether its process has ended cannot be seen from here."""

Say = Callable[[str], None]

logger = logging.getLogger(__name__)


def open_or_build(
    dataset: IndexedDataset, key: IndexKey, cache_path: str | None = None, progress: Progress = without_progress
) -> SequenceIndex:
    """Open an index beside the dataset or under ``cache_path``; build it where it is missing.

    It is built beside the dataset, or, if that place is not writable, under the cache path. The process that builds it
    prints a line when it begins and one when it is done.

    Raises:
        SequenceIndexError: an index is there but wrong, or neither place can be written.
    """
    index = open_existing(dataset, key, cache_path)
    if index is not None:
        return index
    reasons = []
    for directory in index_directories(dataset, cache_path):
        try:
            os.makedirs(directory, exist_ok=True)
            if not os.access(directory, os.W_OK):
                raise PermissionError(13, "not writable")
        except OSError as error:
            reasons.append(f"{directory} ({error.strerror})")
            continue
        return build(dataset, key, directory, progress=progress, say=_print)
    raise SequenceIndexError(
        f"{dataset.prefix}: there is no sequence index {key.name} and no place to build it: {', '.join(reasons)}. "
        f"Give a writable --data-cache-path, or build it where that place is writable: {build_command(dataset, key)}"
    )


def open_existing(dataset: IndexedDataset, key: IndexKey, cache_path: str | None = None) -> SequenceIndex | None:
    """The index beside the dataset or under ``cache_path``; None if it has not been built.

    Raises:
        SequenceIndexError: an index is there but wrong.
    """
    for directory in index_directories(dataset, cache_path):
        if os.path.isdir(os.path.join(directory, key.name)):
            return SequenceIndex(os.path.join(directory, key.name), dataset)
    return None


def open_or_refuse(
    dataset: IndexedDataset, key: IndexKey, cache_path: str | None = None, split: str | None = None
) -> SequenceIndex:
    """The index beside the dataset or under ``cache_path``, for a tool that builds none.

    Args:
        split: the ``--split`` that the key comes from, if it is known; for the command in the message.

    Raises:
        SequenceIndexError: there is none, and the message says which are there and how to build it; or it is wrong.
    """
    index = open_existing(dataset, key, cache_path)
    if index is None:
        searched = index_directories(dataset, cache_path)
        raise SequenceIndexError(
            f"{' and '.join(searched)}: there is no sequence index {key.name}{_others(searched)}. Build it: "
            f"{build_command(dataset, key, split)}"
        )
    return index


def _others(directories: list[str]) -> str:
    """The indexes that are there, as a part of a sentence: the wrong --split is asked for easily."""
    names = {
        name
        for directory in directories
        if os.path.isdir(directory)
        for name in os.listdir(directory)
        if IndexKey.from_name(name)
    }
    return f", only {', '.join(sorted(names))}" if names else ""


def build(
    dataset: IndexedDataset,
    key: IndexKey,
    directory: str,
    overwrite: bool = False,
    progress: Progress = without_progress,
    say: Say | None = None,
) -> SequenceIndex:
    """Build an index, or take the one that is there.

    Any number of processes may build the same index: one works, the others wait for it and open its result. What killed
    builders left behind is removed.

    Args:
        directory: where the index's own directory goes.
        overwrite: replace an index that is there.
        say: gets a line when this process begins to build, and one when it is done.

    Raises:
        SequenceIndexError: an index is there and wrong, and ``overwrite`` is off; or it cannot be written.
        IndexedDatasetError: the .idx has impossible pointers.
    """
    if key.end_document > dataset.num_documents:
        raise OptionError(f"{dataset.prefix}: has {dataset.num_documents} documents, none up to {key.end_document}")
    target, was_built = os.path.join(directory, key.name), False
    try:
        os.makedirs(directory, exist_ok=True)
        with locked_directory(directory):
            _remove_leftovers(directory)
            if overwrite or not os.path.isdir(target):
                started = time.monotonic()
                if say:
                    documents = key.end_document - key.first_document
                    say(f"building the sequence index {target} of {documents:,} documents; it is kept for later starts")
                _build_and_rename(dataset, key, target, overwrite, progress)
                was_built = True
    except OSError as error:
        raise SequenceIndexError(f"{target}: cannot be written: {error.strerror or error}") from error
    index = SequenceIndex(target, dataset)
    index.was_built = was_built
    if was_built and say:
        say(f"built {target} in {time.monotonic() - started:.1f} s: {len(index):,} sequences")
    return index


def _print(line: str) -> None:
    """Say a line to whoever started the run: loggers are often silent in training scripts."""
    tell(f"megatron_bfp: {line}")


def _build_and_rename(dataset: IndexedDataset, key: IndexKey, target: str, overwrite: bool, progress: Progress) -> None:
    temporary = os.path.join(os.path.dirname(target), f".{key.name}.{process_label()}.{secrets.token_hex(4)}")
    replaced = temporary + ".replaced"
    os.mkdir(temporary)
    try:
        _write(dataset, key, temporary, progress)
        if overwrite and os.path.isdir(target):
            os.rename(target, replaced)
        _rename(temporary, target, replaced)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)
    sync_file(os.path.dirname(target))


def _rename(temporary: str, target: str, replaced: str) -> None:
    """Give a complete index its name; if that fails, the index that had it before gets it back."""
    try:
        os.rename(temporary, target)
    except OSError:
        # A builder whose lock this file system did not show us may have been faster; its result is as good. Which error
        # it is to rename over a directory depends on the file system.
        if os.path.isdir(target):
            return
        if os.path.isdir(replaced):
            os.rename(replaced, target)
        raise


def _write(dataset: IndexedDataset, key: IndexKey, directory: str, progress: Progress) -> None:
    lengths = packed_lengths(dataset, key)
    census = take_census(lengths, key.seq_length, progress)
    runs = planned_runs(key, census)
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
    of_idx = idx_sha256(dataset, progress)
    described = metadata(key, census, count_sequences(census, runs), directory, dataset, of_idx, progress)
    with open(os.path.join(directory, "index.json"), "wb") as file:
        file.write(canonical_json(described))
    for name in os.listdir(directory):
        sync_file(os.path.join(directory, name))
    sync_file(directory)


def packed_lengths(dataset: IndexedDataset, key: IndexKey) -> Any:
    """What is packed of each document of an index, in tokens: anything with a length whose slices are numpy arrays."""
    lengths: Any = dataset.document_lengths.range(key.first_document, key.end_document)
    if key.fim is not None:
        longest = longest_rearranged(key.seq_length, key.targets_only)
        lengths = FimLengths(lengths, key.fim, longest, key.first_document)
    return positions_of(lengths, key.targets_only)


def planned_runs(key: IndexKey, census: Census) -> list[Run]:
    """The plan of an index: the same for the same key and census, wherever and whenever it is made."""
    return plan(census.remainders, key.seq_length, key.max_documents_per_sequence, key.even_sequences)


def _remove_leftovers(directory: str) -> None:
    """Remove the folders of builders that have ended, and those too old to belong to a running one."""
    for name in os.listdir(directory):
        parts = name.split(".")
        if not name.startswith(".s") or len(parts) < 4 or IndexKey.from_name(parts[1]) is None:
            continue
        path = os.path.join(directory, name)
        try:
            is_old = time.time() - os.path.getmtime(path) > LEFTOVER_SECONDS
        except FileNotFoundError:
            continue
        if is_old or has_ended(parts[2]):
            logger.info("removing %s, left by a builder that was killed", path)
            shutil.rmtree(path, ignore_errors=True)
