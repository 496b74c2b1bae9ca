"""Finished tasks to growing datasets, in order, while other tasks are still tokenized.

The datasets grow in the job's folder. When a task's tokens are in them and on disk, the task's own files are removed.
So the disk holds one copy of the tokens, and a job that is resumed continues behind what was joined.
"""

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, BinaryIO

import numpy as np

from ..errors import IndexedDatasetError, InputError
from ..files import sync_file
from ..indexed_dataset.format import bin_path, idx_path
from ..indexed_dataset.merging import copy_tokens
from ..indexed_dataset.reader import IndexedDataset
from ..indexed_dataset.writer import IdxWriter, IndexedDatasetWriter
from ..progress import Progress, without_progress
from .plan import Task
from .task import TaskRecord, read_record, task_folder, task_prefix

LENGTHS_AT_ONCE = 1 << 20
"""Lengths that are read at once: 4 MB."""
TOKENS_AT_ONCE = 1 << 22
"""Tokens that are read at once: 8 or 16 MB."""


class TaskJoiner:
    """Joins tasks in the order in which they were announced, in a thread.

    Args:
        folder: of the job, with the finished tasks.
        prefixes: [keys], paths of the growing datasets.
        dtype: of their tokens, one of ``TOKEN_DTYPES``.
    """

    def __init__(self, folder: str, prefixes: Sequence[str], dtype: Any) -> None:
        self._folder, self._prefixes, self._dtype = folder, prefixes, dtype
        self._waiting: list[int] = []
        """Numbers of the announced tasks, in order."""
        self._finished: dict[int, tuple[TaskRecord, bool]] = {}
        self._datasets: list[GrowingDataset] = []
        self._thread = ThreadPoolExecutor(1)
        self._copies: list[Future[None]] = []

    def __enter__(self) -> "TaskJoiner":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        for dataset in self._datasets:
            dataset.close()

    def announce(self, number: int) -> None:
        """Join this task behind those announced before, once it is finished."""
        self._waiting.append(number)

    def add(self, number: int, record: TaskRecord, is_new: bool) -> None:
        """Say that an announced task is finished.

        Args:
            is_new: it was finished after ``__init__``, and so is not joined yet.

        Raises:
            IndexedDatasetError: an earlier task cannot be read, or a dataset cannot be written.
            InputError: an earlier task was joined, and its tokens are not there.
        """
        self._finished[number] = record, is_new
        while self._waiting and self._waiting[0] in self._finished:
            first = self._waiting.pop(0)
            self._copies.append(self._thread.submit(self._append, first, *self._finished.pop(first)))
        while self._copies and self._copies[0].done():
            self._copies.pop(0).result()

    def finish(self, progress: Progress = without_progress) -> None:
        """Write each dataset's .idx, and close the files. All tasks must be finished.

        Raises:
            As ``add``.
        """
        for copy in progress(self._copies, len(self._copies), "joining tasks"):
            copy.result()
        for dataset in self._opened():
            dataset.finish(progress)
            dataset.close()

    def _opened(self) -> list["GrowingDataset"]:
        if not self._datasets:
            self._datasets = [GrowingDataset(prefix, self._dtype) for prefix in self._prefixes]
            sync_file(self._folder)  # before any task's files are removed
        return self._datasets

    def _append(self, number: int, record: TaskRecord, is_new: bool) -> None:
        datasets = self._opened()
        was_joined = not is_new and is_joined(self._folder, number, len(datasets))
        for key, dataset in enumerate(datasets):
            counts = record.num_documents[key], record.num_tokens[key]
            if was_joined:
                dataset.pass_over(*counts)
            else:
                dataset.append(task_prefix(self._folder, number, key), *counts)
        for path in _files_of(self._folder, number, len(datasets)):
            with suppress(FileNotFoundError):
                os.remove(path)


def is_joined(folder: str, number: int, num_keys: int) -> bool:
    """Whether a finished task was joined: the first of its files is removed when all of it is on disk."""
    return not all(map(os.path.exists, _files_of(folder, number, num_keys)))


def _files_of(folder: str, number: int, num_keys: int) -> list[str]:
    prefixes = [task_prefix(folder, number, key) for key in range(num_keys)]
    return [path_of(prefix) for prefix in prefixes for path_of in (bin_path, idx_path)]


