"""Where input files are: on a file system, or objects in a store that fsspec reads: s3://, gs://, abfs://, hf://.

Objects are streamed in blocks of ``BLOCK_BYTES``, the next one while the last is used; nothing is kept on disk. Each
read gives all bytes it asks for, or raises: a body that ends early, and an object that is shorter than the store says,
are errors that name it, never the end of a file. Errors that pass are tried again by the store's library. Credentials,
regions and endpoints are its own: of its environment variables and configuration files.
"""

import glob
import io
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, NamedTuple, TypeVar

from ...errors import BFPError, InputError, OptionError
from .documents import STANDARD_INPUT, Location

STORES = {
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("abfs", "abfss", "az"), "adlfs"),
    "hf": "huggingface_hub",
}
"""Scheme of a URL -> the package that reads it."""
URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<authority>[^/]*)")
BLOCK_BYTES = 1 << 23
BLOCKS = 3
"""Of an object, kept in memory."""
BUFFER_BYTES = 1 << 20
SHORT_BUFFER_BYTES = 1 << 16
"""Of an object whose format is detected."""
REQUESTS = 16
"""At once, for the sizes of objects."""
VERSIONS = ("ETag", "etag", "generation", "blob_id", "LastModified", "last_modified", "mtime", "updated")
"""What a store calls the version of an object's content, the surest first."""


Value = TypeVar("Value")


class FileStatus(NamedTuple):
    """What tells a file from another one of its name."""

    size: int
    """Bytes; 0 for a stream."""
    version: int | str
    """A file's modification time in nanoseconds; an object's ETag, or what the store has instead."""


def is_remote(path: str) -> bool:
    """Whether an input is an object in a store."""
    return URL.match(path) is not None


def is_stream(path: str) -> bool:
    """Whether an input can be read only once: standard input, a pipe."""
    return path == STANDARD_INPUT or not (is_remote(path) or stat.S_ISREG(os.stat(path).st_mode))


_known: dict[str, FileStatus] = {}
"""The status of each object, as ``statuses`` last saw it."""


def statuses(paths: Sequence[str]) -> list[FileStatus]:
    """Size and version of each input, as it is now. Costs a request for each object, ``REQUESTS`` of them at once.

    Raises:
        InputError: an input cannot be read.
        OptionError: the package for a store is not installed.
    """
    _known.update(of_objects(_object_status, paths))
    return [_known[path] if is_remote(path) else _file_status(path) for path in paths]


def of_objects(function: Callable[[str], Value], paths: Sequence[str]) -> dict[str, Value]:
    """What a function of a URL gives for each object among the inputs, called in ``REQUESTS`` threads."""
    remote = [path for path in paths if is_remote(path)]
    if not remote:
        return {}
    _file_system(remote[0])  # imported by one thread
    with ThreadPoolExecutor(REQUESTS) as threads:  # which end before any process is forked
        return dict(zip(remote, threads.map(function, remote), strict=True))


def size_of(path: str) -> int:
    """Bytes of an input; of an object, as it was when ``statuses`` saw it.

    Raises:
        As ``statuses``; OSError: a file cannot be read.
    """
    if is_remote(path):
        return (_known.get(path) or statuses([path])[0]).size
    return 0 if is_stream(path) else os.path.getsize(path)


def exists(path: str) -> bool:
    """Whether there is such a file or object.

    Raises:
        InputError: the store cannot be asked.
    """
    if not is_remote(path):
        return os.path.exists(path)
    store, key = _file_system(path)
    with _as_ours(path):
        return store.exists(key)


def opened(path: str, is_read_ahead: bool = True) -> BinaryIO:
    """An input, open for reading.

    Args:
        is_read_ahead: of an object, get the blocks that follow before they are asked for. Without it, only what is
            asked for.

    Raises:
        InputError: it is standard input, which is closed, or an object that cannot be read.
        OptionError: the package for the store is not installed.
        OSError: a file cannot be opened.
    """
    if is_remote(path):
        size = BUFFER_BYTES if is_read_ahead else SHORT_BUFFER_BYTES
        return io.BufferedReader(_Object(path, is_read_ahead), size)
    if path != STANDARD_INPUT:
        return open(path, "rb")
    if sys.stdin is None:
        raise InputError("standard input: is closed")
    return open(sys.stdin.fileno(), "rb", closefd=False)


