"""``--input`` to files: which are read, in which order, and which are left out.

The rule, the same for every value of ``--input``:

- A path of a file is that file, whatever its name.
- A pattern gives all files it matches, and all data files of the folders it matches; each once.
- A folder gives the data files in it and in all folders below it, linked ones too. Data files are those whose names
  match ``DATA_NAME``. Left out are other files, files that this tool writes beside its datasets, names that begin with
  ``.`` or ``_``, folders named ``*.bfp`` or ``*.shards``, and links back to a folder that holds them. They are returned
  with their number, to be printed.
- URLs of objects, of their folders (prefixes) and patterns of URLs give objects by the same rules.
- A folder that cannot be listed and a broken link are errors.
- A file that comes twice, by whatever names, is an error.
"""

import fnmatch
import glob
import os
import re
import stat
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...errors import InputError, OptionError
from .documents import STANDARD_INPUT, Location
from .file_names import (
    COMPRESSED_NAME,
    HIDDEN,
    HIDDEN_FILE,
    LOOP,
    OF_DATASETS,
    OMITTED_FOLDER,
    OWN_FOLDERS,
    LeftOut,
    others_of_datasets,
    reason_to_leave,
    reason_to_leave_below,
)
from .storage import is_remote, named_objects, opened


@dataclass(frozen=True)
class InputFiles:
    """The files that ``--input`` names."""

    paths: list[str]
    """The files, in order."""
    left_out: list[LeftOut]
    """Files in folders that are not read."""
    warnings: list[str]
    """What may be a mistake."""


HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
Identity = tuple[int, int]
"""Device and inode of a file or folder."""
Omissions = dict[str, tuple[str, int]]
"""Path of a file or folder -> why it is left out, and its number of files."""


def input_files(inputs: Sequence[str], is_text_read: bool = False) -> InputFiles:
    """The files that ``--input`` names, in the order of its values.

    Args:
        inputs: paths of files and folders, glob patterns (``**`` for folders in folders), URLs, ``-`` for standard
            input.
        is_text_read: files named as plain text are data, too.

    Returns:
        The files of a folder and of a pattern are sorted by their paths.

    Raises:
        OptionError: there is no such file, a pattern or folder gives none, or a file comes twice.
        InputError: a folder cannot be listed, or a link is broken.
    """
    paths: list[str] = []
    omissions: Omissions = {}
    for value in inputs:
        paths += _files_of(value, omissions, is_text_read)
    _refuse_twice(paths)
    left_out: dict[str, LeftOut] = {}
    for path, (reason, num_files) in omissions.items():
        if num_files:
            left_out.setdefault(reason, LeftOut(reason, path)).num_files += num_files
    return InputFiles(paths, list(left_out.values()), _warnings(paths))


def _files_of(value: str, omissions: Omissions, is_text_read: bool) -> list[str]:
    if value == STANDARD_INPUT:
        return [value]
    if is_remote(value):
        return _objects_of(value, omissions, is_text_read)
    if glob.has_magic(value) and not _is_there(value):
        return _matches(value, omissions, is_text_read)
    return _files_in(value, omissions, is_text_read) if _is_folder(value) else [value]


def _objects_of(value: str, omissions: Omissions, is_text_read: bool) -> list[str]:
    """The objects that a URL names or a pattern of URLs matches, and the data objects in the folders among them."""
    objects = named_objects(value)
    inside: dict[str, set[str]] = {}
    for url, folder in objects:
        if folder is not None:
            inside.setdefault(os.path.dirname(url), set()).add(os.path.basename(url))
    others = {above: others_of_datasets(above, names, _content) for above, names in inside.items()}
    files = []
    for url, folder in objects:
        reason = None
        if folder is not None:
            above, name = os.path.split(url)
            is_other = name in others[above]
            reason = OF_DATASETS if is_other else reason_to_leave_below(url[len(folder) + 1 :], is_text_read)
        if reason is None:
            files.append(url)
        else:
            omissions[url] = reason, 1
    if not files:
        raise _no_data(value)
    return files


def _content(path: str) -> bytes:
    try:
        with opened(path, is_read_ahead=False) as file:
            return file.read()
    except OSError as error:
        raise _unreadable(path, error) from None