def take_out_moved(
    folder: str, prefixes: Sequence[str], dtype: Any, before: Sequence[Task], now: Sequence[Task]
) -> dict[str, int]:
    """Undo the joining of tasks whose position changes, when a job is planned again.

    Tasks that both plans begin with stay in the growing datasets. Other joined tasks get files of their own again if
    they are kept.

    Args:
        folder: of the job.
        prefixes, dtype: as for ``TaskJoiner``.
        before, now: the tasks of both plans, in order.

    Returns:
        File name -> bytes: what remains of the files of the growing datasets.

    Raises:
        InputError: a task is lost that was joined.
        IndexedDatasetError: a task's files cannot be written.
    """
    kept = {task.number for task in now}
    documents, tokens = [0] * len(prefixes), [0] * len(prefixes)
    sizes = _joined_sizes(prefixes, documents, tokens, dtype)
    is_in_order = True
    for index, task in enumerate(before[: _num_joined(folder, before, len(prefixes))]):
        record = read_record(folder, task.number)
        is_in_order = is_in_order and index < len(now) and now[index].number == task.number
        for key, prefix in enumerate(prefixes):
            first_document, first_token = documents[key], tokens[key]
            documents[key] += record.num_documents[key]
            tokens[key] += record.num_tokens[key]
            if not is_in_order and task.number in kept:
                ranges = range(first_document, documents[key]), range(first_token, tokens[key])
                take_out(prefix, task_prefix(folder, task.number, key), dtype, *ranges)
        if is_in_order:
            sizes = _joined_sizes(prefixes, documents, tokens, dtype)
    return sizes


def _num_joined(folder: str, tasks: Sequence[Task], num_keys: int) -> int:
    """How many of the first tasks are in the growing datasets."""
    is_finished = [os.path.isdir(task_folder(folder, task.number)) for task in tasks]
    joined = [
        index for index, task in enumerate(tasks) if is_finished[index] and is_joined(folder, task.number, num_keys)
    ]
    number = joined[-1] + 1 if joined else 0
    if not all(is_finished[:number]):
        raise InputError(f"{folder}: a task is lost that comes before a joined one; remove this folder")
    return number


def _joined_sizes(
    prefixes: Sequence[str], documents: Sequence[int], tokens: Sequence[int], dtype: Any
) -> dict[str, int]:
    """File name -> bytes of growing datasets with so many documents and tokens each."""
    sizes = {}
    for prefix, num_documents, num_tokens in zip(prefixes, documents, tokens, strict=True):
        name = os.path.basename(prefix)
        sizes[name + ".bin"] = num_tokens * np.dtype(dtype).itemsize
        sizes[name + ".lengths"] = num_documents * 4
    return sizes


def take_out(prefix: str, task: str, dtype: Any, documents: range, tokens: range) -> None:
    """Write a task's part of a growing dataset to the task's own files again, and force them to disk.

    Args:
        prefix: of the growing dataset, which keeps the part.
        task: prefix of the files to write.
        documents, tokens: the part's range in the growing dataset.

    Raises:
        InputError: the growing dataset is shorter.
        IndexedDatasetError: the files cannot be written.
    """
    itemsize = np.dtype(dtype).itemsize
    lengths = _read(prefix + ".lengths", np.int32, documents.start * 4, len(documents))
    ends = np.cumsum(lengths, dtype=np.int64)
    with IndexedDatasetWriter(task, dtype) as writer:
        first = done = 0
        while first < len(lengths):
            end = max(first + 1, int(np.searchsorted(ends, done + TOKENS_AT_ONCE, "right")))
            num_tokens = int(ends[end - 1]) - done
            offset = (tokens.start + done) * itemsize
            writer.add(_read(bin_path(prefix), dtype, offset, num_tokens), lengths[first:end].astype(np.int64))
            first, done = end, done + num_tokens
        writer.finalize()
    if done != len(tokens):
        raise _is_shorter(prefix)


def _read(path: str, dtype: Any, offset: int, number: int) -> np.ndarray:
    try:
        values = np.fromfile(path, dtype, number, offset=offset)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    if len(values) != number:
        raise _is_shorter(path.rsplit(".", 1)[0])
    return values


