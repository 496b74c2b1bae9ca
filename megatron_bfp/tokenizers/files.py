"""Reading a tokenizer's file, and what to say if it is missing or of another type than was named."""

import json
import os
import re
import shlex

from ..errors import OptionError

FORMS = {
    "HuggingFaceTokenizer": "a Hugging Face tokenizer",
    "SentencePieceTokenizer": "a SentencePiece model",
    "TikTokenizer": "a tiktoken vocabulary",
}
"""Tokenizer type -> what its file is."""
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
FILE_ENDINGS = (".json", ".model", ".tiktoken", ".txt")
"""A name with one of these is a file's, not one on the Hugging Face Hub."""
SENTENCEPIECE_START = re.compile(rb"\x0a[\x00-\x7f]\x0a", re.DOTALL)
"""Of a serialised ``ModelProto``: a short field 1, the first piece, which begins with its field 1, the text."""
TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")


def read_tokenizer_file(path: str, option: str = "--tokenizer-model") -> bytes:
    """The content of a tokenizer's file.

    Args:
        option: what names it.

    Raises:
        OptionError: it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        hint = hub_hint(path) if is_hub_name(path) else ""
        raise OptionError(f"{option} {path}: No such file or folder{hint}") from None
    except IsADirectoryError:
        raise OptionError(f"{option} {path}: is a folder; give the tokenizer's file{_in(path)}") from None
    except OSError as error:
        raise OptionError(f"{option} {path}: {error.strerror}") from None


def file_in_folder(folder: str) -> str:
    """The path of a folder's ``tokenizer.json``.

    Raises:
        OptionError: it holds none.
    """
    path = os.path.join(folder, "tokenizer.json")
    if not os.path.exists(path):
        raise OptionError(f"--tokenizer-model {folder}: the folder holds no tokenizer.json{_advice(folder)}")
    return path


def not_of_type(path: str, content: bytes, tokenizer_type: str, error: object) -> OptionError:
    """What to raise if a file is not of the form that a tokenizer type reads.

    Args:
        error: what the type's library says.
    """
    other = type_of(content)
    if other is None or other == tokenizer_type:
        hint = f": {error}"
    else:
        hint = f"; it is {FORMS[other]}: give --tokenizer-type {other}"
    return OptionError(f"--tokenizer-model {path}: not {FORMS[tokenizer_type]}{hint}")


def type_of(content: bytes) -> str | None:
    """The tokenizer type that reads a file, detected from its content; None if it is unknown."""
    if SENTENCEPIECE_START.match(content):
        return "SentencePieceTokenizer"
    if TIKTOKEN_LINE.match(content):
        return "TikTokenizer"
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if isinstance(parsed, list) and parsed and isinstance(parsed[0], dict) and "token_bytes" in parsed[0]:
        return "TikTokenizer"
    if isinstance(parsed, dict) and isinstance(parsed.get("model"), dict) and "vocab" in parsed["model"]:
        return "HuggingFaceTokenizer"
    return None


def is_hub_name(path: str) -> bool:
    """Whether a path is no file or folder, and has the form of a name on the Hugging Face Hub."""
    return not os.path.lexists(path) and HUB_NAME.fullmatch(path) is not None and not path.endswith(FILE_ENDINGS)


def hub_hint(name: str) -> str:
    """What to do if a name on the Hub is not looked up, or cannot be."""
    return (
        ". If it is a name of the Hugging Face Hub, download it and give its tokenizer: "
        f"hf download {name} --include 'tokenizer*' --local-dir {os.path.basename(name)}"
    )


def _in(folder: str) -> str:
    names = sorted(name for name in os.listdir(folder) if name.endswith((".model", ".tiktoken")))
    return f", {os.path.join(folder, names[0])}" if names else ""


def _advice(folder: str) -> str:
    """How to get a ``tokenizer.json`` from what the folder has instead."""
    names = set(os.listdir(folder))
    models = sorted(name for name in names if name.endswith(".model"))
    if models:
        return f"; --tokenizer-type SentencePieceTokenizer reads its {os.path.join(folder, models[0])}"
    if {"vocab.json", "merges.txt"} <= names:
        vocabulary, merges = (os.path.join(folder, name) for name in ("vocab.json", "merges.txt"))
        files = f"--vocab-file {shlex.quote(vocabulary)} --merge-file {shlex.quote(merges)}"
        return f"; --tokenizer-type GPT2BPETokenizer {files} reads its vocab.json and merges.txt, if they are GPT-2's"
    return ""
