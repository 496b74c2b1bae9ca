"""JSON Lines: the bytes of a file are cut into batches of whole lines, and each line is one document's JSON object.

Lines end only at a line feed: other line separators, such as U+2028, may occur inside a text. A line that is not UTF-8
is a bad document, not a bad file. The fast parser refuses some lines that are common in the wild (``NaN`` under another
key, say). The standard library parses what it refuses once more, and then decides and says why.
"""

import difflib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, BinaryIO

from ...errors import InputError, OptionError
from .compression import CHUNK_BYTES
from .documents import MAX_DOCUMENT_BYTES, BadDocument, Location, Record, a_kind, encodable_text_of, text_of
from .file_kinds import BOM, check_start

BATCH_BYTES = 1 << 21
MAX_DEPTH = 200
"""Of brackets, if a line is nested too deeply for the standard library: deeper ones are replaced by null."""
STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]')
LONGEST_SHOWN_KEY, SHOWN_KEYS = 40, 20
"""Length and number of the keys that a message names."""


@dataclass(frozen=True)
class LineBatch:
    """Consecutive lines of a file."""

    path: str
    first_line: int
    """Counted from 1."""
    first_byte: int
    """Where the first line begins in the (decompressed) file, counted from 0."""
    content: bytes
    """Whole lines, each but the file's last with its line feed."""

    @property
    def num_bytes(self) -> int:
        """As ``Batch.num_bytes``."""
        return len(self.content)

    @property
    def num_lines(self) -> int:
        """As ``Batch.num_lines``."""
        return len(self._lines)

    num_left_out = 0

    def records(self, keys: Sequence[str]) -> Iterator[Record | BadDocument]:
        """Each line's texts under ``keys``, or what is wrong with it. Blank lines are skipped.

        Raises:
            OptionError: the JSON parser is not installed.
        """
        loads = _fast_loads()
        content = memoryview(self.content)  # slices of it are not copies
        for number, (begin, end) in enumerate(self._lines, self.first_line):
            location = Location(self.path, number, self.first_byte + begin)
            try:
                document, checked = _parsed(content[begin:end], loads)
                if document is not None:
                    yield Record(location, [checked(_value(document, key), key) for key in keys])
            except ValueError as error:
                yield BadDocument(location, str(error))

    @cached_property
    def _lines(self) -> list[tuple[int, int]]:
        """Where each line begins and ends, without its line feed."""
        lines, begin = [], 0
        while begin < len(self.content):
            end = self.content.find(b"\n", begin)
            end = len(self.content) if end < 0 else end
            lines.append((begin, end))
            begin = end + 1
        return lines


def line_batches(
    chunks: Iterable[bytes],
    path: str,
    first_byte: int = 0,
    is_checked: bool = False,
    make: Callable[[str, int, int, bytes], LineBatch] = LineBatch,
) -> Iterator[LineBatch]:
    """Batches of whole lines, in order, each about as large as a chunk, or one line if that is longer.

    Args:
        chunks: the bytes of the file, or of a piece of it that begins where a line does.
        path: of the file, for batches and messages.
        first_byte: where the piece begins in the file.
        is_checked: ``check_lines`` was called with the file's start, or it is not JSON.
        make: the class of batches.

    Raises:
        InputError: it is not JSON Lines, or a line is longer than ``MAX_DOCUMENT_BYTES``.
    """
    line, byte = 1, first_byte
    unfinished: list[bytes] = []
    size = 0
    for number, chunk in enumerate(_in_large_chunks(chunks)):
        if not number and not first_byte and not is_checked:
            check_lines(chunk, len(chunk) < BATCH_BYTES, path)
        cut = chunk.rfind(b"\n") + 1
        if cut:
            batch = make(path, line, byte, b"".join([*unfinished, memoryview(chunk)[:cut]]))
            yield batch
            line, byte = line + batch.num_lines, byte + batch.num_bytes
            unfinished, size = [], 0
        unfinished.append(chunk[cut:])
        size += len(chunk) - cut
        if size > MAX_DOCUMENT_BYTES:
            raise InputError(
                f"{Location(path, line, byte)}: this line is longer than {MAX_DOCUMENT_BYTES >> 30} GiB; is it JSON?"
            )
    if size:
        yield make(path, line, byte, b"".join(unfinished))


def line_chunks(file: BinaryIO, begin: int, end: int) -> tuple[int, Iterator[bytes]]:
    """The lines of a file that begin in a range of its bytes. So consecutive ranges cover every line once.

    Returns:
        The first byte of the first line, and the lines' bytes in chunks.
    """
    file.seek(begin)
    if begin:
        file.seek(begin - 1)
        line_feed_found = False
        while not line_feed_found and file.tell() < end:  # a line longer than the range is not read through
            line_feed_found = not (part := file.readline(CHUNK_BYTES)) or part.endswith(b"\n")
    return file.tell(), _chunks_to_line_end(file, end)


