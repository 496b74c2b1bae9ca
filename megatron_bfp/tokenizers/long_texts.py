"""Long texts encoded part by part, for libraries that need many times a text's size to encode it at once.

The ids are those of the whole text. A text is cut only where a tokenizer is likely to have a boundary anyway, and only
if the characters around the cut have the same ids in one piece as in two. A text that cannot be cut so, as a long run
of one letter, stays whole: that costs memory, not exactness.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import numpy as np

LONG = 1 << 20
"""Characters: longer texts are cut."""
PART = 1 << 18
"""The smallest number of characters of a part."""
WINDOW = 256
"""Characters on either side of a cut that are compared."""
TRIES = 16
"""Candidates for a cut that are compared before a part is made longer."""

_CANDIDATE = re.compile(
    r"(?<=[A-Za-z]) (?=[A-Za-z])"  # between two words
    r"|(?<=[^\s]\n)(?=[^\s])"  # after a line
    r"|(?<=\w)(?=[\u3001\u3002\uff0c\uff01\uff1f])"  # where a Chinese or Japanese clause ends
)

Encode = Callable[[Sequence[str]], list[np.ndarray]]


def encode_in_parts(texts: Sequence[str], encode: Encode) -> list[np.ndarray]:
    """What ``encode(texts)`` returns, int32 [length] for each text, with texts above ``LONG`` given to it in parts.

    Raises:
        As ``encode``.
    """
    short = [text for text in texts if len(text) <= LONG]
    documents = iter(encode(short))
    if len(short) == len(texts):
        return list(documents)
    return [next(documents) if len(text) <= LONG else _encode_long(text, encode) for text in texts]


def _encode_long(text: str, encode: Encode) -> np.ndarray:
    return np.concatenate([encode([part])[0] for part in _parts(text, encode)])


def _parts(text: str, encode: Encode) -> Iterator[str]:
    begin, first = 0, PART
    while first < len(text):
        cut = _find_cut(text, first, encode)
        if cut is not None:
            end, next_begin = cut
            yield text[begin:end]
            begin = first = next_begin
        first += PART
    yield text[begin:]


def _find_cut(text: str, first: int, encode: Encode) -> tuple[int, int] | None:
    """The end of one part and the beginning of the next, at the character ``first`` or after it.

    Some tokenizers put a space in front of a text. With them, the next part begins behind its own space.
    """
    for match in islice(_CANDIDATE.finditer(text, first, first + PART), TRIES):
        for begin in sorted({match.start(), match.end()}):
            if _is_safe(text, match.start(), begin, encode):
                return match.start(), begin
    return None


def _is_safe(text: str, end: int, begin: int, encode: Encode) -> bool:
    """Whether the characters around a cut have the same ids in two pieces as in one."""
    first, last = max(0, end - WINDOW), begin + WINDOW
    whole, left, right = encode([text[first:last], text[first:end], text[begin:last]])
    return np.array_equal(whole, np.concatenate([left, right]))
