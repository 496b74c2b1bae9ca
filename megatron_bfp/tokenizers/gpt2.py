"""GPT-2's two files, a vocabulary and merges, as a Hugging Face tokenizer: Megatron's ``GPT2BPETokenizer``."""

import json
from typing import Any

from ..errors import OptionError
from .files import read_tokenizer_file
from .huggingface import HuggingFaceTokenizer

END_OF_TEXT = "<|endoftext|>"


class GPT2BPETokenizer(HuggingFaceTokenizer):
    """A ``vocab.json`` and a ``merges.txt``, as GPT-2 has them.

    Args:
        vocab_file: path of the JSON object of tokens and their ids.
        merge_file: path of the pairs to merge, one on each line.
        eod_token, needs_eod, bos_token: as for ``HuggingFaceTokenizer``; without them, the EOD is ``END_OF_TEXT``.

    Raises:
        OptionError: a file cannot be read or is of another form, or there is no EOD.
    """

    def __init__(
        self,
        vocab_file: str,
        merge_file: str,
        eod_token: str | None = None,
        needs_eod: bool = True,
        *,
        bos_token: str | None = None,
    ) -> None:
        self._merge_file = merge_file
        super().__init__(vocab_file, eod_token or END_OF_TEXT, needs_eod, bos_token=bos_token)

    def _read(self, path: str) -> bytes:
        """The ``tokenizer.json`` that the two files make."""
        self.path = path
        vocabulary = _vocabulary(path)
        self._content = json.dumps(_description(vocabulary, _merges(self._merge_file))).encode()
        return self._content


def _vocabulary(path: str) -> dict[str, int]:
    content = read_tokenizer_file(path, "--vocab-file")
    try:
        vocabulary = json.loads(content)
    except ValueError as error:
        raise OptionError(f"--vocab-file {path}: is not JSON: {error}") from None
    if not isinstance(vocabulary, dict) or not all(isinstance(number, int) for number in vocabulary.values()):
        raise OptionError(f"--vocab-file {path}: is not a JSON object of tokens and their ids")
    return vocabulary


def _merges(path: str) -> list[list[str]]:
    content = read_tokenizer_file(path, "--merge-file")
    try:
        lines = content.decode("utf-8").split("\n")
    except UnicodeDecodeError:
        raise OptionError(f"--merge-file {path}: is not UTF-8") from None
    if lines[0].startswith("#version"):
        lines = lines[1:]
    merges = [line.split(" ") for line in (line.rstrip("\r") for line in lines) if line]
    for pair in merges:
        if len(pair) != 2:
            raise OptionError(f"--merge-file {path}: {' '.join(pair)!r} is not a pair of tokens")
    return merges


def _description(vocabulary: dict[str, int], merges: list[list[str]]) -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    added: list[dict[str, Any]] = []
    if END_OF_TEXT in vocabulary:
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        added = [{"id": vocabulary[END_OF_TEXT], "content": END_OF_TEXT, **flags, "special": True}]
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": "",
        "end_of_word_suffix": "",
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": vocabulary,
        "merges": merges,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
    }