def _matches(pattern: str, omissions: Omissions, is_text_read: bool) -> list[str]:
    """The files that a pattern matches, and those of the folders it matches."""
    matches = sorted(set(matching_paths(pattern)))
    if not matches:
        raise OptionError(f"--input {Location(pattern).name}: no file matches this pattern")
    folders = {path for path in matches if _is_folder(path)}
    files: list[str] = []
    omitted: Omissions = {}
    for path in matches:
        if path not in folders:
            files.append(path)
        elif folders.isdisjoint(_folders_above(path)):  # else it is read with the other
            files += _walked(path, omitted, is_text_read)
    if not files:
        raise _no_data(pattern)
    omissions |= {path: why for path, why in omitted.items() if path not in matches}  # data/** gives them itself
    return list(dict.fromkeys(files))


def _folders_above(path: str) -> Iterator[str]:
    while path != (path := os.path.dirname(path)):
        yield path


def matching_paths(pattern: str) -> Iterator[str]:
    """The paths that a glob pattern matches, as in a shell: names with a leading dot only if the pattern has one, too.

    The standard library's ``glob`` skips folders that cannot be listed, and follows links in circles.

    Raises:
        InputError: a folder cannot be listed, or a link on the way is broken.
    """
    root = os.sep if pattern.startswith(os.sep) else ""
    for path in _matching(root, [part for part in pattern.split(os.sep) if part], set()):
        if not pattern.endswith(os.sep) or _is_folder(path):
            yield path


def _matching(folder: str, parts: list[str], walked: set[tuple[Identity, int]]) -> Iterator[str]:
    """The matches in a folder of the last parts of a pattern.

    Args:
        walked: folders that ``**`` was matched in, with the number of parts left; links may lead there again.
    """
    if not parts:
        if folder:
            yield folder
        return
    part, rest = parts[0], parts[1:]
    if not glob.has_magic(part):
        path = os.path.join(folder, part)
        if _is_there(path):
            yield from _matching(path, rest, walked)
        return
    if part == "**":
        visit = _identity(folder or os.curdir), len(parts)
        if visit in walked:
            return
        walked.add(visit)
        yield from _matching(folder, rest, walked)
    for entry in _listed(folder or os.curdir):
        path = os.path.join(folder, entry.name)
        if entry.name.startswith(".") and not part.startswith("."):
            continue
        if part == "**":
            if _is_entry_a_folder(entry, path):
                yield from _matching(path, parts, walked)
            elif not rest:
                yield path
        elif fnmatch.fnmatchcase(entry.name, part) and (not rest or _is_entry_a_folder(entry, path)):
            yield from _matching(path, rest, walked)


def _files_in(folder: str, omissions: Omissions, is_text_read: bool) -> list[str]:
    """The data files in a folder and below it, sorted by their paths."""
    files = _walked(folder, omissions, is_text_read)
    if not files:
        raise _no_data(folder)
    return files


def _no_data(value: str) -> OptionError:
    return OptionError(
        f"--input {Location(value).name}: no file in this folder is named as data (.jsonl, .json, .ndjson, .parquet, "
        ".arrow, .warc, .wet, compressed or not; .txt with --text-documents); name the files or give a pattern"
    )


def _walked(folder: str, omissions: Omissions, is_text_read: bool) -> list[str]:
    files: list[str] = []
    _walk(folder, (), {}, files, omissions, is_text_read)
    return sorted(files)


def _walk(
    folder: str,
    above: tuple[Identity, ...],
    walked: dict[Identity, str],
    files: list[str],
    omissions: Omissions,
    is_text_read: bool,
) -> None:
    """Add the data files in a folder and below it.

    Args:
        above: the folders that contain it.
        walked: folders that were walked before -> by which path.

    Raises:
        OptionError: the folder was reached by another path, and holds data.
    """
    identity = _identity(folder)
    if identity in walked:  # walking all paths through many links would take forever
        _refuse_files_of(walked[identity], folder, files)
        return
    walked[identity] = folder
    above = (*above, identity)
    entries = _listed(folder)
    others = others_of_datasets(folder, {entry.name for entry in entries}, _content)
    for entry in entries:
        name, path = entry.name, os.path.join(folder, entry.name)
        if name in others:
            omissions[path] = OF_DATASETS, 1
        elif name.startswith(HIDDEN):
            omissions[path] = _omitted_folder(path) if os.path.isdir(path) else (HIDDEN_FILE, 1)
        elif not _is_entry_a_folder(entry, path):
            if (reason := reason_to_leave(name, is_text_read)) is None:
                files.append(path)
            else:
                omissions[path] = reason, 1
        elif name.endswith(OWN_FOLDERS):
            omissions[path] = _omitted_folder(path)
        elif _identity(path) in above:
            omissions[path] = LOOP, 1
        else:
            _walk(path, above, walked, files, omissions, is_text_read)


