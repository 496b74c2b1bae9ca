"""A job: what one call of preprocess is to do, and what tells it from other jobs.

Several jobs can each do a part of the same input (``--shard-index``), and their datasets are merged. Each plans the
whole input. If a file changed between two of them, their parts do not fit: documents are lost or come twice, and
nothing in the datasets shows it. ``check_parts`` compares the jobs' summaries instead.
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import InputError, OptionError
from ..files import read_json_object
from ..tokenizers.interface import Tokenizer
from ..tokenizers.registry import TokenizerOptions
from .readers.file_names import SUMMARY_SUFFIX
from .readers.storage import is_stream, statuses
from .replanning import InputChanges

PART = re.compile(r"(?P<output>.*)-(?P<index>\d{5})-of-(?P<count>\d{5})(?P<key>_.*)")
"""The name of a part's dataset."""
TOKENIZER_FIELDS = {"tokenizer[0]": "tokenizer type", "tokenizer[1].": "tokenizer ", "tokenizer[2].": "tiktoken "}
"""What messages call the fields of an identity's tokenizer."""


@dataclass(frozen=True)
class Job:
    """What is to be done with which documents."""

    paths: tuple[str, ...]
    """Input files, as ``input_files`` gives them."""
    keys: tuple[str, ...]
    """Of the documents; a dataset is written for each."""
    output_prefix: str
    tokenizer: TokenizerOptions
    skip_bad_documents: bool = False
    overwrite: bool = False
    """Replace existing datasets, and the unfinished work of another job."""
    part: tuple[int, int] | None = None
    """Index and count: this job does one part of the input. None for all of it."""
    text_unit: str | None = None
    """What a document of plain text is; None if no input is plain text."""
    card: bool = True
    """Describe the datasets in OUT.card.md. Every byte is hashed for it, beside the check of all tokens."""

    @property
    def prefix(self) -> str:
        """The path that the names of all written files begin with."""
        if self.part is None:
            return self.output_prefix
        index, count = self.part
        return f"{self.output_prefix}-{index:05d}-of-{count:05d}"

    @property
    def dataset_prefixes(self) -> list[str]:
        """The path of each key's dataset, as Megatron names it."""
        return [f"{self.prefix}_{key}_document" for key in self.keys]

    @property
    def has_streams(self) -> bool:
        """Whether an input can be read only once."""
        return any(map(is_stream, self.paths))

    def inputs(self) -> list[list[Any]]:
        """Path, size in bytes and version of each input, as it is now: see ``storage.FileStatus``.

        Raises:
            InputError: an input cannot be read.
        """
        return [[path, *status] for path, status in zip(self.paths, statuses(self.paths), strict=True)]

    def identity(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """What makes this job the same as another, as JSON.

        It does not hold the number of workers, nor whether bad documents are skipped: tasks without any are the same.
        Nor does it hold this package's version: see ``job_folder.FORMAT``.

        Args:
            tokenizer: what the tokenizer's options load.

        Raises:
            InputError: an input cannot be read.
        """
        options = self.tokenizer
        template = options.template(tokenizer)
        identity = {
            "inputs": self.inputs(),
            "json_keys": list(self.keys),
            "tokenizer": [options.tokenizer_type, tokenizer.unique_identifiers, asdict(options.tiktoken)],
            "append_eod": options.append_eod,
            "document_begins_with": template.before,
            "document_ends_with": template.after,
            "part": self.part,
        }
        if self.text_unit is not None:
            identity["text_documents"] = self.text_unit
        return json.loads(json.dumps(identity))  # as it is read from a file


def difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """The first difference between two jobs' identities, in words and with both values."""
    if before.get("folder_format") != now.get("folder_format"):
        return "it is another version's, which keeps its work in another form"
    for name in now | before:
        values = before.get(name), now.get(name)
        if name != "inputs" and values[0] != values[1]:
            return "it differs in {} ({} before, {} now)".format(*_first_difference(name, *values))
    changes = f"its inputs have changed: {InputChanges.between(before.get('inputs', []), now.get('inputs', []))}"
    if now.get("part") is not None:
        changes += ". All jobs with --shard-index must read the same input, so do this in each of them"
    return changes


def _first_difference(name: str, before: Any, now: Any) -> tuple[str, str, str]:
    """The name and both values of the first difference, inside dicts and inside the list that describes a tokenizer."""
    if isinstance(before, dict) and isinstance(now, dict):
        key = next(key for key in before | now if before.get(key) != now.get(key))
        return _first_difference(f"{name}.{key}", before.get(key), now.get(key))
    if name == "tokenizer" and isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        number = next(number for number in range(len(now)) if before[number] != now[number])
        return _first_difference(f"{name}[{number}]", before[number], now[number])
    for field, shown in TOKENIZER_FIELDS.items():
        name = name.replace(field, shown)
    return name, json.dumps(before), json.dumps(now)


def check_parts(prefixes: Sequence[str]) -> Iterator[str]:
    """Check that datasets which are named as parts are parts of one input.

    Yields:
        A warning for each set of parts that is not complete.

    Raises:
        OptionError: a part is given twice.
        InputError: two parts are of different inputs, or were made with different options.
    """
    outputs: dict[tuple[str, ...], dict[int, re.Match[str]]] = {}
    for prefix in prefixes:
        if part := PART.fullmatch(os.path.realpath(prefix)):
            parts = outputs.setdefault(part.group("output", "count", "key"), {})
            if int(part["index"]) in parts:
                raise OptionError(f"{prefix}: this part is given twice; give it once, or its documents come twice")
            parts[int(part["index"])] = part
    for (output, count, key), parts in outputs.items():
        _refuse_other_jobs(list(parts.values()))
        missing = sorted(set(range(int(count))) - set(parts))
        if missing:
            first, more = missing[0], len(missing) - 1
            others = f" and {more} more" if more else ""
            yield f"{output}-{first:05d}-of-{count}{key}{others} of these {int(count)} parts not merged: not given"


def _refuse_other_jobs(parts: Sequence[re.Match[str]]) -> None:
    """Refuse parts whose jobs differ in more than their part."""
    first, first_identity = "", None
    for part in parts:
        name = f"{part['output']}-{part['index']}-of-{part['count']}"
        identity = _identity_without_part(name)
        if identity is None:  # its summary was not kept
            continue
        if first_identity is not None and identity != first_identity:
            raise InputError(
                f"{name}: does not fit {first}: {difference(first_identity, identity)}. Documents would be lost or "
                "come twice; do the parts again, with --overwrite, while the input does not change"
            )
        first, first_identity = name, identity


def _identity_without_part(name: str) -> dict[str, Any] | None:
    summary = read_json_object(name + SUMMARY_SUFFIX)
    identity = summary and summary.get("run")
    if not isinstance(identity, dict):
        return None
    return {key: value for key, value in identity.items() if key not in ("part", "version")}
