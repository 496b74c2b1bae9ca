"""Tokenizers by Megatron's names for them. Each treats text as text: see ``interface``."""

import os
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import OptionError
from .gpt2 import GPT2BPETokenizer
from .huggingface import HuggingFaceTokenizer
from .interface import Tokenizer
from .sentencepiece import SentencePieceTokenizer
from .special_tokens import DocumentTemplate, document_template
from .tiktoken import TikTokenizer, TiktokenOptions

TOKENIZER_TYPES: dict[str, Callable[..., Tokenizer]] = {
    "HuggingFaceTokenizer": HuggingFaceTokenizer,
    "SentencePieceTokenizer": SentencePieceTokenizer,
    "TikTokenizer": TikTokenizer,
    "GPT2BPETokenizer": GPT2BPETokenizer,
}
OTHER_NAMES = {
    "Llama2Tokenizer": "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer": "SentencePieceTokenizer",
    "HFTokenizer": "HuggingFaceTokenizer",
}
"""Megatron's other names -> the type whose ids are the same."""
REFUSED = {
    "Llama3Tokenizer": "give HuggingFaceTokenizer with its tokenizer.json, or TikTokenizer with its tokenizer.model, "
    "--tiktoken-pattern cl100k_base and --tiktoken-special-tokens",
    **dict.fromkeys(
        ("BertWordPieceLowerCase", "BertWordPieceCase"),
        "it is for encoders; give HuggingFaceTokenizer with its tokenizer.json",
    ),
    **dict.fromkeys(("NullTokenizer", "NullMultimodalTokenizer"), "it reads numbers, not texts"),
    **dict.fromkeys(
        ("MultimodalTokenizer", "SFTTokenizer"), "it makes conversations of documents; give the tokenizer it is made of"
    ),
}
"""Megatron's types that are refused -> why, and what to do."""


def load_tokenizer(
    tokenizer_type: str,
    path: str,
    eod_token: str | None = None,
    needs_eod: bool = True,
    tiktoken: TiktokenOptions = TiktokenOptions(),
    bos_token: str | None = None,
    merge_file: str | None = None,
) -> Tokenizer:
    """The tokenizer that Megatron's ``--tokenizer-type`` and ``--tokenizer-model`` name.

    Args:
        path: ``--tokenizer-model``, or ``--vocab-file`` of a GPT2BPETokenizer.
        merge_file: ``--merge-file`` of a GPT2BPETokenizer. Without it, ``path`` is a folder that holds both.

    Raises:
        OptionError: there is no such type; or as the type's class.
    """
    tokenizer_type = same_type(tokenizer_type)
    if tokenizer_type == "GPT2BPETokenizer":
        if merge_file is None:
            path, merge_file = os.path.join(path, "vocab.json"), os.path.join(path, "merges.txt")
        return GPT2BPETokenizer(path, merge_file, eod_token, needs_eod, bos_token=bos_token)
    if tokenizer_type == "TikTokenizer":
        return TikTokenizer(path, eod_token, needs_eod, tiktoken, bos_token)
    return TOKENIZER_TYPES[tokenizer_type](path, eod_token, needs_eod, bos_token=bos_token)


def same_type(tokenizer_type: str) -> str:
    """The type in ``TOKENIZER_TYPES`` that gives the ids of a type by Megatron's name.

    Raises:
        OptionError: there is none.
    """
    known = OTHER_NAMES.get(tokenizer_type, tokenizer_type)
    if known in REFUSED:
        raise OptionError(f"--tokenizer-type {known}: {REFUSED[known]}")
    if known not in TOKENIZER_TYPES:
        raise OptionError(f"--tokenizer-type {known}: choose one of {', '.join(TOKENIZER_TYPES)}")
    return known


@dataclass(frozen=True)
class TokenizerOptions:
    """What a process needs to load the tokenizer, and what is done with it."""

    tokenizer_type: str
    path: str
    eod_token: str | None
    append_eod: bool
    tiktoken: TiktokenOptions = TiktokenOptions()
    bos_token: str | None = None
    append_bos: bool | None = None
    """None for what Megatron's own tool does with this tokenizer."""
    merge_file: str | None = None
    """Of a GPT2BPETokenizer, whose ``path`` is its vocabulary's."""

    def load(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            OptionError: it cannot be loaded, or has no EOD to append.
        """
        return load_tokenizer(
            self.tokenizer_type,
            self.path,
            self.eod_token,
            self.append_eod,
            self.tiktoken,
            self.bos_token,
            self.merge_file,
        )

    def template(self, tokenizer: Tokenizer) -> DocumentTemplate:
        """The special tokens around each document.

        Args:
            tokenizer: as ``load`` returns it.

        Raises:
            OptionError: it has no BOS to append.
        """
        return document_template(tokenizer, self.append_bos, self.append_eod)

    def warnings(self, tokenizer: Tokenizer) -> list[str]:
        """What people should know before they tokenize with it.

        Args:
            tokenizer: as ``load`` returns it.
        """
        template, warnings = self.template(tokenizer), [tokenizer.warning] if tokenizer.warning else []
        if self.eod_token is not None and not template.ends_in(tokenizer.eod):
            warnings.append(f"--eod-token {self.eod_token}: no document ends in it, because --append-eod is not given")
        if self.bos_token is not None and tokenizer.bos not in template.before:
            warnings.append(
                f"--bos-token {self.bos_token}: no document begins with it, because --append-bos is not given"
            )
        return warnings
