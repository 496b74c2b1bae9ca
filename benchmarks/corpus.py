"""The corpus of the preprocessing benchmark: JSON Lines of the text files under some folders, and its tokenizer."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from megatron_bfp.errors import InputError, OptionError
from megatron_bfp.progress import terminal_progress

TEXT_SUFFIXES = tuple(".py .pyi .h .hpp .c .cpp .cu .cuh .txt .md .rst .js .json .html".split())
CORPUS_FILE_BYTES = 1 << 20
"""Larger files are left out of a corpus: they are data, and a few of them would fill it."""


class Corpus(NamedTuple):
    """A JSON Lines file with a "text" in each line."""

    path: str
    documents: int
    text_bytes: int


def make_corpus(path: str, folders: Sequence[str], text_bytes: int, special_texts: Sequence[str]) -> None:
    """Write text files as JSON Lines, until there are ``text_bytes`` of text.

    Files are ordered by a hash of their paths, so the first part of the corpus is a sample of it. Files that are not
    UTF-8, contain the text of a special token, or repeat an earlier one are left out.

    Args:
        folders: all text files in and under them are used.

    Raises:
        InputError: there is not enough text.
        OptionError: the file exists.
    """
    if os.path.exists(path):
        raise OptionError(f"--input {path}: exists; leave out --make-corpus to use it, or remove it")
    forbidden = re.compile("|".join(map(re.escape, special_texts)) or r"(?!)")
    seen, written = set(), 0
    partial = path + ".part"
    with open(partial, "w", encoding="utf-8") as file:
        for text in _texts(terminal_progress(_text_files(folders), None, "reading files")):
            content = text.encode()
            digest = hashlib.blake2b(content).digest()
            if not text.strip() or digest in seen or forbidden.search(text):
                continue
            seen.add(digest)
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            written += len(content)
            if written >= text_bytes:
                break
    if written < text_bytes:
        os.remove(partial)
        raise InputError(f"--make-corpus: {written / 1e6:.1f} MB of text are there; give more folders, or --megabytes")
    os.replace(partial, path)


def _text_files(folders: Sequence[str]) -> list[str]:
    paths = [
        (hashlib.blake2b(os.path.relpath(os.path.join(parent, name), folder).encode()).digest(), parent, name)
        for folder in folders
        for parent, _, names in os.walk(folder)
        for name in names
        if name.endswith(TEXT_SUFFIXES)
    ]
    return [os.path.join(parent, name) for _, parent, name in sorted(paths)]


def _texts(paths: Iterable[str]) -> Iterator[str]:
    for path in paths:
        try:
            if os.path.getsize(path) <= CORPUS_FILE_BYTES:
                with open(path, encoding="utf-8", newline="") as file:
                    yield file.read()
        except (OSError, UnicodeDecodeError):
            continue


def first_documents(inputs: Sequence[str], path: str, text_bytes: float = float("inf")) -> Corpus:
    """Copy lines of JSON Lines files into one file, until there are ``text_bytes`` of text.

    Raises:
        InputError: a file is missing, a line is not a JSON object with a "text", or there are no lines.
    """
    documents = copied = 0
    with open(path, "wb") as target:
        for name, number, line in terminal_progress(lines_of(inputs), None, "copying documents"):
            target.write(line if line.endswith(b"\n") else line + b"\n")
            documents, copied = documents + 1, copied + len(text_of(name, number, line).encode())
            if copied >= text_bytes:
                break
    if not documents:
        raise InputError(f"--input {inputs[0]}: no documents; see --make-corpus")
    return Corpus(path, documents, copied)


def lines_of(inputs: Sequence[str]) -> Iterator[tuple[str, int, bytes]]:
    """File, line number and line of all lines of some files.

    Raises:
        InputError: a file cannot be read.
    """
    for name in inputs:
        try:
            with open(name, "rb") as file:
                for number, line in enumerate(file, 1):
                    yield name, number, line
        except OSError as error:
            raise InputError(f"--input {name}: cannot be read: {error.strerror}") from None


def text_of(name: str, number: int, line: bytes) -> str:
    """The "text" of a line.

    Raises:
        InputError: the line is not a JSON object with a "text".
    """
    try:
        return json.loads(line)["text"]
    except (ValueError, KeyError, TypeError):
        raise InputError(f'--input {name}: line {number} is not a JSON object with a "text"') from None


def copy_tokenizer(folder: str, target: str) -> list[str]:
    """Copy a Hugging Face tokenizer's folder without its post-processor, which in some puts a token before each text.

    Returns:
        The texts of its special tokens.

    Raises:
        OptionError: the folder has no tokenizer.json.
    """
    try:
        with open(os.path.join(folder, "tokenizer.json"), encoding="utf-8") as file:
            description = json.load(file)
    except (OSError, ValueError) as error:
        raise OptionError(f"--tokenizer-model {folder}: give the folder of a tokenizer.json: {error}") from None
    os.mkdir(target)
    with open(os.path.join(target, "tokenizer.json"), "w", encoding="utf-8") as file:
        json.dump(description | {"post_processor": None}, file, ensure_ascii=False)
    config = os.path.join(folder, "tokenizer_config.json")
    if os.path.exists(config):
        shutil.copy(config, target)
    return [token["content"] for token in description.get("added_tokens", ())]
