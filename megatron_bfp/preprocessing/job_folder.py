"""OUT.shards, the folder of a run that is not finished: what it is for, the shards that were planned, those that are
done, the datasets that grow of them.

It is there from the first shard to the finished datasets. A run that is started again goes on with it, if it has the
same tokenizer and options, and with the same shards if its inputs are the same by path, size and time of modification.
If they have changed, the shards of those that have not are kept: see ``replanning``.
"""

import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ..errors import InputError, OptionError
from ..files import sync_file, write_whole
from .lease import Lease, TakenError
from .plan import Shard
from .readers.inputs import Piece
from .replanning import InputChanges
from .task import shard_folder

SUFFIX = ".shards"
FORMAT = 3
"""Of what is in the folder."""
IDENTITY = "run"
LOCK = "lock"
PLAN, CUT = "plan", "cut"
"""Keys of ``run`` beside the identity's: the shards; and what the files of growing datasets are to be cut to, by their
names, if that is still to be done."""
VERIFIED = "verified"
"""Is there when the datasets are finished and right: nothing is left but to give them their names."""
SHARD = re.compile(r"[0-9]{6,}")
LOCK_SECONDS = 2.0
"""How long to wait for processes that a kill has left to themselves."""
JOINED = re.compile(r"joined-[0-9]+\.(bin|idx|lengths)")
UNFINISHED = re.compile(r"segment-.*|.*\.part")