class NamedObject(NamedTuple):
    """An object that a value of ``--input`` names."""

    url: str
    folder: str | None
    """The URL of the folder that was named or matched, if it is inside one."""


def named_objects(value: str) -> list[NamedObject]:
    """The objects that a URL, or a pattern of URLs, names; those of folders and patterns sorted.

    Raises:
        OptionError: there is no such object, or the package for the store is not installed.
        InputError: the store cannot be asked.
    """
    store, key = _file_system(value)
    with _as_ours(value, "cannot be listed"):
        matches = {}
        with suppress(FileNotFoundError):
            matches = {key: store.info(key)}
        if not matches and glob.has_magic(key):
            matches = store.glob(key, detail=True)
        if not matches:
            what = "no object matches this pattern" if glob.has_magic(key) else "no such object or folder"
            raise OptionError(f"--input {Location(value).name}: {what}")
        objects: dict[str, str | None] = {}
        for name in sorted(matches):
            if matches[name]["type"] != "directory":
                objects[name] = None
                continue
            folder = name.rstrip("/")
            for inside in store.find(folder):
                objects.setdefault(inside, _url(value, folder))
    named = [NamedObject(_url(value, name), folder) for name, folder in objects.items()]
    return named if len(named) == 1 else sorted(named)


def _url(like: str, name: str) -> str:
    """The URL of an object, in the words of a URL of the same bucket: an account's name may be part of it.

    Args:
        name: as fsspec names the object: bucket and key.
    """
    start = URL.match(like)
    return f"{start[0] if start else ''}/{name.lstrip('/').partition('/')[2]}".rstrip("/")


def _file_system(url: str) -> tuple[Any, str]:
    """The store of an object, and the name that fsspec has for the object.

    fsspec keeps a store's connections for later calls, in each process its own.
    """
    match = URL.match(url)
    scheme = match["scheme"] if match else ""
    if scheme not in STORES:
        raise OptionError(
            f"--input {Location(url).name}: read are s3://, gs://, abfs:// and hf://; download other things first"
        )
    try:
        from fsspec.core import url_to_fs

        with _as_ours(url):
            return url_to_fs(url, use_listings_cache=False)
    except ImportError:
        raise OptionError(
            f"--input {Location(url).name}: needs the packages fsspec and {STORES[scheme]}: pip install "
            "'megatron-bfp[remote]'"
        ) from None


@contextmanager
def _as_ours(url: str, what: str = "cannot be read") -> Iterator[None]:
    """Let errors of a store's library name the object."""
    try:
        yield
    except (BFPError, ImportError):
        raise
    except FileNotFoundError:
        raise InputError(f"{Location(url).name}: {what}: there is no such object") from None
    except Exception as error:  # each library has its own
        reason = (str(error).strip() or type(error).__name__).split("\n")[0]
        raise InputError(f"{Location(url).name}: {what}: {reason}") from None


def _file_status(path: str) -> FileStatus:
    try:
        if is_stream(path):
            return FileStatus(0, 0)
        status = os.stat(path)
    except OSError as error:
        raise InputError(f"{Location(path).name}: cannot be read: {error.strerror}") from None
    return FileStatus(status.st_size, status.st_mtime_ns)


def _object_status(url: str) -> FileStatus:
    store, key = _file_system(url)
    with _as_ours(url):
        store.invalidate_cache()
        status = store.info(key)
    version = next((status[name] for name in VERSIONS if status.get(name)), "")
    return FileStatus(int(status["size"]), str(version).strip('"'))


class _Object(io.RawIOBase):
    """An object, read in ranges."""

    def __init__(self, url: str, is_read_ahead: bool) -> None:
        self._url, self._position = url, 0
        store, key = _file_system(url)
        cache = {"cache_type": "background", "cache_options": {"maxblocks": BLOCKS}}
        with _as_ours(url):
            self._file = store.open(
                key, "rb", block_size=BLOCK_BYTES, **cache if is_read_ahead else {"cache_type": "none"}
            )
        self._size = int(self._file.size)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), self._size - self._position)
        if wanted <= 0:
            return 0
        with _as_ours(self._url):
            self._file.seek(self._position)
            content = self._file.read(wanted)
        if len(content) != wanted:
            raise InputError(
                f"{Location(self._url).name}: is cut off: it ends at byte {self._position + len(content):,} of the "
                f"{self._size:,} that the store says it has; give the same command again, or put a whole copy there"
            )
        buffer[:wanted] = content
        self._position += wanted
        return wanted

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
