"""The special tokens around each document: those that Megatron's own tool writes, unless options say otherwise.

Megatron's tool calls a tokenizer's library with its defaults and appends the EOD with ``--append-eod``. So a Hugging
Face tokenizer writes a BOS if its post-processor adds one; SentencePiece and tiktoken add nothing unless asked, and
write none. One thing differs: a document never ends with two EODs. If the post-processor adds the EOD itself, it is
written once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import OptionError
from .interface import Tokenizer, has_no_eod


@dataclass(frozen=True)
class DocumentTemplate:
    """The special tokens around each document's own."""

    before: tuple[int, ...] = ()
    """Ids, usually of the BOS."""
    after: tuple[int, ...] = ()
    """Ids, usually of the EOD."""

    def ends_in(self, token: int | None) -> bool:
        """Whether each document's last token is this one."""
        return self.after[-1:] == (token,)

    def count(self, token: int) -> int:
        """How often a token is among them. GPT-2's BOS and EOD are the same."""
        return (*self.before, *self.after).count(token)


def document_template(tokenizer: Tokenizer, append_bos: bool | None, append_eod: bool) -> DocumentTemplate:
    """What is written around each document's tokens.

    Args:
        append_bos: whether documents begin with the BOS; None for what Megatron's tool does. With False, nothing comes
            before a document.
        append_eod: whether documents end with the EOD. Without it, they end with what the library adds.

    Raises:
        OptionError: the tokenizer has no BOS or EOD to append.
    """
    before, after = tokenizer.library_adds_before, tokenizer.library_adds_after
    if append_bos is False:
        before = ()
    elif append_bos:
        if tokenizer.bos is None:
            raise OptionError(f"--append-bos: {tokenizer.path} names no BOS token; give it with --bos-token")
        if tokenizer.bos not in before:
            before = (tokenizer.bos, *before)
    if append_eod:
        if tokenizer.eod is None:
            raise has_no_eod(tokenizer.path)
        after = (*(token for token in after if token != tokenizer.eod), tokenizer.eod)
    return DocumentTemplate(before, after)


def template_in_words(template: DocumentTemplate, tokenizer: Tokenizer) -> str:
    """What a document looks like, for people: ``BOS <s> (1), its text, EOD </s> (2)``."""
    before = token_names(template.before, tokenizer) or ["no BOS"]
    after = token_names(template.after, tokenizer) or ["no EOD"]
    return ", ".join([*before, "its text", *after])


def token_names(ids: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """Role, text and id of each token."""
    names = []
    for token in ids:
        roles = [name for name, number in (("BOS", tokenizer.bos), ("EOD", tokenizer.eod)) if token == number]
        names.append(" ".join([*roles, tokenizer.decode([token]), f"({token})"]))
    return names
