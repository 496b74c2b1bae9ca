"""Tokenizers of the Hugging Face Hub: their files are downloaded once, to the Hub library's own cache."""

import os
import re

from ..console import tell
from ..errors import OptionError
from .interface import first_line

NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
FILE_ENDINGS = (".json", ".model", ".tiktoken", ".txt")
"""A name with one of these is a file's."""
FILES = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]
"""Of a repository, the ones that are downloaded."""


def is_hub_name(path: str) -> bool:
    """Whether a path is no file or folder, and has the form of a name on the Hub."""
    return not os.path.lexists(path) and NAME.fullmatch(path) is not None and not path.endswith(FILE_ENDINGS)


def downloaded(name: str) -> str:
    """The folder with a repository's tokenizer, downloaded if it is not in the cache.

    Raises:
        OptionError: the Hub's library is not installed, or the tokenizer is neither in the cache nor can be downloaded.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise OptionError(f"--tokenizer-model {name}: No such file or folder") from None
    try:
        folder = snapshot_download(name, allow_patterns=FILES)
    except Exception as error:  # of the network, of the Hub, of the name
        raise OptionError(
            f"--tokenizer-model {name}: No such file or folder, and not available on the Hugging Face Hub: "
            f"{first_line(error)} If you have it elsewhere, copy its folder: hf download {name} --include 'tokenizer*' "
            f"--local-dir {os.path.basename(name)}"
        ) from None
    tell(f"tokenizer {name} of the Hugging Face Hub: {folder}")
    return folder
