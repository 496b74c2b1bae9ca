"""Decompressed bytes of a file, in constant memory. The compression is detected from the content, not from the name.

A compressed file is one or more *members* (gzip's word; zstd's frames, xz's and bzip2's streams) one after another. The
libraries' own file objects ignore other data behind a member, and some of them a member that is cut off. Here both are
errors, because they mean that documents are missing.
"""

import bz2
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from ...errors import InputError, OptionError

CHUNK_BYTES = 1 << 20
COMPRESSED_BYTES = 1 << 16
"""Of compressed data, read at once. Small, because what is left of it is copied at the end of each member."""
ZSTD_FRAME, ZSTD_HEADER_BYTES = b"\x28\xb5\x2f\xfd", 10
MAGICS = {
    b"\x1f\x8b": "gzip",
    ZSTD_FRAME: "zstd",
    **{bytes([0x50 + number]) + b"\x2a\x4d\x18": "zstd" for number in range(16)},  # frames that hold no data
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
}
"""First bytes of a member, and the format's name."""


def compression_of(start: bytes) -> str | None:
    """The name of the compression whose data begins with ``start``; None if it is not compressed."""
    return next((name for magic, name in MAGICS.items() if start.startswith(magic)), None)


def zstd_dictionary(start: bytes) -> int:
    """The number of the dictionary that a zstd frame was compressed with; 0 for none.

    Args:
        start: the frame's first ``ZSTD_HEADER_BYTES``.

    RFC 8878, section 3.1.1: a descriptor follows the magic, then a byte for the window unless there is one segment,
    then the number, in 0, 1, 2 or 4 bytes.
    """
    if not start.startswith(ZSTD_FRAME) or len(start) < 5:
        return 0
    descriptor = start[4]
    begin = 5 if descriptor & 0x20 else 6
    return int.from_bytes(start[begin : begin + (0, 1, 2, 4)[descriptor & 3]], "little")


def chunks_of(file: BinaryIO, name: str, start: bytes = b"") -> Iterator[bytes]:
    """The decompressed bytes of a file, in chunks of at most ``CHUNK_BYTES``, none empty.

    Args:
        name: what messages call the file.
        start: the bytes of the file that were read already.

    Raises:
        InputError: compressed data is damaged or cut off, or other data follows it.
        OptionError: the library for a compression is not installed.
        OSError: the file cannot be read.
    """
    compression = compression_of(start)
    if compression is not None:
        yield from _Members(file, name, start, compression).chunks()
        return
    if start:
        yield start
    while chunk := file.read(CHUNK_BYTES):
        yield chunk


class _Members:
    """The members of one compressed file."""

    def __init__(self, file: BinaryIO, name: str, start: bytes, compression: str) -> None:
        self._file, self._name, self._compression = file, name, compression
        self._unread = start
        self._position = len(start)
        """Bytes of the file read so far."""

    def chunks(self) -> Iterator[bytes]:
        while self._skip_zeros():
            begin = self._position - len(self._unread)
            if compression_of(self._start(8)) != self._compression:
                self._refuse(
                    f"what follows the {self._compression} data at byte {begin} is not {self._compression} data"
                )
            if self._compression == "zstd" and (dictionary := zstd_dictionary(self._start(ZSTD_HEADER_BYTES))):
                self._refuse(
                    f"its zstd data at byte {begin} needs the dictionary {dictionary} that it was compressed with; "
                    "decompress it first (zstd -d -D DICTIONARY)"
                )
            yield from self._member(begin)

    def _member(self, begin: int) -> Iterator[bytes]:
        decompressor = DECOMPRESSORS[self._compression]()
        advice = "get a whole copy"
        if self._compression == "zstd":  # a dictionary may have no number
            advice += ", or decompress it with the dictionary it was compressed with, if it was"
        while not decompressor.eof:
            if decompressor.needs_input and not self._unread and not self._read():
                self._refuse(
                    f"its {self._compression} data ends at byte {self._position} in the middle of the member that "
                    f"begins at byte {begin}: the file is cut off; get a whole copy"
                )
            compressed, self._unread = self._unread, b""
            try:
                chunk = decompressor.decompress(compressed, CHUNK_BYTES)
            except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError, _zstd_error()) as error:
                at = f"before byte {self._position}, in the member that begins at byte {begin}"
                self._refuse(f"damaged {self._compression} data {at}: {error}; {advice}")
            if chunk:
                advice = "get a whole copy"
                yield chunk
        self._unread = decompressor.unused_data

    def _skip_zeros(self) -> bool:
        """Skip the padding that gzip and xz allow behind a member. Returns whether something else follows."""
        while True:
            self._unread = self._unread.lstrip(b"\x00")
            if self._unread:
                return True
            if not self._read():
                return False

    def _start(self, size: int) -> bytes:
        while len(self._unread) < size and self._read():
            pass
        return self._unread[:size]

    def _read(self) -> bool:
        """Read more of the file. Returns whether there was anything."""
        chunk = self._file.read(COMPRESSED_BYTES)
        self._unread += chunk
        self._position += len(chunk)
        return bool(chunk)

    def _refuse(self, what: str) -> None:
        raise InputError(f"{self._name}: {what}")


class _Gzip:
    """zlib's decompressor with the interface of the others."""

    def __init__(self) -> None:
        self._decompressor = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        self._may_hold_more = False

    def decompress(self, compressed: bytes, max_length: int) -> bytes:
        chunk = self._decompressor.decompress(self._decompressor.unconsumed_tail + compressed, max_length)
        self._may_hold_more = len(chunk) == max_length
        return chunk

    @property
    def eof(self) -> bool:
        return self._decompressor.eof

    @property
    def unused_data(self) -> bytes:
        return self._decompressor.unused_data

    @property
    def needs_input(self) -> bool:
        return not self._decompressor.unconsumed_tail and not self._may_hold_more


def _zstd() -> Any:
    """The standard library's zstd module, or before Python 3.14 its backport."""
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ImportError:
        raise OptionError(
            "zstd data needs the backports.zstd package: pip install 'megatron-bfp[preprocess]'"
        ) from None
    return zstd


def _zstd_decompressor() -> Any:
    zstd = _zstd()
    # Files packed with --long=31 need a window of 2 GiB; others take no more memory for it.
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: 31})


def _zstd_error() -> type[Exception]:
    module = sys.modules.get("compression.zstd") or sys.modules.get("backports.zstd")
    return module.ZstdError if module else zlib.error


DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    "gzip": _Gzip,
    "zstd": _zstd_decompressor,
    "bzip2": bz2.BZ2Decompressor,
    "xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ),
}
"""Name of a compression -> makes a decompressor of one member."""
