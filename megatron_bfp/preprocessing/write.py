"""Input files to PREFIX.bin/.idx: shards are tokenized by workers, joined in order, and checked from what is on disk.

The order of documents is the order of the files and of the documents in them, whatever the number of workers. What is
done stays in a folder beside the datasets until they are finished: the same call goes on after a kill at any moment,
and does nothing when all is done.
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from ..errors import IndexedDatasetError, InputError, OptionError
from ..indexed_dataset.format import bin_path, idx_path, optimal_dtype
from ..indexed_dataset.reader import IndexedDataset
from ..indexed_dataset.writer import move_files
from ..progress import Progress, without_progress
from ..sequence_index.key import index_directory
from .bad_documents import BadDocuments, bad_documents
from .executors.processes import run_in_processes
from .job import Run
from .job_folder import SUFFIX, RunFolder
from .joiner import ShardJoiner, is_joined, joined_bytes, take_out
from .plan import Shard, input_bytes, part_of, plan_shards
from .progress import Meter
from .readers.documents import Place
from .readers.input_files import BAD_DOCUMENTS_SUFFIX
from .replanning import InputChanges, kept_shards, plan_again, refuse_to_lose
from .summary import Totals, WrittenDataset, finished_datasets, why_not_finished, write_summary
from .task import BadDocumentFound, ShardRecord, ShardWork, load_tokenizers, read_record, shard_prefix, write_shard
from .verification import verify_documents

Executor = Callable[..., Iterator[tuple[Shard, ShardRecord]]]
"""As ``run_in_processes``: takes a function, its tasks, and ``report``, which is told how much is done."""


def write_datasets(
    run: Run, execute: Executor = partial(run_in_processes, workers=1), progress: Progress = without_progress
) -> list[WrittenDataset]:
    """Tokenize input files into a dataset for each key: all of them, or none.

    Args:
        execute: does the shards, in whatever order.

    Raises:
        OptionError: the tokenizer or an input's library cannot be used, a dataset is there already, or another run was
            begun and not finished.
        InputError: a document or file is bad, or there is no document at all. No dataset is left behind.
        IndexedDatasetError: a dataset cannot be written, or what is on disk is not right. No dataset is left behind.
    """
    load_tokenizers.cache_clear()  # the file may have changed since an earlier call
    identity = run.identity(load_tokenizers(run.tokenizer)[0])
    folder = RunFolder(run.prefix + SUFFIX, identity, run.overwrite)
    if not run.overwrite:
        if written := finished_datasets(run, identity):
            folder.remove()
            return written
        if not folder.is_of_this_run():
            refuse_to_replace(run.dataset_prefixes, why_not_finished(run, identity))
    with folder:
        if run.has_streams:
            if folder.plan and folder.changes and not run.overwrite:
                refuse_to_lose(folder.plan, folder.changes, folder.finished(), folder.path)
            folder.clear()  # what came through a pipe cannot be compared with what comes now
            folder.set_plan([])
        return _Writing(run, identity, folder).write(execute, progress)


def _is_there(prefix: str) -> bool:
    """Whether writing a dataset would replace one. A .bin without its .idx may be what a killed run left."""
    if os.path.exists(idx_path(prefix)) or os.path.exists(index_directory(prefix)):
        return True
    return os.path.exists(bin_path(prefix)) and not os.path.exists(idx_path(prefix) + ".part")


def refuse_to_replace(prefixes: Sequence[str], why: str = "") -> None:
    """Refuse to write datasets where there are some.

    Args:
        why: in what they differ from those to be written.

    Raises:
        OptionError: there is one.
    """
    for prefix in prefixes:
        if _is_there(prefix):
            raise OptionError(
                f"{prefix}: a dataset of this name exists{why}; choose another --output-prefix, give --overwrite, or "
                f"build its sequence indexes with --indexed {prefix}"
            )


class _Writing:
    """One call's way from shards to datasets."""

    def __init__(self, run: Run, identity: dict[str, Any], folder: RunFolder) -> None:
        self._run, self._identity, self._folder = run, identity, folder
        self._shards: list[Shard] = []
        """All shards of the input that are known, those of other jobs too."""
        self._own: list[int] = []
        """The numbers of this run's."""
        self._remarks: set[str | None] = {None}
        self._joined = [folder.joined_prefix(key) for key in range(len(run.keys))]
        self._tokenizer, _, reason = load_tokenizers(run.tokenizer)
        self._template = run.tokenizer.template(self._tokenizer)
        for warning in run.tokenizer.warnings(self._tokenizer):
            print(f"warning: {warning}", file=sys.stderr, flush=True)
        self._say_once(reason)

    def write(self, execute: Executor, progress: Progress) -> list[WrittenDataset]:
        run = self._run
        with (
            Meter(input_bytes(run.paths)) as meter,
            ShardJoiner(self._folder.path, self._joined, self._dtype) as joiner,
            BadDocuments(run.prefix + BAD_DOCUMENTS_SUFFIX, run.skip_bad_documents, self._folder.path) as bad,
        ):
            times = {"shards": self._do_shards(execute, meter, joiner), "tokenizing_seconds": meter.seconds}
            self._refuse_changed_inputs()
            totals = Totals.empty(len(run.keys))
            for number in self._own:
                totals.add(read_record(self._folder.path, number))
            self._refuse_none(totals)
            bad.add(bad_documents(self._shards, self._record_of))
            if not self._folder.is_verified:
                self._finish(joiner, progress)
            datasets = self._publish()
            bad.finalize()
            times["seconds"] = meter.seconds
        write_summary(run, self._identity, self._tokenizer, totals, datasets, times)
        self._folder.remove()
        return [WrittenDataset(*found, totals.num_bad) for found in zip(datasets, totals.num_empty, strict=True)]

    @property
    def _dtype(self) -> type:
        """Of a token on disk."""
        return optimal_dtype(self._tokenizer.vocab_size)

    def _say_once(self, remark: str | None) -> None:
        """Say why the fast library is not used, for all shards or one."""
        if remark not in self._remarks:
            self._remarks.add(remark)
            line = f"tokenizing without gigatoken: the tokens are the same, but it takes longer. The reason: {remark}"
            print(line, file=sys.stderr, flush=True)

    def _do_shards(self, execute: Executor, meter: Meter, joiner: ShardJoiner) -> int:
        """Write all shards that are not done; returns their number."""
        run = self._run
        work = ShardWork(self._folder.path, run.keys, run.tokenizer, run.skip_bad_documents)
        number = 0
        try:
            for shard, record in execute(partial(write_shard, work=work), self._to_do(meter, joiner), report=meter.add):
                number += 1
                joiner.add(shard.number, record, is_new=True)
                self._say_once(record.remark)
                for piece in shard.pieces:
                    if piece.segment:
                        os.remove(piece.segment)
        except BadDocumentFound as found:
            self._refuse_bad(found)
        return number

    def _to_do(self, meter: Meter, joiner: ShardJoiner) -> Iterator[Shard]:
        """This run's shards that are not done."""
        planned = self._planned()
        done, is_verified = self._folder.finished(), self._folder.is_verified
        for shard in planned:
            self._own.append(shard.number)
            if not is_verified:
                joiner.announce(shard.number)
            if shard.number not in done:
                yield shard
                continue
            record = read_record(self._folder.path, shard.number)
            if record.bad and not self._run.skip_bad_documents:
                raise BadDocumentFound(shard.number, record)
            if not is_verified:
                joiner.add(shard.number, record, is_new=False)
            meter.skip(shard.num_bytes)

    def _planned(self) -> Iterable[Shard]:
        if self._run.has_streams:
            return self._planned_streams()
        self._shards = self._planned_files()
        return self._shards if self._run.part is None else part_of(self._shards, *self._run.part)

    def _planned_streams(self) -> Iterator[Shard]:
        for shard in plan_shards(self._run.paths, self._folder.path):
            self._shards.append(shard)
            yield shard

    def _planned_files(self) -> list[Shard]:
        """All shards of files: those that were planned before, and of inputs that have changed others."""
        folder = self._folder
        if folder.plan is None:
            folder.set_plan(list(plan_shards(self._run.paths, folder.path)))
        elif folder.changes is not None:
            self._plan_again(folder.plan, folder.changes)
        return folder.plan

    def _plan_again(self, before: list[Shard], changes: InputChanges) -> None:
        """Keep the shards of files that have not changed, and plan the others again."""
        folder, finished = self._folder, self._folder.finished()
        if not self._run.overwrite:
            refuse_to_lose(before, changes, finished, folder.path)
        kept = kept_shards(before, changes.unchanged, finished)
        shards = plan_again(self._run.paths, before, kept, changes.unchanged)
        sizes = self._take_out_of_order(before, shards)
        folder.set_plan(shards, sizes)
        again = len(finished) - sum(shard.number in finished for shard in shards)
        print(
            f"{folder.path}: its inputs have changed since: {changes}. {len(finished) - again} of {len(finished)} "
            "finished shards are kept, the others done again",
            file=sys.stderr,
            flush=True,
        )

    def _take_out_of_order(self, before: list[Shard], shards: list[Shard]) -> dict[str, int]:
        """Take shards that are kept and were joined out of the datasets that grow, but for those that both plans begin
        with.

        Returns:
            What is left of the files of these datasets, in bytes, by their names.
        """
        numbers, num_keys = {shard.number for shard in shards}, len(self._run.keys)
        sizes: dict[str, int] = {}
        documents, tokens = [0] * num_keys, [0] * num_keys
        is_in_order = True
        for place, shard in enumerate(before[: self._num_joined(before)]):
            record = read_record(self._folder.path, shard.number)
            is_in_order = is_in_order and place < len(shards) and shards[place].number == shard.number
            for key in range(num_keys):
                first = documents[key], tokens[key]
                documents[key] += record.num_documents[key]
                tokens[key] += record.num_tokens[key]
                if not is_in_order and shard.number in numbers:
                    ranges = range(first[0], documents[key]), range(first[1], tokens[key])
                    part = shard_prefix(self._folder.path, shard.number, key)
                    take_out(self._joined[key], part, self._dtype, *ranges)
            if is_in_order:
                sizes = self._sizes(documents, tokens)
        return sizes or self._sizes([0] * num_keys, [0] * num_keys)

    def _num_joined(self, shards: list[Shard]) -> int:
        """How many of the first shards are in the datasets that grow."""
        folder, num_keys = self._folder, len(self._run.keys)
        finished = [folder.is_finished(shard.number) for shard in shards]
        joined = [
            place
            for place, shard in enumerate(shards)
            if finished[place] and is_joined(folder.path, shard.number, num_keys)
        ]
        number = joined[-1] + 1 if joined else 0
        if not all(finished[:number]):
            raise InputError(f"{folder.path}: a shard before one that was joined is lost; remove this folder")
        return number

    def _sizes(self, documents: Sequence[int], tokens: Sequence[int]) -> dict[str, int]:
        return {
            os.path.basename(prefix) + ending: size
            for prefix, *numbers in zip(self._joined, documents, tokens, strict=True)
            for ending, size in joined_bytes(*numbers, self._dtype).items()
        }

    def _record_of(self, number: int) -> ShardRecord | None:
        return read_record(self._folder.path, number) if self._folder.is_finished(number) else None

    def _refuse_bad(self, found: BadDocumentFound) -> None:
        records = {found.shard: found.record}
        numbers = [shard.number for shard in self._shards]
        shards = self._shards[: numbers.index(found.shard) + 1]
        document = next(bad_documents(shards, lambda number: records.get(number) or self._record_of(number)))
        raise InputError(f"{document} (--skip-bad-documents leaves such documents out)") from None

    def _refuse_changed_inputs(self) -> None:
        """Refuse datasets of files that changed while they were read, as one does that is still written."""
        changes = InputChanges.between(self._identity["inputs"], self._run.inputs())
        if changes.now != changes.before:
            raise InputError(
                f"inputs changed while they were read: {changes}. Give the same command again when they are complete"
            )

    def _refuse_none(self, totals: Totals) -> None:
        """Refuse to write a dataset without a document, unless other jobs may have some."""
        if self._run.part is not None:
            return
        for place, key in enumerate(self._run.keys):
            if not totals.num_documents[place]:
                bad = next(bad_documents(self._shards, self._record_of), None)
                self._folder.remove()
                raise InputError(
                    f"{_names(self._run.paths)}: 0 documents with text under {key!r} ({totals.num_empty[place]} empty "
                    f"ones, {totals.num_bad} bad ones); nothing to write"
                    + (f"; the first bad one: {bad}" if bad else "")
                )

    def _finish(self, joiner: ShardJoiner, progress: Progress) -> None:
        """Join what is not yet joined, and check the datasets."""
        joiner.finish(progress)
        eod = self._tokenizer.eod if self._template.ends_in(self._tokenizer.eod) else None
        try:
            for prefix in self._joined:
                verify_documents(prefix, self._tokenizer.vocab_size, eod, progress, self._template)
        except IndexedDatasetError:
            self._folder.remove()  # its shards would give the same again
            raise
        self._folder.set_verified()

    def _publish(self) -> list[IndexedDataset]:
        """Give the datasets their names, where a run that was killed has not."""
        for joined, prefix in zip(self._joined, self._run.dataset_prefixes, strict=True):
            if not os.path.exists(idx_path(joined)):
                continue
            has_name = not os.path.exists(bin_path(joined))
            try:
                shutil.rmtree(index_directory(prefix), ignore_errors=True)  # of the dataset that is replaced
                move_files(bin_path(prefix if has_name else joined), idx_path(joined), prefix)
            except OSError as error:
                raise IndexedDatasetError(f"{error.filename or prefix}: cannot be renamed: {error.strerror}") from None
        return [IndexedDataset(prefix) for prefix in self._run.dataset_prefixes]


def _names(paths: Sequence[str]) -> str:
    names = [Place(path).name for path in paths[:3]]
    return ", ".join(names) + (f" and {len(paths) - 3} more files" if len(paths) > 3 else "")
