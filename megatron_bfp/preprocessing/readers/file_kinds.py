"""Files that are not JSON Lines as a whole, detected from their first bytes. They are refused even if bad documents are
skipped.

The rule: a file is refused if its first bytes are those of a format in ``MAGICS`` or of an array over several lines; or
if none of the lines at its start (``CHECKED_BYTES``) is a JSON object, and one of these holds:

- the first object spans several lines, or another object follows it on its line;
- it begins with bytes that are not text, or with those of a format in ``TEXT_MAGICS``;
- there are ``FEW_LINES`` lines or more.

So a few bad lines are bad documents, and a file of another format is never skipped document by document.
"""

import json
import re
from collections.abc import Callable, Iterator

from ...errors import InputError
from .compression import compression_of
from .documents import Location

BOM = b"\xef\xbb\xbf"
CHECKED_BYTES = 1 << 20
FEW_LINES = 10
UTF_16, UTF_32 = "UTF-16; convert it to UTF-8", "UTF-32; convert it to UTF-8"
FROM_PIPE = "which cannot be read from a pipe; give the file's path"
ARROW = "Arrow, which is read from files that are not compressed as a whole; give the file's path, decompressed"
UNPACK, DECOMPRESS, EXPORT = "unpack it first", "decompress it first", "write JSON Lines or Parquet of it"
PICKLE = f"a Python pickle; {EXPORT}"
MAGICS = {
    b"\x00\x00\xfe\xff": UTF_32,
    b"\xff\xfe\x00\x00": UTF_32,
    b"\xff\xfe": UTF_16,
    b"\xfe\xff": UTF_16,
    b"{\x00": UTF_16,
    b"\x00{": UTF_16,
    b"PAR1": "compressed Parquet; decompress it first (Parquet compresses its columns itself)",
    b"PARE": "encrypted Parquet; write it without encryption",
    b"ARROW1\x00\x00": ARROW,
    b"\xff\xff\xff\xff": ARROW,
    b"Obj\x01": f"an Avro file; {EXPORT}",
    b"SQLite format 3\x00": f"an SQLite database; {EXPORT}",
    b"\x89HDF\r\n\x1a\n": f"an HDF5 file; {EXPORT}",
    b"\x93NUMPY": f"a numpy array; {EXPORT}",
    **{bytes([0x80, version]): PICKLE for version in range(2, 6)},
    b"MMIDIDX\x00": "an .idx of Megatron; give documents, or build its indexes with megatron-bfp index",
    b"PK\x03\x04": f"a zip archive; {UNPACK}",
    b"PK\x05\x06": f"a zip archive; {UNPACK}",
    b"PK\x07\x08": f"a zip archive; {UNPACK}",
    b"7z\xbc\xaf\x27\x1c": f"a 7z archive; {UNPACK}",
    b"Rar!\x1a\x07": f"a RAR archive; {UNPACK}",
    b"!<arch>\n": f"an ar archive; {UNPACK}",
    b"\x04\x22\x4d\x18": f"compressed by lz4; {DECOMPRESS}",
    b"\x02\x21\x4c\x18": f"compressed by lz4; {DECOMPRESS}",
    b"\x5d\x00\x00": f"compressed by lzma (xz's old format); {DECOMPRESS}",
    b"\x89LZO\x00": f"compressed by lzop; {DECOMPRESS}",
    b"\x1f\x9d": f"compressed by compress; {DECOMPRESS}",
    b"\x1f\xa0": f"compressed by compress; {DECOMPRESS}",
    b"\xff\x06\x00\x00sNaPpY": f"compressed by snappy; {DECOMPRESS}",
    b"\x37\xa4\x30\xec": "a zstd dictionary, not data",
}
"""First bytes -> what the file is, and what to do."""
TEXT_MAGICS = {
    b"FEA1": f"a Feather file; {EXPORT}",
    b"ORC": f"an ORC file; {EXPORT}",
    b"%PDF-": f"a PDF; {EXPORT}",
    b"WARC/": f"a WARC file, {FROM_PIPE}",
    b"<?xml": f"XML; {EXPORT}",
    b"<!DOCTYPE": f"HTML; {EXPORT}",
    b"<html": f"HTML; {EXPORT}",
    b"version https://git-lfs": "a pointer of Git LFS, not the file; get it with git lfs pull",
    b"LZIP": f"compressed by lzip; {DECOMPRESS}",
}
"""As ``MAGICS``, for bytes with which a bad line may begin: they count only if no line is an object."""
NEVER_TEXT = (b"%PDF-", b"version https://git-lfs")
"""Those of them that are no documents either if a file is said to be plain text."""
TAR_MAGIC = slice(257, 262)
NOT_TEXT = re.compile(rb"[\x00-\x08\x0e-\x1f\x7f]")
"""Bytes that do not occur in text."""
ONE_A_LINE = "is not JSON Lines: write one object a line (jq -c . FILE)"


