"""JSON Lines in: a file is cut into batches of whole lines, and each line is one document's JSON object.

Lines end at a line feed and nowhere else: other line separators, such as U+2028, may stand inside a text. Files are
read as bytes in constant memory, so a line that is not UTF-8 is the error of that line and not of the file.
"""

import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import InputError

BATCH_BYTES = 1 << 20
BOM = b"\xef\xbb\xbf"
REFUSED_STARTS = {
    b"\xff\xfe": "is UTF-16; convert it to UTF-8",
    b"\xfe\xff": "is UTF-16; convert it to UTF-8",
    b"\x1f\x8b": "is compressed by gzip; decompress it first",
    b"\x28\xb5\x2f\xfd": "is compressed by zstd; decompress it first",
    b"BZh": "is compressed by bzip2; decompress it first",
    b"\xfd7zXZ": "is compressed by xz; decompress it first",
    b"PAR1": "is Parquet, not JSON Lines",
    b"[": "is a JSON array, not JSON Lines: write one object a line",
}


@dataclass(frozen=True)
class LineBatch:
    """Consecutive lines of a file."""

    path: str
    first_line: int
    """Counted from 1."""
    lines: list[bytes]


def read_batches(path: str) -> Iterator[LineBatch]:
    """Batches of about ``BATCH_BYTES`` of the lines of a file.

    Raises:
        InputError: the file cannot be read or is not JSON Lines.
    """
    try:
        with open(path, "rb") as file:
            start = file.read(8).removeprefix(BOM)
            for magic, reason in REFUSED_STARTS.items():
                if start.startswith(magic):
                    raise InputError(f"{path}: {reason}")
            file.seek(0)
            line_number = 1
            while lines := file.readlines(BATCH_BYTES):
                yield LineBatch(path, line_number, lines)
                line_number += len(lines)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None


def texts(batch: LineBatch, key: str) -> list[str]:
    """The documents of a batch: what each line's object holds under ``key``. Blank lines are passed over.

    Raises:
        InputError: a line is not a document; the message names file, line and reason.
    """
    found = []
    for line_number, line in enumerate(batch.lines, batch.first_line):
        line = line.removeprefix(BOM)
        if line.strip():
            try:
                found.append(_text(line, key))
            except ValueError as error:
                raise InputError(f"{batch.path}:{line_number}: {error}") from None
    return found


def _text(line: bytes, key: str) -> str:
    try:
        document = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos + 1}") from None
    except RecursionError:
        raise ValueError("not usable JSON: nested too deeply") from None
    if not isinstance(document, dict):
        raise ValueError(f"holds a JSON {type(document).__name__}, not an object")
    if key not in document:
        spellings = {name.lower(): name for name in document}
        near = difflib.get_close_matches(key.lower(), spellings, n=1)
        names = ", ".join(repr(name) for name in sorted(document)) or "none"
        hint = f"; did you mean {spellings[near[0]]!r}?" if near else ""
        raise ValueError(f"no key {key!r}; its keys are {names}{hint}")
    text = document[key]
    if not isinstance(text, str):
        raise ValueError(f"{key!r} holds a {type(text).__name__}, not text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"character {error.start + 1} of {key!r} is half of a surrogate pair, not text") from None
    return text
