"""One task to a folder of its own: a small dataset for each key, and a record of what happened.

A task's folder gets its name when it is complete. So a folder with that name is a finished task, whoever did it and
however often it was tried.
"""

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

from ..errors import InputError
from ..files import sync_file, write_whole
from ..indexed_dataset.format import optimal_dtype
from ..indexed_dataset.writer import IndexedDatasetWriter
from ..tokenizers.fast.tokenizer import DifferentIds, FastTokenizer, NoFastTokenizer, load_fast_tokenizer
from ..tokenizers.interface import Tokenizer, TokenizingError
from ..tokenizers.registry import TokenizerOptions
from .plan import Task
from .progress import Amount
from .readers.documents import BadDocument, Batch, Location
from .readers.inputs import read_batches
from .tokenization import TokenizedBatch, tokenize

RECORD = "record"
COMPARED_CHARACTERS = 2048
"""Of one document in each batch, tokenized by the reference too: 0.1 % of the text, at some 5 % of the time."""

Report = Callable[[Amount], None]


@dataclass(frozen=True)
class TaskSettings:
    """What is the same for all tasks of a job."""

    folder: str
    """Of the job."""
    keys: tuple[str, ...]
    tokenizer: TokenizerOptions
    skip_bad_documents: bool
    text_unit: str | None = None
    """As ``Job.text_unit``."""


@dataclass
class TaskRecord:
    """What is known about a task. Stored as JSON under the names of these fields."""

    num_documents: list[int]
    """[keys]; the documents that were written."""
    num_empty: list[int]
    """[keys]."""
    num_tokens: list[int]
    """[keys]."""
    num_lines: list[int]
    """[pieces]."""
    library: str
    """The library that made the token ids."""
    remark: str | None
    """Why it was not the fast library."""
    amount: Amount = field(default_factory=Amount)
    bad: list[tuple[int, BadDocument]] = field(default_factory=list)
    """Each with the index of its piece. Lines are counted from the piece's first."""
    num_left_out: int = 0
    """Records that hold no text: see ``readers.warc``."""

    @classmethod
    def empty(cls, num_keys: int, num_pieces: int, library: str, remark: str | None) -> "TaskRecord":
        """The record of a task that has just begun."""
        return cls([0] * num_keys, [0] * num_keys, [0] * num_keys, [0] * num_pieces, library, remark)

    def as_json(self) -> dict[str, Any]:
        """Its fields. Earlier versions, which may finish the job, do not know ``num_left_out``."""
        values = asdict(self)
        return values if self.num_left_out else {name: values[name] for name in values if name != "num_left_out"}

    def add(self, piece: int, batch: Batch, tokenized: TokenizedBatch, input_bytes: float) -> Amount:
        """Count a batch of a piece.

        Returns:
            The amount of work in the batch.
        """
        for key, texts in enumerate(tokenized.texts):
            self.num_documents[key] += len(texts.lengths)
            self.num_empty[key] += texts.num_empty
            self.num_tokens[key] += len(texts.tokens)
        self.num_lines[piece] += batch.num_lines
        self.num_left_out += batch.num_left_out
        self.bad += [(piece, document) for document in tokenized.bad]
        num_tokens = sum(len(texts.tokens) for texts in tokenized.texts)
        amount = Amount(tokenized.num_documents, batch.num_bytes, num_tokens, input_bytes)
        self.amount += amount
        return amount


class BadDocumentFound(Exception):
    """A document cannot be used, and bad documents are not to be skipped.

    Args:
        task: the number of its task.
        record: what is known about the task up to the document.
    """

    def __init__(self, task: int, record: TaskRecord) -> None:
        super().__init__(task, record)
        self.task, self.record = task, record


def task_folder(folder: str, number: int) -> str:
    """The path of a finished task."""
    return os.path.join(folder, f"{number:06d}")


def task_prefix(folder: str, number: int, key: int) -> str:
    """The path of a finished task's dataset for a key, given by its number."""
    return os.path.join(task_folder(folder, number), str(key))


def read_record(folder: str, number: int) -> TaskRecord:
    """The record of a finished task.

    Raises:
        InputError: it cannot be read.
    """
    path = os.path.join(task_folder(folder, number), RECORD)
    try:
        with open(path, encoding="utf-8") as file:
            values = json.load(file)
        bad = [(piece, BadDocument(Location(*location), reason)) for piece, (location, reason) in values.pop("bad")]
        return TaskRecord(**values | {"amount": Amount(**values["amount"]), "bad": bad})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(f"{path}: cannot be read ({error}); remove {task_folder(folder, number)}") from None