def _refuse_files_of(before: str, folder: str, files: list[str]) -> None:
    """Refuse a folder that was walked before by another path, if there are data files in it."""
    inside = sorted(path for path in files if path.startswith(before + os.sep))
    if inside:
        raise _comes_twice(folder + inside[0].removeprefix(before), inside[0])


def _omitted_folder(path: str) -> tuple[str, int]:
    return OMITTED_FOLDER, sum(len(names) for _, _, names in os.walk(path))


def _listed(folder: str) -> list[os.DirEntry[str]]:
    """What is in a folder, sorted by name."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise InputError(f"--input: the folder {Location(folder).name} cannot be listed: {error.strerror}") from None


def _is_entry_a_folder(entry: os.DirEntry[str], path: str) -> bool:
    """As ``_is_folder``, without asking the disk again if the listing says it."""
    try:
        return _is_folder(path) if entry.is_symlink() else entry.is_dir(follow_symlinks=False)
    except OSError as error:
        raise _unreadable(path, error) from None


def _is_folder(path: str) -> bool:
    """Whether a path is a folder or a link to one.

    Raises:
        OptionError: there is no such file.
        InputError: it is a broken link, or it cannot be read.
    """
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        name = f"--input {Location(path).name}"
        if not os.path.islink(path):
            raise OptionError(f"{name}: no such file{_hub_hint(path)}") from None
        target = Location(os.readlink(path)).name
        raise InputError(f"{name}: is a link to {target}, which does not exist; repair the link or remove it") from None
    except OSError as error:
        raise _unreadable(path, error) from None


def _hub_hint(path: str) -> str:
    """What to give if a dataset of the Hugging Face Hub was meant."""
    is_name = HUB_NAME.fullmatch(path) and not os.path.splitext(path)[1]
    return f"; a dataset of the Hugging Face Hub is hf://datasets/{path}" if is_name else ""


def _is_there(path: str) -> bool:
    """Whether the name exists, even as a broken link."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise _unreadable(path, error) from None
    return True


def _unreadable(path: str, error: OSError) -> InputError:
    return InputError(f"--input {Location(path).name}: cannot be read: {error.strerror}")


def _identity(path: str) -> Identity:
    """Device and inode of a file; an inode of 0 if that is not known."""
    try:
        status = os.stat(path) if path != STANDARD_INPUT else os.fstat(sys.stdin.fileno())
    except (AttributeError, ValueError):  # a standard input that is closed, or not a file of the system
        return 0, 0
    except OSError as error:
        raise _unreadable(path, error) from None
    return status.st_dev, status.st_ino


def _refuse_twice(paths: Sequence[str]) -> None:
    """Refuse a file that comes twice, by the same name or another.

    Raises:
        OptionError: one does.
        InputError: one cannot be read.
    """
    if paths.count(STANDARD_INPUT) > 1:
        raise OptionError("--input: standard input (-) can be read once only")
    names: dict[Identity | str, str] = {}
    for path in paths:
        identity = (0, 0) if is_remote(path) else _identity(path)
        # Some network file systems have no inode numbers.
        key = path if is_remote(path) else identity if identity[1] else os.path.realpath(path)
        if key in names:
            raise _comes_twice(path, names[key])
        names[key] = path


def _comes_twice(path: str, before: str) -> OptionError:
    same = "is given twice" if before == path else f"is the same file as {Location(before).name}"
    return OptionError(f"--input {Location(path).name}: {same}; give it once, or its documents come twice")


def _warnings(paths: Sequence[str]) -> list[str]:
    """Warns of files whose names differ only in their compression."""
    names: dict[str, str] = {}
    pairs = []
    for path in paths:
        name = COMPRESSED_NAME.sub("", path if is_remote(path) else os.path.abspath(path))
        if name in names:
            pairs.append((names[name], path))
        names[name] = path
    if not pairs:
        return []
    (first, second), more = pairs[0], len(pairs) - 1
    others = f" (and {more} more such pair{'' if more == 1 else 's'})" if more else ""
    return [
        f"{Location(first).name} and {Location(second).name} are both read{others}; if one is a copy of the other, its "
        "documents come twice"
    ]