def _chunks_to_line_end(file: BinaryIO, end: int) -> Iterator[bytes]:
    chunk = b"\n"
    while (left := end - file.tell()) > 0 and (chunk := file.read(min(BATCH_BYTES, left))):
        yield chunk
    while chunk and not chunk.endswith(b"\n"):
        chunk = file.readline(CHUNK_BYTES)
        if chunk:
            yield chunk


def count_line_starts(file: BinaryIO, begin: int, end: int) -> int:
    """How many lines begin in a range of a file's bytes."""
    _, chunks = line_chunks(file, begin, end)
    last, number = b"\n", 0
    for last in chunks:
        number += last.count(b"\n")
    return number + (not last.endswith(b"\n"))


def _in_large_chunks(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """``chunks`` joined to ``BATCH_BYTES`` or a little more: those of pipes and of small members are small."""
    joined: list[bytes] = []
    size = 0
    for chunk in chunks:
        joined.append(chunk)
        size += len(chunk)
        if size >= BATCH_BYTES:
            yield b"".join(joined)
            joined, size = [], 0
    if size:
        yield b"".join(joined)


def check_lines(chunk: bytes, is_whole: bool, path: str) -> None:
    """Refuse a file that is not JSON Lines, by its first chunk: as ``check_start``.

    Raises:
        InputError: the file is not JSON Lines.
        OptionError: the JSON parser is not installed.
    """
    loads = _fast_loads()
    check_start(chunk, is_whole, path, lambda line: _parsed(memoryview(line), loads)[0])


def _fast_loads() -> Any:
    try:
        import orjson
    except ImportError:
        raise OptionError("the orjson package is missing: pip install 'megatron-bfp[preprocess]'") from None
    return orjson.loads


def _parsed(line: memoryview, loads: Any) -> tuple[dict[str, Any] | None, Callable[[object, str], str]]:
    """A line's object, None if the line is blank; and the function that checks its texts."""
    try:
        document, checked = loads(line), text_of  # the fast parser refuses half a surrogate pair
    except ValueError:
        without_bom = bytes(line).removeprefix(BOM)
        if not without_bom or without_bom.isspace():
            return None, text_of
        document, checked = _parsed_slowly(without_bom, len(line) - len(without_bom)), encodable_text_of
    if not isinstance(document, dict):
        raise ValueError(f"holds {a_kind(document, 'JSON ')}, not an object")
    return document, checked


def _parsed_slowly(line: bytes, bytes_before: int) -> Any:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {bytes_before + error.start + 1} of the line is not UTF-8") from None
    try:
        return _loads(text)
    except json.JSONDecodeError as error:
        byte = bytes_before + len(text[: error.pos].encode()) + 1
        raise ValueError(f"not JSON: {error.msg.removesuffix(' at')} at byte {byte} of the line") from None
    except RecursionError:
        pass
    try:
        return _loads(_without_depths(text))
    except (ValueError, RecursionError):
        raise ValueError("not usable JSON: nested too deeply") from None


def _loads(text: str) -> Any:
    # Integers of over 4,300 digits are refused by ``int``. No number is text, so its value does not matter.
    return json.loads(text, parse_int=lambda _: 0)


def _without_depths(text: str) -> str:
    """JSON with null instead of objects and arrays that are inside more than ``MAX_DEPTH`` others.

    Raises:
        ValueError: brackets do not match.
    """
    parts: list[str] = []
    opened: list[str] = []
    begin = 0
    for match in STRING_OR_BRACKET.finditer(text):
        token = match[0]
        if token in "[{":
            opened.append("]" if token == "[" else "}")
            if len(opened) == MAX_DEPTH + 1:
                parts += text[begin : match.start()], "null"
        elif token in "]}":
            if not opened or opened.pop() != token:
                raise ValueError("brackets do not match")
            if len(opened) == MAX_DEPTH:
                begin = match.end()
    if opened:
        raise ValueError("brackets do not match")
    return "".join([*parts, text[begin:]])


def _value(document: dict[str, Any], key: str) -> object:
    """The value of a key, or of a path of keys with dots between them."""
    if key in document:
        return document[key]
    value: Any = document
    for name in key.split("."):
        if not isinstance(value, dict) or name not in value:
            raise ValueError(missing_key(key, document))
        value = value[name]
    return value


def missing_key(key: str, keys: Collection[str], kind: str = "key") -> str:
    """A message: the key is missing, these keys exist, and this one may have been meant.

    Of many keys only some are named. Keys that are too long to be keys are not shown: they may be texts.
    """
    short = sorted(name for name in keys if len(name) <= LONGEST_SHOWN_KEY)
    spellings = {name.lower(): name for name in short}
    near = difflib.get_close_matches(key.lower(), spellings, n=1)
    shown = [repr(name) for name in short[:SHOWN_KEYS]]
    names = ", ".join(shown) or ("too long to be shown" if keys else "none")
    if shown and len(shown) < len(keys):
        names += f" and {len(keys) - len(shown)} more"
    hint = f"; did you mean {spellings[near[0]]!r}?" if near else ""
    return f"no {kind} {key!r}; its {kind}s are {names}{hint}"