def check_start(chunk: bytes, is_whole: bool, path: str, parse: Callable[[bytes], object]) -> None:
    """Refuse a file that is not JSON Lines, by its first chunk.

    Args:
        chunk: the (decompressed) file's first bytes, ``CHECKED_BYTES`` or more.
        is_whole: these are all bytes of the file, and may be fewer.
        path: of the file.
        parse: line -> its object, None if it is blank; raises ValueError if it is not an object.

    Raises:
        InputError: the file is not JSON Lines.
    """
    _refuse_known_formats(chunk, path)
    name = Location(path).name
    start = chunk.removeprefix(BOM).lstrip()
    if start.startswith(b"[") and not _is_a_line_s_array(start):
        raise InputError(f"{name}: is a JSON array, not JSON Lines: write one object a line (jq -c '.[]' FILE)")
    if reason := _reason_to_refuse(chunk, is_whole, path, parse):
        raise InputError(reason)


def check_text(chunk: bytes, path: str) -> None:
    """Refuse a file that is not plain text, by its first chunk, unless it is text in an unknown encoding.

    Raises:
        InputError: the file is of another format.
    """
    _refuse_known_formats(chunk, path)
    name = Location(path).name
    for magic in NEVER_TEXT:
        if chunk.startswith(magic):
            raise InputError(f"{name}: is {TEXT_MAGICS[magic]}")
    if b"\0" in chunk[:4096]:
        raise InputError(f"{name}: is neither text nor a known format")


def _refuse_known_formats(chunk: bytes, path: str) -> None:
    name = Location(path).name
    for magic, kind in MAGICS.items():
        if chunk.startswith(magic):
            raise InputError(f"{name}: is {kind}")
    if compression := compression_of(chunk):
        raise InputError(f"{name}: is compressed twice, inside by {compression}; decompress it once")
    if chunk[TAR_MAGIC] == b"ustar":
        raise InputError(f"{name}: is a tar archive; {UNPACK}")


def _is_a_line_s_array(start: bytes) -> bool:
    """Whether an array is only the first line: then it is a bad line, and other lines may be good."""
    line, _, rest = start.partition(b"\n")
    return line.rstrip().endswith(b"]") and rest.lstrip().startswith((b"{", BOM + b"{"))


def _reason_to_refuse(chunk: bytes, is_whole: bool, path: str, parse: Callable[[bytes], object]) -> str | None:
    """Why a file is refused if none of its first lines is an object; None if it is not refused."""
    number, first_error = 0, ""
    for location, line in _whole_lines(chunk, is_whole, path):
        try:
            if parse(line) is not None:
                return None
        except ValueError as error:
            number += 1
            first_error = first_error or f"{location}: {error}"
    name, start = Location(path).name, chunk.removeprefix(BOM).lstrip()
    if kind := next((kind for magic, kind in TEXT_MAGICS.items() if start.startswith(magic)), None):
        return f"{name}: is {kind}"
    if start.startswith(b"{"):
        if over_lines := _objects_over_lines(start, is_whole):
            return f"{name}: {over_lines}, so it {ONE_A_LINE}"
    elif start and not start.strip(b"\0"):
        return f"{name}: holds only NUL bytes, as a crash may leave; get a whole copy"
    elif _is_not_text(start):
        return f"{name}: is neither text nor a known format; give JSON Lines or Parquet"
    if number >= FEW_LINES:
        return f"{first_error}; none of the first {number:,} lines is a JSON object, so this is not a JSON Lines file"
    return None


def _whole_lines(chunk: bytes, is_whole: bool, path: str) -> Iterator[tuple[Location, bytes]]:
    """The lines that are not blank, without a last one that the chunk may have cut."""
    begin, number = 0, 0
    while begin < len(chunk):
        end = chunk.find(b"\n", begin)
        if end < 0 and not is_whole:
            return
        end = len(chunk) if end < 0 else end
        number += 1
        line = chunk[begin:end]
        if line.removeprefix(BOM).strip():
            yield Location(path, number, begin), line
        begin = end + 1


def _objects_over_lines(start: bytes, is_whole: bool) -> str | None:
    """What is wrong with the line ends of a file none of whose lines is an object; None if nothing is."""
    text = start.decode("utf-8", errors="replace")
    first_line, line_feed, _ = text.partition("\n")
    try:
        _, end = json.JSONDecoder(strict=False, parse_int=float).raw_decode(text)
    except (ValueError, RecursionError):
        # The object may be longer than the chunk.
        is_open = line_feed and re.fullmatch(r'\{\s*("[^"]*":.*[,\[{]\s*)?', first_line) is not None
        return "its first object spans several lines" if is_open else None
    if "\n" in text[:end].strip():
        return "its first object spans several lines"
    if (is_whole or line_feed) and text[end:].lstrip(" \t,").startswith("{"):
        return "several objects are on one line"
    return None


def _is_not_text(start: bytes) -> bool:
    """Whether the beginning of a file cannot be text."""
    start = start[:4096]
    if NOT_TEXT.search(start):
        return True
    try:
        start.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start < len(start) - 3  # else the last character is cut
    return False
