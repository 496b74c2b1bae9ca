"""Which names are data in a folder or below an object store's prefix, and why others are left out.

A folder of Hugging Face's ``Dataset.save_to_disk`` says itself which of its files hold the rows, in ``state.json``;
others are its caches and descriptions.
"""

import json
import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from ...errors import InputError
from .documents import Location

READABLE = "gz|zst|zstd|bz2|xz"
UNREADABLE = "lz4|lzma|br|sz|snappy|z|lz|lzo|zip|7z|rar"
"""Compressions that are refused with advice. Files of other names are only left out."""
DATA_NAME = re.compile(rf"\.(jsonl|json|ndjson|parquet|arrow|warc|wet)(\.({READABLE}|{UNREADABLE}))?$", re.IGNORECASE)
JSON_NAME = re.compile(rf"\.(jsonl|json|ndjson)(\.({READABLE}))?$", re.IGNORECASE)
TEXT_NAME = re.compile(rf"\.(txt|text)(\.({READABLE}|{UNREADABLE}))?$", re.IGNORECASE)
COMPRESSED_NAME = re.compile(rf"\.({READABLE})$", re.IGNORECASE)
BAD_DOCUMENTS_SUFFIX = ".bad.jsonl"
SUMMARY_SUFFIX = ".summary.json"
CARD_SUFFIX = ".card"
"""Endings of files that are written beside the datasets and are never input."""
OWN_FOLDERS = (".bfp", ".shards")
HIDDEN = (".", "_")
STATE, INFO, DICTIONARY_OF_DATASETS, ARROW_ENDING = "state.json", "dataset_info.json", "dataset_dict.json", ".arrow"
"""Files of a folder of Hugging Face datasets."""

NO_DATA_NAME = "not named as data"
HIDDEN_FILE = "names that begin with . or _"
OWN_SUFFIXES = (BAD_DOCUMENTS_SUFFIX, SUMMARY_SUFFIX, f"{CARD_SUFFIX}.json")
OWN_FILE = f"written by this tool: {', '.join(f'*{suffix}' for suffix in OWN_SUFFIXES)}"
OMITTED_FOLDER = "in folders named .*, _*, *.bfp or *.shards"
LOOP = "links back to a folder that holds them"
OF_DATASETS = "of a folder of Hugging Face datasets, and no rows of it"


@dataclass
class LeftOut:
    """The files that are left out for one reason."""

    reason: str
    first: str
    """Path of a file or folder."""
    num_files: int = 0

    def __str__(self) -> str:
        files = "link" if self.reason == LOOP else "other file"
        number = f"{self.num_files} {files}{'' if self.num_files == 1 else 's'}"
        more = "" if self.num_files == 1 else " ..."
        return f"{number} in the folders given not read ({self.reason}): {Location(self.first).name}{more}"


def has_json_name(path: str) -> bool:
    """Whether a file is named as JSON Lines, compressed or not."""
    return JSON_NAME.search(path) is not None


def reason_to_leave(name: str, is_text_read: bool) -> str | None:
    """Why a file of this name is not read in a folder; None if it is.

    Args:
        is_text_read: plain text is data, too.
    """
    if name.startswith(HIDDEN):
        return HIDDEN_FILE
    if name.endswith(OWN_SUFFIXES):
        return OWN_FILE
    is_data = DATA_NAME.search(name) or (is_text_read and TEXT_NAME.search(name))
    return None if is_data else NO_DATA_NAME


def reason_to_leave_below(path: str, is_text_read: bool) -> str | None:
    """As ``reason_to_leave``, for a path with slashes, counted from the folder that was given."""
    *folders, name = path.split("/")
    if any(folder.startswith(HIDDEN) or folder.endswith(OWN_FOLDERS) for folder in folders):
        return OMITTED_FOLDER
    return reason_to_leave(name, is_text_read)


def others_of_datasets(folder: str, names: Collection[str], read: Callable[[str], bytes]) -> set[str]:
    """The names in a folder of ``datasets`` that hold none of its rows; empty for any other folder.

    Args:
        folder: its path, or its URL.
        names: of all files in it.
        read: path of a file -> its content.

    Raises:
        InputError: a file with rows is missing, or the list of these files cannot be read.
    """
    if DICTIONARY_OF_DATASETS in names:
        return {DICTIONARY_OF_DATASETS}
    if STATE not in names or not any(name.endswith(ARROW_ENDING) for name in names):
        return set()
    path = f"{folder}/{STATE}" if "://" in folder else os.path.join(folder, STATE)
    try:
        rows = {entry["filename"] for entry in json.loads(read(path))["_data_files"]}
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{Location(path).name}: is not the list of files of a datasets folder: {error!r}") from None
    for name in sorted(rows - set(names)):
        raise InputError(f"{Location(path).name}: names {name}, which is not in its folder; get a whole copy")
    return {name for name in names if name in (STATE, INFO) or (name.endswith(ARROW_ENDING) and name not in rows)}
