"""A tiktoken vocabulary, run by the ``tiktoken`` library: its own files, or the JSON that Megatron reads.

Neither file holds all that the library needs:

- A ``.tiktoken`` file has a line for each token, its bytes in base64 and its rank. The pattern that splits texts must
  be named; ``PATTERNS`` and ``SPECIAL_TOKENS`` know public ones.
- Megatron's JSON is a list of objects ``{"rank": 0, "token_bytes": "AA==", "token_str": ...}``. Its special tokens come
  first, and so each token's id is its rank and their number.
"""

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import OptionError
from .files import not_of_type
from .interface import Tokenizer, TokenizingError, first_line, has_no_eod, is_from_library, library_errors

MEGATRON_SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
MEGATRON_BOS, MEGATRON_EOD = "<s>", "</s>"
MEGATRON_VOCAB_SIZE = 1 << 17

_CASED_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = (r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+")
PATTERNS = {
    "v1": "|".join((r"[^\r\n\p{L}\p{N}]?+\p{L}+", r"\p{N}", r" ?[^\s\p{L}\p{N}]++[\r\n]*", r"\s*[\r\n]", *_SPACES[1:])),
    "v2": "|".join((*_CASED_WORDS, r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", *_SPACES)),
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k_base": "|".join(
        (_CONTRACTIONS, r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", *_SPACES)
    ),
    "o200k_base": "|".join(
        (
            *(words + _CONTRACTIONS + "?" for words in _CASED_WORDS),
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
            *_SPACES,
        )
    ),
}
"""``--tiktoken-pattern``: Megatron's names, v1 and v2, and those of public encodings."""
SPECIAL_TOKENS = {
    "gpt2": {"<|endoftext|>": 50256},
    "cl100k_base": {
        "<|endoftext|>": 100257,
        "<|fim_prefix|>": 100258,
        "<|fim_middle|>": 100259,
        "<|fim_suffix|>": 100260,
        "<|endofprompt|>": 100276,
    },
    "o200k_base": {"<|endoftext|>": 199999, "<|endofprompt|>": 200018},
}
"""Special tokens of whole public encodings, if ``--tiktoken-special-tokens`` names none."""


@dataclass(frozen=True)
class TiktokenOptions:
    """What a file does not say itself: Megatron's ``--tiktoken-*`` and ``--vocab-size``."""

    pattern: str | None = None
    """A name in ``PATTERNS`` or a regular expression; None for v2 in Megatron's form."""
    num_special_tokens: int = 1000
    """In Megatron's form: ids before the first rank."""
    special_tokens: tuple[str, ...] | None = None
    """None for those of Megatron or of the public encoding."""
    vocab_size: int | None = None
    """In Megatron's form: special tokens and ranks; None for all of them, but at most ``MEGATRON_VOCAB_SIZE``."""


class TikTokenizer(Tokenizer):
    """A tiktoken vocabulary.

    Attributes:
        pattern: the regular expression that splits a text into words.
        ranks: id of each token but the special ones; pairs that make the lowest are merged first.

    Args:
        path: of the file, of either form.
        eod_token: text of the special token that ends a document. Without it, ``</s>`` in Megatron's form, else
            ``<|endoftext|>`` if that is a special token.
        needs_eod: whether a missing EOD is an error.
        options: pattern and special tokens.
        bos_token: text of the special token that begins a document. Without it, ``<s>`` in Megatron's form.

    Raises:
        OptionError: the file cannot be read, is of neither form, an option does not fit it, or there is no EOD.
    """

    def __init__(
        self,
        path: str,
        eod_token: str | None = None,
        needs_eod: bool = True,
        options: TiktokenOptions = TiktokenOptions(),
        bos_token: str | None = None,
    ) -> None:
        try:
            import tiktoken
        except ImportError:
            raise OptionError("the tiktoken package is missing: pip install 'megatron-bfp[preprocess]'") from None
        content = self._read(path)
        is_json = content.lstrip()[:1] == b"["
        if is_json:
            self.ranks, self._ids = _shifted(_megatron_ranks(content, path), options, path)
        else:
            self.ranks = _ranks(content, path)
            self._ids = _special_tokens(self.ranks, options)
            self.warning = _options_without_effect(options, path)
        pattern = _named_pattern(options, is_json, path)
        self.pattern = PATTERNS.get(pattern, pattern)
        self._texts = {number: token for token, number in self.ranks.items()}
        self._texts |= {number: token.encode() for token, number in self._ids.items()}
        self.vocab_size = max(self._texts) + 1
        # Of the library's regular expressions. Without special tokens it cannot find any in a text.
        with library_errors(lambda error: OptionError(f"--tiktoken-pattern {pattern}: {first_line(error)}")):
            self._library = tiktoken.Encoding(path, pat_str=self.pattern, mergeable_ranks=self.ranks, special_tokens={})
        self.eod = self._find("--eod-token", eod_token, MEGATRON_EOD if is_json else "<|endoftext|>")
        self.bos = self._find("--bos-token", bos_token, MEGATRON_BOS if is_json else "<|begin_of_text|>")
        if self.eod is None and needs_eod:
            raise has_no_eod(path)

    def _find(self, option: str, token: str | None, usual: str) -> int | None:
        """The id of the special token that an option names, else of the usual one; None if there is none."""
        if token is not None and token not in self._ids:
            known = ", ".join(list(self._ids)[:10]) or "none"
            raise OptionError(
                f"{option} {token!r}: no special token of {self.path}, whose special tokens are {known}; name others "
                "with --tiktoken-special-tokens"
            )
        return self._ids.get(token if token is not None else usual)

    def token_id(self, text: str) -> int | None:
        """As ``Tokenizer.token_id``."""
        return self._ids.get(text, self.ranks.get(text.encode()))

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """As ``Tokenizer.encode_batch``."""
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> np.ndarray:
        try:
            return self._library.encode_to_numpy(text, disallowed_special=()).astype(np.int32)
        except BaseException as error:  # its regular expressions run out of stack in long runs of spaces
            if not is_from_library(error):
                raise
        return self._encode_by_pieces(text)

    def _encode_by_pieces(self, text: str) -> np.ndarray:
        """The same ids, with the text split by regular expressions that do not recurse."""
        import regex

        with library_errors(lambda error: TokenizingError(first_line(error))):
            pieces = (match.group().encode() for match in regex.finditer(self.pattern, text))
            ids = [number for piece in pieces for number in self._library._encode_single_piece(piece)]
        return np.array(ids, dtype=np.int32)

    def reserved_texts(self) -> list[str]:
        """As ``Tokenizer.reserved_texts``."""
        return list(self._ids)

    def pieces(self, ids: Sequence[int]) -> list[bytes]:
        """As ``Tokenizer.pieces``."""
        for number in ids:
            if int(number) not in self._texts:
                raise self._has_no_token(number)
        return [self._texts[int(number)] for number in ids]


def _options_without_effect(options: TiktokenOptions, path: str) -> str | None:
    """A warning if options for Megatron's form are given with another file."""
    if options == TiktokenOptions(options.pattern, special_tokens=options.special_tokens):
        return None
    return f"--tiktoken-num-special-tokens and --vocab-size have no effect: {path} is not of Megatron's form"


def _named_pattern(options: TiktokenOptions, is_json: bool, path: str) -> str:
    """The name of the pattern, or a regular expression.

    Raises:
        OptionError: neither an option nor the file says it.
    """
    pattern = options.pattern or ("v2" if is_json else None)
    if pattern is None:
        raise OptionError(
            f"--tokenizer-model {path}: does not say how texts are split; give --tiktoken-pattern, one of "
            f"{', '.join(PATTERNS)} or a regular expression"
        )
    return pattern


def _ranks(content: bytes, path: str) -> dict[bytes, int]:
    """The tokens of a ``.tiktoken`` file."""
    ranks = {}
    for number, line in enumerate(content.splitlines(), 1):
        if line:
            try:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except ValueError as error:
                reason = f"line {number} is not a token and its rank: {error}"
                raise not_of_type(path, content, "TikTokenizer", reason) from None
    return _checked(ranks, path)


def _megatron_ranks(content: bytes, path: str) -> dict[bytes, int]:
    try:
        entries = json.loads(content)
        ranks = {base64.b64decode(entry["token_bytes"], validate=True): int(entry["rank"]) for entry in entries}
    except (ValueError, TypeError, KeyError) as error:
        raise OptionError(
            f"--tokenizer-model {path}: not Megatron's form of a tiktoken vocabulary: {error!r}"
        ) from None
    if sorted(ranks.values()) != list(range(len(entries))):
        raise OptionError(f"--tokenizer-model {path}: its ranks are not 0 to {len(entries) - 1}, once each")
    return _checked(ranks, path)


def _checked(ranks: dict[bytes, int], path: str) -> dict[bytes, int]:
    """``ranks``, if any text can be written with them."""
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise OptionError(
            f"--tokenizer-model {path}: not a tiktoken vocabulary: it lacks {len(missing)} of the 256 single bytes"
        )
    return ranks


def _shifted(ranks: dict[bytes, int], options: TiktokenOptions, path: str) -> tuple[dict[bytes, int], dict[str, int]]:
    """The ids of Megatron's form: special tokens, named or numbered, then as many ranks as fit the vocabulary."""
    names = list(options.special_tokens or MEGATRON_SPECIAL_TOKENS)
    count = options.num_special_tokens
    size = options.vocab_size or min(MEGATRON_VOCAB_SIZE, count + len(ranks))
    if len(names) > count or len(set(names)) != len(names):
        raise OptionError(
            f"--tiktoken-special-tokens: {len(names)} names, some twice or more than {count}, their number"
        )
    if not count + 256 <= size <= count + len(ranks):
        raise OptionError(
            f"--vocab-size {size}: {path} has {len(ranks)} tokens, beside {count} special ones "
            "(--tiktoken-num-special-tokens); it can be cut, but not below 256 tokens"
        )
    names += [f"<SPECIAL_{number}>" for number in range(len(names), count)]
    special_tokens = {name: number for number, name in enumerate(names)}
    return {token: rank + count for token, rank in ranks.items() if rank + count < size}, special_tokens


def _special_tokens(ranks: dict[bytes, int], options: TiktokenOptions) -> dict[str, int]:
    """The special tokens of a ``.tiktoken`` file: those named, after the highest rank, or the public encoding's."""
    first = max(ranks.values()) + 1
    if options.special_tokens is not None:
        return {name: number for number, name in enumerate(options.special_tokens, first)}
    known: dict[str, int] = SPECIAL_TOKENS.get(options.pattern or "", {})
    # Only of the whole vocabulary: in a smaller one, these numbers would be out of its range.
    return known if known and min(known.values()) in (first, first + 1) else {}
