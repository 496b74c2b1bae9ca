"""OUT.shards, the folder of a job that is not finished: its planned tasks, the finished ones, the growing datasets.

It is there from the first task until the datasets are finished. The same command resumes from it. If the inputs are the
same by path, size and modification time, so are the tasks. If they have changed, the tasks of unchanged files are kept:
see ``replanning``. A job with another tokenizer or other options is refused.

The folder's name, and the names and the content of its files, stay as they are: a job that an earlier version began can
be finished by this one.

    run                      JSON: the job's identity, its planned tasks, and sizes to cut growing datasets to
    lock                     who is writing: see ``files.Lease``
    000000/, 000001/, ...    a finished task: its record, and until it is joined a dataset for each key
    joined-0.bin, .lengths   the growing dataset of the first key, and at last its .idx
    verified                 the datasets are finished and correct: only their names are missing
    segment-*, *.part        unfinished
"""

import json
import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ..console import tell
from ..errors import InputError, OptionError
from ..files import Lease, TakenError, read_json_object, sync_file, write_whole
from .job import difference
from .plan import Task
from .readers.inputs import Piece
from .replanning import InputChanges
from .task import task_folder

SUFFIX = ".shards"
FORMAT = 3
"""The version of the folder's content."""
IDENTITY = "run"
LOCK = "lock"
PLAN, CUT = "plan", "cut"
"""Keys of ``run`` beside the identity's: the tasks, and the sizes that growing datasets are still to be cut to."""
VERIFIED = "verified"
TASK = re.compile(r"[0-9]{6,}")
LOCK_SECONDS = 2.0
"""How long to wait for processes whose parent was killed."""
JOINED = re.compile(r"joined-[0-9]+\.(bin|idx|lengths)")
UNFINISHED = re.compile(r"segment-.*|.*\.part")


