"""A job from input files to PREFIX.bin/.idx, in six steps: plan, skip finished tasks, execute, join, verify, publish.

Documents keep the order of the files and of the documents in them, whatever the number of workers. Finished work stays
in a folder beside the datasets until they are finished: the same call resumes after a kill at any moment, and does
nothing when the job is finished. Datasets are checked from what is on disk before they get their names.
"""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from ..console import tell
from ..errors import IndexedDatasetError, InputError, OptionError
from ..indexed_dataset.format import bin_path, idx_path, optimal_dtype
from ..indexed_dataset.reader import IndexedDataset
from ..indexed_dataset.verify import verify_tokens
from ..indexed_dataset.writer import move_files
from ..progress import Progress, without_progress
from ..sequence_index.key import index_directory
from ..tokenizers.special_tokens import DocumentTemplate
from .bad_documents import BadDocumentsFile, bad_documents
from .card import FileHash, describe_datasets, write_card
from .executors.processes import run_in_processes
from .job import Job
from .job_folder import SUFFIX, JobFolder
from .joiner import TaskJoiner, take_out_moved
from .plan import Task, input_bytes, part_of, plan_tasks
from .progress import Meter
from .readers.documents import Location
from .readers.file_names import BAD_DOCUMENTS_SUFFIX
from .replanning import InputChanges, kept_tasks, plan_again, refuse_to_lose
from .summary import Totals, WrittenDataset, finished_datasets, why_not_finished, write_summary
from .task import BadDocumentFound, TaskRecord, TaskSettings, TaskWork, load_tokenizers, read_record

Executor = Callable[..., Iterator[tuple[Task, TaskRecord]]]
"""As ``run_in_processes``: takes what makes the work on a task, the tasks, and ``report``."""


def write_datasets(
    job: Job, executor: Executor = partial(run_in_processes, workers=1), progress: Progress = without_progress
) -> list[WrittenDataset]:
    """Tokenize input files into a dataset for each key: all of them, or none.

    Args:
        executor: does the tasks, in any order.

    Raises:
        OptionError: the tokenizer or an input's library cannot be used, a dataset exists, or another job's work is
            unfinished.
        InputError: a document or file is bad, or there is no document at all. No dataset is left behind.
        IndexedDatasetError: a dataset cannot be written, or is wrong on disk. No dataset is left behind.
    """
    load_tokenizers.cache_clear()  # the file may have changed since an earlier call
    identity = job.identity(load_tokenizers(job.tokenizer)[0])
    folder = JobFolder(job.prefix + SUFFIX, identity, job.overwrite)
    if not job.overwrite:
        if datasets := finished_datasets(job, identity):
            folder.remove()
            return datasets
        if not folder.is_of_this_job():
            refuse_to_replace(job.dataset_prefixes, why_not_finished(job, identity))
    with folder, _Steps(job, identity, folder) as steps:
        tasks = steps.plan()
        unfinished = steps.skip_finished(tasks)
        steps.execute(unfinished, executor)
        steps.join(progress)
        steps.verify(progress)
        return steps.publish(progress)


def refuse_to_replace(prefixes: Sequence[str], why: str = "") -> None:
    """Refuse to write datasets that exist.

    Args:
        why: how they differ from those to be written.

    Raises:
        OptionError: a dataset exists.
    """
    for prefix in prefixes:
        if _exists(prefix):
            raise OptionError(
                f"{prefix}: a dataset of this name exists{why}; choose another --output-prefix, give --overwrite, or "
                f"build its sequence indexes with megatron-bfp index {prefix}"
            )


def _exists(prefix: str) -> bool:
    """Whether writing a dataset would replace one. A killed process may leave a .bin without its .idx."""
    if os.path.exists(idx_path(prefix)) or os.path.exists(index_directory(prefix)):
        return True
    return os.path.exists(bin_path(prefix)) and not os.path.exists(idx_path(prefix) + ".part")


