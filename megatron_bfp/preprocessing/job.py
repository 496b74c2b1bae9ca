"""What one call of the tool is to do with documents, and what tells it from other calls."""

import json
import os
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import InputError
from ..tokenizers.interface import Tokenizer
from ..tokenizers.registry import TokenizerOptions
from .plan import is_stream
from .readers.documents import Place


@dataclass(frozen=True)
class Run:
    """What is to be done."""

    paths: tuple[str, ...]
    """Input files, as ``input_files`` gives them."""
    keys: tuple[str, ...]
    """Of the documents; a dataset is written for each."""
    output_prefix: str
    tokenizer: TokenizerOptions
    skip_bad_documents: bool = False
    overwrite: bool = False
    """Replace what is there."""
    part: tuple[int, int] | None = None
    """Index and count: only so much of the input, for one of several jobs."""

    @property
    def prefix(self) -> str:
        """What the names of all files that are written begin with."""
        return (
            self.output_prefix
            if self.part is None
            else f"{self.output_prefix}-{self.part[0]:05d}-of-{self.part[1]:05d}"
        )

    @property
    def dataset_prefixes(self) -> list[str]:
        """The path of each key's dataset, as Megatron names it."""
        return [f"{self.prefix}_{key}_document" for key in self.keys]

    @property
    def has_streams(self) -> bool:
        """Whether an input can be read once only."""
        return any(map(is_stream, self.paths))

    def inputs(self) -> list[list[Any]]:
        """Of each input file as it is now: path, bytes, and nanoseconds of its last modification.

        Raises:
            InputError: an input is not there.
        """
        return [[path, *_size_and_time(path)] for path in self.paths]

    def identity(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """What would make it another run, as JSON. The number of workers would not, and neither would leaving out bad
        documents: a shard without any is the same. Nor would this package's version: see ``run_folder.FORMAT``.

        Args:
            tokenizer: what its options load.

        Raises:
            InputError: an input is not there.
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
        return json.loads(json.dumps(identity))  # as it is read from a file


def _size_and_time(path: str) -> tuple[int, int]:
    """Of an input file: bytes, and nanoseconds of its last modification."""
    if is_stream(path):
        return 0, 0
    try:
        status = os.stat(path)
    except OSError as error:
        raise InputError(f"{Place(path).name}: cannot be read: {error.strerror}") from None
    return status.st_size, status.st_mtime_ns