class JobFolder:
    """The folder of a job, for one process at a time.

    Leaving the ``with`` block removes what is unfinished, and the folder if no task is finished.

    Args:
        path: of the folder.
        identity: of the job; JSON.
        overwrite: begin anew if the folder is another job's.

    Raises:
        OptionError: the folder is another job's and not to be overwritten, or another process is using it.
        InputError: the folder cannot be written.
    """

    def __init__(self, path: str, identity: dict[str, Any], overwrite: bool) -> None:
        self.path = path
        self._identity = identity | {"folder_format": FORMAT}
        self._overwrite = overwrite
        self._lease: Lease | None = None
        self.plan: list[Task] | None = None
        """The planned tasks; None if nothing was planned yet."""
        self.changes: InputChanges | None = None
        """What has changed in the inputs since the tasks were planned; None for nothing."""

    def __enter__(self) -> "JobFolder":
        try:
            os.makedirs(self.path, exist_ok=True)
            self._take_lock()
            self._begin()
        except OSError as error:
            self._release()
            raise InputError(f"{error.filename or self.path}: cannot be written: {error.strerror}") from None
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        with suppress(OSError):  # of a full disk, say: unfinished files do no harm
            self._remove_unfinished()
        number = len(self.finished())
        if not number and not self.is_verified:
            self.remove()
        elif error is not None:
            what = f"keeps {number} finished task{'s' if number > 1 else ''}"
            tell(f"{self.path}: {what}; the same command goes on from there")
        self._release()

    def is_of_this_job(self) -> bool:
        """Whether the folder holds work of this job."""
        return self._recorded()[0] == self._identity

    def set_plan(self, tasks: Sequence[Task], joined_sizes: dict[str, int] | None = None) -> None:
        """Continue with these tasks, of the inputs as they are now, and forget all others.

        Args:
            joined_sizes: file name -> bytes; cut the files of growing datasets to these sizes.

        Raises:
            InputError: the folder cannot be written.
        """
        plan = [[task.number, [_described(piece) for piece in task.pieces]] for task in tasks]
        record = self._identity | {PLAN: plan}
        try:
            if joined_sizes:  # after this nothing needs what is cut, and before it all of it is needed
                write_whole(self._record_path, json.dumps(record | {CUT: joined_sizes}).encode())
                sync_file(self.path)
                self._cut(joined_sizes)
            write_whole(self._record_path, json.dumps(record).encode())
            for number in self.finished() - {task.number for task in tasks}:
                shutil.rmtree(task_folder(self.path, number))
        except OSError as error:
            raise InputError(f"{error.filename or self.path}: cannot be written: {error.strerror}") from None
        self.plan, self.changes = list(tasks), None

    @property
    def _record_path(self) -> str:
        return os.path.join(self.path, IDENTITY)

    def _recorded(self) -> tuple[dict[str, Any] | None, list[Task] | None, dict[str, int]]:
        """The identity of the folder's job, its planned tasks, and the sizes to cut to; None for what is missing."""
        record = read_json_object(self._record_path)
        if record is None:
            return None, None, {}
        plan, cut = record.pop(PLAN, None), record.pop(CUT, {})
        tasks = plan and [Task(number, tuple(Piece(*piece) for piece in pieces)) for number, pieces in plan]
        return record, tasks, cut

    def _cut(self, sizes: dict[str, int]) -> None:
        for name, size in sizes.items():
            path = os.path.join(self.path, name)
            if os.path.exists(path):
                os.truncate(path, min(size, os.path.getsize(path)))
                sync_file(path)

    def finished(self) -> set[int]:
        """The numbers of the finished tasks."""
        names = os.listdir(self.path) if os.path.isdir(self.path) else []
        return {int(name) for name in names if TASK.fullmatch(name)}

    def is_finished(self, number: int) -> bool:
        """Whether a task is finished."""
        return os.path.isdir(task_folder(self.path, number))

    def joined_prefix(self, key: int) -> str:
        """The path of the growing dataset for a key, given by its number."""
        return os.path.join(self.path, f"joined-{key}")

    @property
    def is_verified(self) -> bool:
        """Whether the joined datasets are finished and correct."""
        return os.path.exists(os.path.join(self.path, VERIFIED))

    def set_verified(self) -> None:
        """Remember that the joined datasets are finished and correct.

        Raises:
            InputError: the disk is full.
        """
        path = os.path.join(self.path, VERIFIED)
        try:
            write_whole(path, b"")
            sync_file(self.path)  # before any file leaves
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error.strerror}") from None

    def clear(self) -> None:
        """Forget the finished tasks.

        Raises:
            InputError: they cannot be removed.
        """
        try:
            for number in self.finished():
                shutil.rmtree(task_folder(self.path, number))
            for name in os.listdir(self.path):  # after the tasks, which need these files
                if name == VERIFIED or JOINED.fullmatch(name):
                    os.remove(os.path.join(self.path, name))
        except OSError as error:
            raise InputError(f"{error.filename}: cannot be removed: {error.strerror}") from None

    def remove(self) -> None:
        """Remove the folder: its job is finished."""
        with suppress(OSError):  # what a kill leaves of the rest is then no job to resume
            os.remove(self._record_path)
        shutil.rmtree(self.path, ignore_errors=True)

    def _take_lock(self) -> None:
        try:
            self._lease = Lease(os.path.join(self.path, LOCK), LOCK_SECONDS)
        except TakenError as owner:
            who = f" ({owner})" if str(owner) else ""
            raise OptionError(f"{self.path}: another process is writing these datasets{who}") from None

    def _begin(self) -> None:
        """Resume from the folder's content, or begin anew."""
        names = set(os.listdir(self.path)) - {LOCK}
        strange = sorted(name for name in names if not _is_ours(name))
        if strange:
            raise OptionError(
                f"{self.path}: is not a folder of unfinished work (it holds {strange[0]}); move it away, or choose "
                "another --output-prefix"
            )
        recorded, self.plan, cut = self._recorded()
        is_same = recorded == self._identity
        if recorded is not None and not is_same and not self._overwrite and self._is_another_job(recorded):
            raise OptionError(
                f"{self.path}: holds the unfinished work of another job: {difference(recorded, self._identity)}. Run "
                "that command again to resume it, or give --overwrite to begin anew"
            )
        self._remove_unfinished()
        # If a job is verified, its datasets may already have their names.
        is_verified_and_stale = self.is_verified and (self._overwrite or not is_same)
        if recorded is None or (not is_same and self._is_another_job(recorded)) or is_verified_and_stale:
            self.clear()
            if recorded is not None:
                os.remove(self._record_path)
            self.plan = None
            return
        if cut:
            self._cut(cut)
        if not is_same:
            self.changes = InputChanges.between(recorded["inputs"], self._identity["inputs"])

    def _is_another_job(self, recorded: dict[str, Any]) -> bool:
        """Whether a job that is not the same differs in more than its inputs.

        A job that does a part of the input is another one if any input differs: it must fit the other parts' jobs.
        """
        differs_in_inputs_alone = recorded | {"inputs": self._identity.get("inputs")} == self._identity
        return recorded.get("part") is not None or not differs_in_inputs_alone

    def _remove_unfinished(self) -> None:
        for name in os.listdir(self.path):
            path = os.path.join(self.path, name)
            if UNFINISHED.fullmatch(name):
                shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)

    def _release(self) -> None:
        if self._lease is not None:
            self._lease.release()
            self._lease = None


def _described(piece: Piece) -> list[Any]:
    """A piece as the plan has it. Earlier versions know only the first four fields."""
    fields = [piece.path, piece.num_bytes, piece.begin, piece.end]
    return fields if piece.first_row == 1 else [*fields, piece.segment, piece.first_row]


def _is_ours(name: str) -> bool:
    return name in (IDENTITY, VERIFIED) or any(form.match(name) for form in (TASK, JOINED, UNFINISHED))