def _is_shorter(prefix: str) -> InputError:
    return InputError(
        f"{bin_path(prefix)}: is shorter than the tasks that were joined in it; remove {os.path.dirname(prefix)} to "
        "begin anew"
    )


class GrowingDataset:
    """PREFIX.bin and PREFIX.lengths, which grow task by task, and at last PREFIX.idx.

    The .lengths file holds the int32 length of each document. Both files stay when they are closed, so that another
    process can continue them.

    Args:
        prefix: path of the files without their endings.
        dtype: of a token, one of ``TOKEN_DTYPES``.

    Raises:
        IndexedDatasetError: the files cannot be written. Any method may raise it.
    """

    def __init__(self, prefix: str, dtype: Any) -> None:
        self._prefix, self._dtype = prefix, np.dtype(dtype)
        self._num_documents = self._num_tokens = 0
        self._bin, self._lengths = (_open_to_continue(path) for path in (bin_path(prefix), prefix + ".lengths"))

    def close(self) -> None:
        """Close the files."""
        self._bin.close()
        self._lengths.close()

    def append(self, task: str, num_documents: int, num_tokens: int) -> None:
        """Copy a task's dataset to the end, and force it to disk.

        Args:
            task: its prefix. Its documents have one idx sequence each.
            num_documents, num_tokens: what it must hold.

        Raises:
            IndexedDatasetError: it is damaged.
        """
        source = IndexedDataset(task, mmap=False)
        if (source.dtype, source.num_documents, source.num_tokens) != (self._dtype, num_documents, num_tokens):
            raise IndexedDatasetError(
                f"{idx_path(task)}: does not hold what the task's record says; remove {os.path.dirname(task)}, and the "
                "same command does this task again"
            )
        itemsize = self._dtype.itemsize
        for _ in copy_tokens(task, num_tokens * itemsize, self._bin, self._num_tokens * itemsize):
            pass
        try:
            self._lengths.seek(self._num_documents * 4)
            for lengths in source.checked_lengths():
                _write_all(self._lengths, lengths)
            for file in (self._bin, self._lengths):
                os.fdatasync(file.fileno())
        except OSError as error:
            raise self._cannot_write(error) from None
        self._add(num_documents, num_tokens)

    def pass_over(self, num_documents: int, num_tokens: int) -> None:
        """Continue behind a task that was appended before.

        Raises:
            InputError: it was not.
        """
        self._add(num_documents, num_tokens)
        if _size(self._bin) < self._num_bytes or _size(self._lengths) < self._num_documents * 4:
            raise _is_shorter(self._prefix)

    def finish(self, progress: Progress = without_progress) -> None:
        """Write the .idx."""
        try:
            os.ftruncate(self._bin.fileno(), self._num_bytes)
            os.fdatasync(self._bin.fileno())
        except OSError as error:
            raise self._cannot_write(error) from None
        with IdxWriter(idx_path(self._prefix), self._dtype, self._num_documents, self._num_documents) as idx:
            self._lengths.seek(0)
            for first in progress(range(0, self._num_documents, LENGTHS_AT_ONCE), None, "joining lengths"):
                lengths = np.fromfile(self._lengths, np.int32, min(LENGTHS_AT_ONCE, self._num_documents - first))
                idx.add_sequences(lengths)
                idx.add_documents(np.ones(len(lengths), np.int32))
            idx.finish()

    @property
    def _num_bytes(self) -> int:
        return self._num_tokens * self._dtype.itemsize

    def _add(self, num_documents: int, num_tokens: int) -> None:
        self._num_documents += num_documents
        self._num_tokens += num_tokens

    def _cannot_write(self, error: OSError) -> IndexedDatasetError:
        return IndexedDatasetError(f"{bin_path(self._prefix)}: cannot be written: {error.strerror}")


def _open_to_continue(path: str) -> BinaryIO:
    try:
        return open(path, "r+b", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_CREAT, 0o666))
    except OSError as error:
        raise IndexedDatasetError(f"{path}: cannot be written: {error.strerror}") from None


def _write_all(file: BinaryIO, values: np.ndarray) -> None:
    """Write to an unbuffered file, which on a disk that becomes full may take a part of the values without an error."""
    left = memoryview(values.data).cast("B")
    while left:
        left = left[file.write(left) :]


def _size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size