class RunFolder:
    """The folder of a run, for one process at a time.

    Leaving the ``with`` block removes what is unfinished, and the folder if no shard is done.

    Args:
        path: of the folder.
        identity: what makes this run another one; can be written as JSON.
        overwrite: begin anew if the folder is another run's.

    Raises:
        OptionError: the folder is another run's and not to be overwritten, or another process has it.
        InputError: the folder cannot be written.
    """

    def __init__(self, path: str, identity: dict[str, Any], overwrite: bool) -> None:
        self.path = path
        self._identity = identity | {"folder_format": FORMAT}
        self._overwrite = overwrite
        self._lease: Lease | None = None
        self.plan: list[Shard] | None = None
        """The shards that were planned; None if that was not done."""
        self.changes: InputChanges | None = None
        """Of the inputs, since the shards were planned; None for none."""

    def __enter__(self) -> "RunFolder":
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
        with suppress(OSError):  # of a disk that is full, say: what is unfinished does no harm
            self._remove_unfinished()
        number = len(self.finished())
        if not number and not self.is_verified:
            self.remove()
        elif error is not None:
            what = f"keeps {number} finished shard{'s' if number > 1 else ''}"
            print(f"{self.path}: {what}; the same command goes on from there", file=sys.stderr, flush=True)
        self._release()

    def is_of_this_run(self) -> bool:
        """Whether there is something of this run to go on with."""
        return self._recorded()[0] == self._identity

    def set_plan(self, shards: Sequence[Shard], joined_sizes: dict[str, int] | None = None) -> None:
        """Go on with these shards, of the inputs as they are now, and forget all others.

        Args:
            joined_sizes: cut files of the growing datasets to these sizes; name -> bytes.

        Raises:
            InputError: the folder cannot be written.
        """
        plan = [[shard.number, [[p.path, p.num_bytes, p.begin, p.end] for p in shard.pieces]] for shard in shards]
        record = self._identity | {PLAN: plan}
        try:
            if joined_sizes:  # after this nothing needs what is cut, and before it all of it is needed
                write_whole(self._record_path, json.dumps(record | {CUT: joined_sizes}).encode())
                sync_file(self.path)
                self._cut(joined_sizes)
            write_whole(self._record_path, json.dumps(record).encode())
            for number in self.finished() - {shard.number for shard in shards}:
                shutil.rmtree(shard_folder(self.path, number))
        except OSError as error:
            raise InputError(f"{error.filename or self.path}: cannot be written: {error.strerror}") from None
        self.plan, self.changes = list(shards), None

    @property
    def _record_path(self) -> str:
        return os.path.join(self.path, IDENTITY)

    def _recorded(self) -> tuple[dict[str, Any] | None, list[Shard] | None, dict[str, int]]:
        """The identity of the folder's run, its shards, and what is to be cut; None for what there is not."""
        found = read_json(self._record_path)
        if found is None:
            return None, None, {}
        plan, cut = found.pop(PLAN, None), found.pop(CUT, {})
        shards = plan and [Shard(number, tuple(Piece(*piece) for piece in pieces)) for number, pieces in plan]
        return found, shards, cut

    def _cut(self, sizes: dict[str, int]) -> None:
        for name, size in sizes.items():
            path = os.path.join(self.path, name)
            if os.path.exists(path):
                os.truncate(path, min(size, os.path.getsize(path)))
                sync_file(path)

    def finished(self) -> set[int]:
        """The numbers of the shards that are done."""
        names = os.listdir(self.path) if os.path.isdir(self.path) else []
        return {int(name) for name in names if SHARD.fullmatch(name)}

    def is_finished(self, number: int) -> bool:
        """Whether a shard is done."""
        return os.path.isdir(shard_folder(self.path, number))

    def joined_prefix(self, key: int) -> str:
        """The path of the dataset for a key, given by its number, that the shards are joined to."""
        return os.path.join(self.path, f"joined-{key}")

    @property
    def is_verified(self) -> bool:
        """Whether the joined datasets are finished, and were found to be right."""
        return os.path.exists(os.path.join(self.path, VERIFIED))

    def set_verified(self) -> None:
        """Remember that the joined datasets are finished and right.

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
        """Forget the shards that are done.

        Raises:
            InputError: they cannot be removed.
        """
        try:
            for number in self.finished():
                shutil.rmtree(shard_folder(self.path, number))
            for name in os.listdir(self.path):  # after the shards, which may not be without them
                if name == VERIFIED or JOINED.fullmatch(name):
                    os.remove(os.path.join(self.path, name))
        except OSError as error:
            raise InputError(f"{error.filename}: cannot be removed: {error.strerror}") from None

    def remove(self) -> None:
        """Remove the folder: its run is finished."""
        with suppress(OSError):  # what a kill leaves of the rest is then no run to go on with
            os.remove(self._record_path)
        shutil.rmtree(self.path, ignore_errors=True)

    def _take_lock(self) -> None:
        try:
            self._lease = Lease(os.path.join(self.path, LOCK), LOCK_SECONDS)
        except TakenError as owner:
            who = f" ({owner})" if str(owner) else ""
            raise OptionError(f"{self.path}: another process is writing these datasets{who}") from None

    def _begin(self) -> None:
        """Go on with what is there, or begin anew."""
        names = set(os.listdir(self.path)) - {LOCK}
        strange = sorted(name for name in names if not _is_ours(name))
        if strange:
            raise OptionError(f"{self.path}: is no folder of unfinished runs (it holds {strange[0]}); move it away")
        found, self.plan, cut = self._recorded()
        is_same = found == self._identity
        is_other = found is not None and not is_same and not self._has_other_inputs_alone(found)
        if is_other and not self._overwrite:
            raise OptionError(
                f"{self.path}: holds what another run has done: {difference(found, self._identity)}. Run that command "
                "again to go on with it, or give --overwrite to begin anew"
            )
        self._remove_unfinished()
        # Of a run that is verified, the datasets may be in place.
        if found is None or is_other or self.is_verified and (self._overwrite or not is_same):
            self.clear()
            if found is not None:
                os.remove(self._record_path)
            self.plan = None
            return
        if cut:
            self._cut(cut)
        if not is_same:
            self.changes = InputChanges.between(found["inputs"], self._identity["inputs"])

    def _has_other_inputs_alone(self, found: dict[str, Any]) -> bool:
        """Whether a run differs in its inputs alone. A job that does a part of them needs those of the other jobs."""
        return found.get("part") is None and found | {"inputs": self._identity.get("inputs")} == self._identity

    def _remove_unfinished(self) -> None:
        for name in os.listdir(self.path):
            path = os.path.join(self.path, name)
            if UNFINISHED.fullmatch(name):
                shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)

    def _release(self) -> None:
        if self._lease is not None:
            self._lease.release()
            self._lease = None


def _is_ours(name: str) -> bool:
    return name in (IDENTITY, VERIFIED) or any(form.match(name) for form in (SHARD, JOINED, UNFINISHED))


def read_json(path: str) -> dict[str, Any] | None:
    """What a file holds as JSON; None if there is no such file or it is no JSON object."""
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """What makes two runs different ones, in words, with both values."""
    if before.get("folder_format") != now.get("folder_format"):
        return "it is another version's, which keeps its work in another form"
    for name in now:
        if name != "inputs" and before.get(name) != now[name]:
            return "it differs in {} ({} before, {} now)".format(*_first_difference(name, before.get(name), now[name]))
    changes = f"its inputs have changed: {InputChanges.between(before.get('inputs', []), now.get('inputs', []))}"
    if now.get("part") is not None:
        changes += ". All jobs with --shard-index must read the same input, so do this in each of them"
    return changes


TOKENIZER_PARTS = {"tokenizer[0]": "tokenizer type", "tokenizer[1].": "tokenizer ", "tokenizer[2].": "tiktoken "}


def _first_difference(name: str, before: Any, now: Any) -> tuple[str, str, str]:
    """The name and both values of what differs first, inside the parts of a tokenizer's description."""
    if isinstance(before, dict) and isinstance(now, dict):
        key = next(key for key in before | now if before.get(key) != now.get(key))
        return _first_difference(f"{name}.{key}", before.get(key), now.get(key))
    if name == "tokenizer" and isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        place = next(place for place in range(len(now)) if before[place] != now[place])
        return _first_difference(f"{name}[{place}]", before[place], now[place])
    for part, shown in TOKENIZER_PARTS.items():
        name = name.replace(part, shown)
    return name, json.dumps(before), json.dumps(now)
