"""Join datasets into one: PREFIX.bin/.idx with the documents of all parts, in constant memory whatever their sizes.

Tokens go from file to file inside the kernel where it can, and where a .bin is sparse its holes stay holes. All lengths
and pointers of the parts are checked on the way, so damage is found and not copied. Parts are opened one at a time, for
there may be more of them than a process may have files open.
"""

import errno
import os
from collections.abc import Iterator, Sequence
from typing import BinaryIO, NamedTuple

import numpy as np

from ..errors import IndexedDatasetError, InputError, OptionError
from ..progress import Progress, without_progress
from .format import bin_path, idx_path
from .reader import IndexedDataset
from .writer import DatasetFiles, IdxWriter

COPIED_AT_ONCE = 1 << 26
"""Bytes of tokens in one step of a merge."""
READ_AT_ONCE = 1 << 22
"""Bytes in memory where the kernel cannot copy from file to file."""


class PartContent(NamedTuple):
    """What a part had when it was first looked at."""

    dtype: np.dtype
    num_sequences: int
    num_documents: int
    num_tokens: int


def merge(prefix: str, parts: Sequence[str], progress: Progress = without_progress) -> IndexedDataset:
    """Join datasets, with their documents in the order of the parts.

    The result is byte for byte that of writing all documents at once. It appears whole or not at all; until then a
    dataset of the same name stays.

    Args:
        prefix: path of the two files to write, without ".bin" and ".idx".
        parts: paths of the datasets to join, in the same form; one may be given twice, and may have no documents.

    Returns:
        The new dataset, opened.

    Raises:
        OptionError: there are no parts, or one of them would be overwritten.
        InputError: parts have different dtypes, or one is multimodal.
        IndexedDatasetError: a part is missing, damaged, or changes meanwhile; the new dataset cannot be written, or
            another process is writing it.
    """
    if not parts:
        raise OptionError(f"{prefix}: there is nothing to merge; give at least one dataset")
    contents = [_content(prefix, part) for part in progress(parts, len(parts), "opening parts")]
    for part, content in zip(parts, contents, strict=True):  # before anything is written
        _refuse_other_dtype(part, content, parts[0], contents[0])
    with DatasetFiles(prefix) as files:
        num_steps = sum(_num_copies(content.num_tokens * content.dtype.itemsize) for content in contents)
        for _ in progress(_copies(parts, contents, files.bin), num_steps, "merging"):
            pass
        _write_idx(files.idx_part, parts, contents, progress)
        files.publish()
    return IndexedDataset(prefix)


def copy_tokens(part: str, num_bytes: int, target: BinaryIO, offset: int) -> Iterator[None]:
    """Copy the .bin of a dataset to ``offset`` of a file, in steps of ``COPIED_AT_ONCE``.

    What is there must be the same bytes, left by a copy that was stopped, or nothing: holes are not written.

    Raises:
        IndexedDatasetError: it cannot be read, is shorter than ``num_bytes``, or the file cannot be written.
    """
    with _opened(bin_path(part)) as source:
        for first in range(0, max(1, num_bytes), COPIED_AT_ONCE):
            _copy_range(source, first, min(COPIED_AT_ONCE, num_bytes - first), target, offset + first)
            yield


def _copies(parts: Sequence[str], contents: Sequence[PartContent], target: BinaryIO) -> Iterator[None]:
    end = 0  # of what was copied, bytes
    for part, content in zip(parts, contents, strict=True):
        _refuse_changed(IndexedDataset(part, mmap=False), content)
        num_bytes = content.num_tokens * content.dtype.itemsize
        yield from copy_tokens(part, num_bytes, target, end)
        end += num_bytes


def _write_idx(path: str, parts: Sequence[str], contents: Sequence[PartContent], progress: Progress) -> None:
    num_sequences = sum(content.num_sequences for content in contents)
    num_documents = sum(content.num_documents for content in contents)
    with IdxWriter(path, contents[0].dtype, num_sequences, num_documents) as idx:
        for part, content in progress(zip(parts, contents, strict=True), len(parts), "joining lengths"):
            _append_lengths(part, content, idx)
        idx.finish()


def _content(prefix: str, part: str) -> PartContent:
    """What a part has, if it can be joined to ``prefix``."""
    _refuse_to_overwrite(prefix, part)
    return _content_of(IndexedDataset(part, mmap=False))


