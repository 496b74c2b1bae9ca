"""The special tokens around each document: those that Megatron's own tool writes, unless options say otherwise.

Megatron's tool calls a tokenizer's library with its defaults and appends the EOD with ``--append-eod``. So a Hugging
Face tokenizer whose post-processor adds a BOS writes one; SentencePiece and tiktoken add nothing unless asked, and
write none. One thing differs: a document never ends in two EODs. If the post-processor adds the EOD itself, it is
written once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import OptionError
from .interface import Tokenizer


@dataclass(frozen=True)
class DocumentTemplate:
    """What stands around the tokens of each document."""

    before: tuple[int, ...] = ()
    """Ids, BOS as a rule."""
    after: tuple[int, ...] = ()
    """Ids, EOD as a rule."""

    def ends_in(self, token: int | None) -> bool:
        """Whether each document's last token is this one."""
        return self.after[-1:] == (token,)

    def count(self, token: int) -> int:
        """How often a token is there. GPT-2's BOS and EOD are the same."""
        return (*self.before, *self.after).count(token)


def document_template(tokenizer: Tokenizer, append_bos: bool | None, append_eod: bool) -> DocumentTemplate:
    """What is written around each document's tokens.

    Args:
        append_bos: whether documents begin with the BOS; None for as Megatron's tool does. With False, nothing is
            before a document.
        append_eod: whether documents end with the EOD. Without it, they end in what the library adds.

    Raises:
        OptionError: the tokenizer has no BOS to append.
    """
    before, after = tokenizer.library_adds_before, tokenizer.library_adds_after
    if append_bos is False:
        before = ()
    elif append_bos and tokenizer.bos is None:
        raise OptionError(f"--append-bos: {tokenizer.path} names no BOS token; give it with --bos-token")
    elif append_bos and tokenizer.bos not in before:
        before = (tokenizer.bos, *before)
    if append_eod:
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