class TaskWork:
    """The work on one task: ``compute`` needs a core, ``finish`` waits for the disk.

    Args:
        task: what to do.
        settings: how to do it.
    """

    def __init__(self, task: Task, settings: TaskSettings) -> None:
        self.task, self._settings = task, settings
        self._target = task_folder(settings.folder, task.number)
        # Containers share host names and process numbers, and a worker that seemed lost may still write this task.
        self._temporary = f"{self._target}.{secrets.token_hex(8)}-{os.getpid()}.part"
        self._unfinished = ExitStack()
        """Closes and removes what is unfinished."""

    def compute(self, report: Report) -> None:
        """Tokenize the task.

        Args:
            report: is called with the amount of each batch.

        Raises:
            BadDocumentFound: a document cannot be used, and bad documents are not to be skipped.
            InputError: an input cannot be read, or the folder cannot be written.
            OptionError: the tokenizer or a library cannot be used.
            IndexedDatasetError: the dataset cannot be written.
        """
        reference, fast, reason = load_tokenizers(self._settings.tokenizer)
        with self._disk_errors_as_ours(), ExitStack() as unfinished:
            unfinished.callback(shutil.rmtree, self._temporary, ignore_errors=True)
            try:
                self._record, self._writers = self._tokenize(fast or reference, report, reason)
            except DifferentIds as difference:
                remark = f"{self.task}: {difference}"
                self._record, self._writers = self._tokenize(reference, report, remark)
            for writer in self._writers:
                unfinished.enter_context(writer)
            self._unfinished = unfinished.pop_all()

    def finish(self) -> TaskRecord:
        """Force the computed task to disk and give its folder its name, unless another process did so meanwhile.

        Raises:
            InputError: the folder cannot be written.
            IndexedDatasetError: the dataset cannot be written.
        """
        with self._disk_errors_as_ours(), self._unfinished:
            for writer in self._writers:
                writer.finalize()
            write_whole(os.path.join(self._temporary, RECORD), json.dumps(self._record.as_json()).encode())
            sync_file(self._temporary)
            try:
                os.rename(self._temporary, self._target)
            except OSError:
                if not os.path.exists(os.path.join(self._target, RECORD)):  # no other process did the task
                    raise
        return self._record

    @contextmanager
    def _disk_errors_as_ours(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(f"{error.filename or self._target}: cannot be written: {error.strerror}") from None

    def _tokenize(
        self, tokenizer: Tokenizer, report: Report, remark: str | None
    ) -> tuple[TaskRecord, list[IndexedDatasetWriter]]:
        """Write the task's tokens to the temporary folder, from the beginning.

        Returns:
            The record, and for each key a writer that is to be finalized.

        Raises:
            DifferentIds: the fast tokenizer's ids differ from the reference's.
        """
        shutil.rmtree(self._temporary, ignore_errors=True)
        os.makedirs(self._temporary)
        keys, pieces = self._settings.keys, self.task.pieces
        library = "gigatoken" if isinstance(tokenizer, FastTokenizer) else type(tokenizer).__name__
        record = TaskRecord.empty(len(keys), len(pieces), library, remark)
        dtype, template = optimal_dtype(tokenizer.vocab_size), self._settings.tokenizer.template(tokenizer)
        with ExitStack() as stack:
            paths = [os.path.join(self._temporary, str(key)) for key in range(len(keys))]
            writers = [stack.enter_context(IndexedDatasetWriter(path, dtype)) for path in paths]
            for number, piece in enumerate(pieces):
                share_before = 0.0
                for batch, share in read_batches(piece, keys, self._settings.text_unit):
                    tokenized = tokenize(batch, keys, tokenizer, template)
                    _compare(tokenizer, tokenized)
                    for writer, texts in zip(writers, tokenized.texts, strict=True):
                        writer.add(texts.tokens, texts.lengths)
                    report(record.add(number, batch, tokenized, (share - share_before) * piece.num_bytes))
                    share_before = share
                    if record.bad and not self._settings.skip_bad_documents:
                        raise BadDocumentFound(self.task.number, record)
            stack.pop_all()
        return record, writers


@lru_cache(maxsize=1)
def load_tokenizers(options: TokenizerOptions) -> tuple[Tokenizer, FastTokenizer | None, str | None]:
    """The reference, and the fast tokenizer or the reason why it cannot be used.

    They are loaded once in a process and its forks.

    Raises:
        OptionError: the reference cannot be loaded.
    """
    reference = options.load()
    try:
        return reference, load_fast_tokenizer(reference), None
    except NoFastTokenizer as reason:
        return reference, None, str(reason)


def _compare(tokenizer: Tokenizer, batch: TokenizedBatch) -> None:
    """Compare the start of one document of the batch with the reference, if the tokenizer is the fast one."""
    if isinstance(tokenizer, FastTokenizer):
        with suppress(TokenizingError):  # of the start alone: all of it could be encoded
            tokenizer.check([text[:COMPARED_CHARACTERS] for text in batch.sample])