def _content_of(dataset: IndexedDataset) -> PartContent:
    if dataset.has_modes:
        raise InputError(
            f"{idx_path(dataset.prefix)}: is multimodal, with a mode for each sequence, which the merged dataset would "
            "lose; merge it with Megatron-LM's tools/merge_datasets.py --multimodal"
        )
    return PartContent(dataset.dtype, dataset.num_sequences, dataset.num_documents, dataset.num_tokens)


def _refuse_other_dtype(part: str, content: PartContent, first: str, first_content: PartContent) -> None:
    if content.dtype != first_content.dtype:
        raise InputError(
            f"{idx_path(part)}: its tokens are {content.dtype}, those of {idx_path(first)} are {first_content.dtype}; "
            "only datasets of one tokenizer can be merged"
        )


def _refuse_to_overwrite(prefix: str, part: str) -> None:
    for path_of in (bin_path, idx_path):
        try:
            is_same = os.path.samefile(path_of(prefix), path_of(part))
        except OSError:  # one of them is not there: a missing part is told of when it is opened
            continue
        if is_same:
            raise OptionError(f"{path_of(prefix)}: is one of the parts to merge ({part}); give the result another name")


def _num_copies(num_bytes: int) -> int:
    """Steps in which a .bin of this size is copied; one without tokens is a step, too."""
    return max(1, -(-num_bytes // COPIED_AT_ONCE))


def _refuse_changed(part: IndexedDataset, content: PartContent) -> None:
    if _content_of(part) != content:
        raise IndexedDatasetError(f"{part.prefix}: was changed while it was merged; merge again when it is complete")


def _append_lengths(part: str, content: PartContent, idx: IdxWriter) -> None:
    dataset = IndexedDataset(part, mmap=False)
    _refuse_changed(dataset, content)
    for lengths in dataset.checked_lengths():
        idx.add_sequences(lengths)
    for sequences_per_document in dataset.checked_documents():
        idx.add_documents(sequences_per_document)


def _opened(path: str) -> BinaryIO:
    try:
        return open(path, "rb", buffering=0)
    except OSError as error:
        raise IndexedDatasetError(f"{path}: cannot be read: {error.strerror}") from None


def _copy_range(source: BinaryIO, first: int, size: int, target: BinaryIO, offset: int) -> None:
    """Copy ``size`` bytes from ``first`` of one file to ``offset`` of the other; holes become holes behind its end."""
    for data_first, data_end in _data_ranges(source, first, first + size):
        while data_first < data_end:
            data_first += _copy_some(source, data_first, data_end - data_first, target, offset + data_first - first)
    try:
        if os.fstat(target.fileno()).st_size < offset + size:  # a hole at the end needs its size
            os.ftruncate(target.fileno(), offset + size)
    except OSError as error:
        raise IndexedDatasetError(f"{target.name}: cannot be written: {error.strerror}") from None


def _data_ranges(file: BinaryIO, first: int, end: int) -> Iterator[tuple[int, int]]:
    """Where a file has data between two offsets. The rest are holes, which read as zeros."""
    while first < end:
        try:
            data_first = os.lseek(file.fileno(), first, os.SEEK_DATA)
            data_end = os.lseek(file.fileno(), data_first, os.SEEK_HOLE)
        except OSError as error:
            is_hole = error.errno == errno.ENXIO and os.fstat(file.fileno()).st_size >= end
            if not is_hole:  # a file system that does not know holes, or a file that was cut, as the copy will find
                yield first, end
            return
        if data_first < end:
            yield data_first, min(data_end, end)
        first = data_end


def _copy_some(source: BinaryIO, first: int, size: int, target: BinaryIO, offset: int) -> int:
    """Copy up to ``size`` bytes between two files; returns how many, at least one."""
    try:
        copied = os.copy_file_range(source.fileno(), target.fileno(), size, first, offset)
    except (AttributeError, OSError):  # not on this system, or not between these two; a real error comes again below
        copied = 0
    return copied or _copy_through_memory(source, first, min(size, READ_AT_ONCE), target, offset)


def _copy_through_memory(source: BinaryIO, first: int, size: int, target: BinaryIO, offset: int) -> int:
    try:
        content = os.pread(source.fileno(), size, first)
    except OSError as error:
        raise IndexedDatasetError(f"{source.name}: cannot be read: {error.strerror}") from None
    if not content:
        raise IndexedDatasetError(f"{source.name}: ends at byte {first}; it was cut while it was merged, merge again")
    try:
        return os.pwrite(target.fileno(), content, offset)
    except OSError as error:
        raise IndexedDatasetError(f"{target.name}: cannot be written: {error.strerror}") from None
