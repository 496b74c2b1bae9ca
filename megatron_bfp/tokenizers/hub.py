"""Tokenizers of the Hugging Face Hub: their files are downloaded once, to the Hub library's own cache."""

from ..console import tell
from ..errors import OptionError
from .files import hub_hint
from .interface import first_line

FILES = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]
"""Of a repository, the ones that are downloaded."""


def downloaded(name: str) -> str:
    """The folder with a repository's tokenizer, downloaded if it is not in the cache.

    Raises:
        OptionError: the Hub's library is not installed, or the tokenizer is neither in the cache nor can be downloaded.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise OptionError(f"--tokenizer-model {name}: No such file or folder{hub_hint(name)}") from None
    try:
        folder = snapshot_download(name, allow_patterns=FILES)
    except Exception as error:  # of the network, of the Hub, of the name
        raise OptionError(
            f"--tokenizer-model {name}: No such file or folder, and not available on the Hugging Face Hub: "
            f"{first_line(error).rstrip('.')}{hub_hint(name)}"
        ) from None
    tell(f"tokenizer {name} of the Hugging Face Hub: {folder}")
    return folder