class _Steps:
    """The steps of one job, in the order in which they are called, and what they share."""

    def __init__(self, job: Job, identity: dict[str, Any], folder: JobFolder) -> None:
        self._job, self._identity, self._folder = job, identity, folder
        self._joined = [folder.joined_prefix(key) for key in range(len(job.keys))]
        self._own_tasks: list[Task] = []
        """This job's, in order."""
        self._all_tasks = self._own_tasks
        """All tasks of the input. Of a part, also those of the other parts' jobs."""
        self._num_done = 0
        self._remarks: set[str] = set()
        self._hashes: list[FileHash] = []
        """Of the .bin files, if they were checked in this call."""
        self._stack = ExitStack()

    def __enter__(self) -> "_Steps":
        self._tokenizer, _, reason = load_tokenizers(self._job.tokenizer)
        self._template = self._job.tokenizer.template(self._tokenizer)
        self._dtype = optimal_dtype(self._tokenizer.vocab_size)
        for warning in self._job.tokenizer.warnings(self._tokenizer):
            tell(f"warning: {warning}")
        self._say_once(reason)
        self._meter = self._stack.enter_context(Meter(input_bytes(self._job.paths)))
        self._joiner = self._stack.enter_context(TaskJoiner(self._folder.path, self._joined, self._dtype))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def plan(self) -> Iterable[Task]:
        """This job's tasks, in order. Tasks of a stream come as it is read; those of files are planned once."""
        if self._job.has_streams:
            return self._plan_streams()
        self._all_tasks = self._plan_files()
        part = self._job.part
        own = self._all_tasks if part is None else part_of(self._all_tasks, *part)
        return [self._announced(task) for task in own]

    def skip_finished(self, tasks: Iterable[Task]) -> Iterable[Task]:
        """The tasks that are not finished. The others are handed to the joiner."""
        if self._job.has_streams:
            return tasks
        finished = self._folder.finished()
        unfinished = []
        for task in tasks:
            if task.number in finished:
                self._take_finished(task)
            else:
                unfinished.append(task)
        return unfinished

    def execute(self, tasks: Iterable[Task], executor: Executor) -> None:
        """Do the tasks, and hand each to the joiner when it is finished."""
        job = self._job
        settings = TaskSettings(self._folder.path, job.keys, job.tokenizer, job.skip_bad_documents, job.text_unit)
        try:
            for task, record in executor(partial(TaskWork, settings=settings), tasks, report=self._meter.add):
                self._num_done += 1
                self._joiner.add(task.number, record, is_new=True)
                self._say_once(record.remark)
                _remove_segments(task)
        except BadDocumentFound as error:
            raise self._bad_document(error) from None
        self._tokenizing_seconds = self._meter.seconds
        self._refuse_changed_inputs()
        self._totals = Totals.of(len(job.keys), (read_record(self._folder.path, t.number) for t in self._own_tasks))
        self._refuse_no_documents()

    def join(self, progress: Progress) -> None:
        """Finish the joined datasets, whose tokens were copied while tasks were done."""
        if not self._folder.is_verified:
            self._joiner.finish(progress)

    def verify(self, progress: Progress) -> None:
        """Check every token of the joined datasets on disk.

        Raises:
            IndexedDatasetError: a dataset is wrong. The finished tasks are removed: they would give the same again.
        """
        if self._folder.is_verified:
            return
        if self._job.card:
            self._hashes = [FileHash(bin_path(prefix)) for prefix in self._joined]  # reads what the check reads
        eod = self._tokenizer.eod if self._template.ends_in(self._tokenizer.eod) else None
        try:
            for prefix in self._joined:
                verify_documents(prefix, self._tokenizer.vocab_size, eod, progress, self._template)
        except IndexedDatasetError:
            self._folder.remove()
            raise
        self._folder.set_verified()

    def publish(self, progress: Progress) -> list[WrittenDataset]:
        """Give the datasets their names, write what belongs beside them, and remove the job's folder."""
        job = self._job
        bad = BadDocumentsFile(job.prefix + BAD_DOCUMENTS_SUFFIX, self._folder.path) if job.skip_bad_documents else None
        if bad:
            bad.write(bad_documents(self._all_tasks, self._record_of))
        datasets = self._name_datasets()
        if bad:
            bad.publish()
        if job.card:
            self._write_card(datasets, progress)
        times = {
            "shards": self._num_done,
            "tokenizing_seconds": self._tokenizing_seconds,
            "seconds": self._meter.seconds,
        }
        write_summary(job, self._identity, self._tokenizer, self._totals, datasets, times)
        self._folder.remove()
        totals = self._totals
        return [
            WrittenDataset(dataset, num_empty, totals.num_bad, totals.num_left_out)
            for dataset, num_empty in zip(datasets, totals.num_empty, strict=True)
        ]

    def _write_card(self, datasets: Sequence[IndexedDataset], progress: Progress) -> None:
        hashes = self._hashes or [FileHash(bin_path(dataset.prefix)) for dataset in datasets]
        of_job = self._job, self._identity, self._tokenizer, self._totals
        write_card(self._job.prefix, describe_datasets(*of_job, datasets, hashes, progress))

    def _plan_streams(self) -> Iterator[Task]:
        folder = self._folder
        if folder.plan and folder.changes and not self._job.overwrite:
            refuse_to_lose(folder.plan, folder.changes, folder.finished(), folder.path)
        folder.clear()  # what came through a pipe cannot be compared with what comes now
        folder.set_plan([])
        return map(self._announced, plan_tasks(self._job.paths, folder.path, self._job.text_unit))

    def _plan_files(self) -> list[Task]:
        """All tasks of files: those that were planned before, and new ones for inputs that have changed."""
        folder = self._folder
        if folder.plan is None:
            tasks = list(plan_tasks(self._job.paths, folder.path, self._job.text_unit))
            folder.set_plan(tasks)
            return tasks
        return folder.plan if folder.changes is None else self._plan_again(folder.plan, folder.changes)

    def _plan_again(self, before: list[Task], changes: InputChanges) -> list[Task]:
        """Keep the finished tasks of files that have not changed, and plan the others again."""
        folder, finished = self._folder, self._folder.finished()
        if not self._job.overwrite:
            refuse_to_lose(before, changes, finished, folder.path)
        kept = kept_tasks(before, changes.unchanged, finished)
        tasks = plan_again(self._job.paths, before, kept, changes.unchanged, self._job.text_unit)
        sizes = take_out_moved(folder.path, self._joined, self._dtype, before, tasks)
        folder.set_plan(tasks, sizes)
        num_kept = sum(task.number in finished for task in tasks)
        tell(
            f"{folder.path}: its inputs have changed since: {changes}. {num_kept} of {len(finished)} finished tasks "
            "are kept, the others done again"
        )
        return tasks

    def _announced(self, task: Task) -> Task:
        """Note a task of this job; documents are joined in the order of these calls."""
        self._own_tasks.append(task)
        if not self._folder.is_verified:
            self._joiner.announce(task.number)
        return task

    def _take_finished(self, task: Task) -> None:
        """Hand a task that was finished before to the joiner."""
        record = read_record(self._folder.path, task.number)
        if record.bad and not self._job.skip_bad_documents:
            raise self._bad_document(BadDocumentFound(task.number, record))
        if not self._folder.is_verified:
            self._joiner.add(task.number, record, is_new=False)
        self._meter.skip(task.num_bytes)

    def _say_once(self, remark: str | None) -> None:
        """Say why the fast library is not used, for all tasks or one."""
        if remark is not None and remark not in self._remarks:
            self._remarks.add(remark)
            tell(f"tokenizing without gigatoken: the tokens are the same, but it takes longer. The reason: {remark}")

    def _record_of(self, number: int) -> TaskRecord | None:
        return read_record(self._folder.path, number) if self._folder.is_finished(number) else None

    def _bad_document(self, error: BadDocumentFound) -> InputError:
        """What to raise: names the first bad document that is known, with its line."""
        numbers = [task.number for task in self._all_tasks]
        tasks = self._all_tasks[: numbers.index(error.task) + 1]
        records = {error.task: error.record}
        document = next(bad_documents(tasks, lambda number: records.get(number) or self._record_of(number)))
        return InputError(f"{document} (--skip-bad-documents leaves such documents out)")

    def _refuse_changed_inputs(self) -> None:
        """Refuse datasets of files that changed while they were read, as a file does that is still being written."""
        changes = InputChanges.between(self._identity["inputs"], self._job.inputs())
        if changes.now != changes.before:
            raise InputError(
                f"inputs changed while they were read: {changes}. Give the same command again when they are complete"
            )

    def _refuse_no_documents(self) -> None:
        """Refuse to write a dataset without a document, unless the jobs of other parts may have some."""
        if self._job.part is not None:
            return
        totals = self._totals
        for index, key in enumerate(self._job.keys):
            if not totals.num_documents[index]:
                bad = next(bad_documents(self._all_tasks, self._record_of), None)
                self._folder.remove()
                raise InputError(
                    f"{_names(self._job.paths)}: 0 documents with text under {key!r} ({totals.num_empty[index]} empty "
                    f"ones, {totals.num_bad} bad ones); nothing to write"
                    + (f"; the first bad one: {bad}" if bad else "")
                )

    def _name_datasets(self) -> list[IndexedDataset]:
        """Give the joined datasets their names, as far as a killed call has not."""
        for joined, prefix in zip(self._joined, self._job.dataset_prefixes, strict=True):
            if not os.path.exists(idx_path(joined)):
                continue
            bin_has_name = not os.path.exists(bin_path(joined))
            try:
                shutil.rmtree(index_directory(prefix), ignore_errors=True)  # of the dataset that is replaced
                move_files(bin_path(prefix if bin_has_name else joined), idx_path(joined), prefix)
            except OSError as error:
                raise IndexedDatasetError(f"{error.filename or prefix}: cannot be renamed: {error.strerror}") from None
        return [IndexedDataset(prefix) for prefix in self._job.dataset_prefixes]


def verify_documents(
    prefix: str,
    vocab_size: int,
    eod: int | None = None,
    progress: Progress = without_progress,
    template: DocumentTemplate | None = None,
) -> IndexedDataset:
    """Check every token of a dataset, in constant memory.

    Args:
        eod: the token that must end every document and occur nowhere else; None for none.
        template: the special tokens around each document, with ``eod`` at its end: documents must begin as it says, and
            the EOD may occur there, too. None for the EOD alone.

    Returns:
        The dataset, opened.

    Raises:
        IndexedDatasetError: a token is outside the vocabulary, a document does not begin with BOS or does not end in
            EOD, holds an EOD elsewhere, or the files cannot be read.
    """
    dataset = IndexedDataset(prefix)
    template = template or DocumentTemplate(after=() if eod is None else (eod,))
    num_eods = verify_tokens(dataset, vocab_size, eod, progress, template.before)
    if eod is not None and num_eods != dataset.num_documents * template.count(eod):
        raise IndexedDatasetError(
            f"{bin_path(prefix)}: holds {num_eods} EOD tokens ({eod}) in {dataset.num_documents} documents; the "
            "tokenizer makes one of a text: please report this tokenizer"
        )
    return dataset


def _remove_segments(task: Task) -> None:
    """Remove the files that data from a pipe was written to."""
    for piece in task.pieces:
        if piece.segment:
            os.remove(piece.segment)


def _names(paths: Sequence[str]) -> str:
    names = [Location(path).name for path in paths[:3]]
    return ", ".join(names) + (f" and {len(paths) - 3} more files" if len(paths) > 3 else "")
