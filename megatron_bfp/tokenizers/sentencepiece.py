"""A SentencePiece ``.model``, run by the ``sentencepiece`` library.

The library never encodes a text as control pieces (``</s>``), but it does as user-defined ones. Some of these stand for
text (a run of spaces), some are markers (``[SUFFIX]``, ``<|im_end|>``), and the model does not say which. Those in
brackets, the BOS and the EOD are taken for markers: they are made control pieces before the library sees the model. So
an HTML tag that has a piece of its own, as ``<table>`` in some models, is encoded as the ordinary text it is.
"""

import re
from collections.abc import Iterator, Sequence

import numpy as np

from ..errors import OptionError
from .files import not_of_type
from .interface import Tokenizer, TokenizingError, first_line, has_no_eod, library_errors
from .long_texts import encode_in_parts

MARKER = re.compile(r"<[^\s>]*\w[^\s>]*>|\[[^\s\]]*\w[^\s\]]*\]")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
"""Types of a piece in the model's file."""
BYTE_PAIRS = 2
"""A type of model."""


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model.

    Attributes:
        is_bpe: whether it merges pairs.
        has_bytes: whether characters that are in no piece are written as bytes.
        unknown: the id of such characters, if they are not.

    Args:
        path: of the ``.model`` file.
        eod_token: the piece that ends a document. Without it the model's own end of a sentence is taken.
        needs_eod: whether a missing EOD is an error.
        bos_token: the piece that begins a document. Without it the model's own begin of a sentence is taken.

    Raises:
        OptionError: the file cannot be read, is not such a model, or there is no EOD.
    """

    def __init__(
        self, path: str, eod_token: str | None = None, needs_eod: bool = True, *, bos_token: str | None = None
    ) -> None:
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError:
            raise OptionError("the sentencepiece package is missing: pip install 'megatron-bfp[preprocess]'") from None
        content = self._read(path)
        with library_errors(lambda error: not_of_type(path, content, "SentencePieceTokenizer", error)):
            self._types = [piece.type for piece in _pieces(content)]
            library = SentencePieceProcessor()
            library.LoadFromSerializedProto(content)
            if not self._types or len(self._types) != library.GetPieceSize():
                raise ValueError("it holds no pieces")
        self._texts = [library.IdToPiece(number) for number in range(len(self._types))]
        self.vocab_size = len(self._types)
        self.eod = self._find_eod(library.eos_id(), eod_token, needs_eod)
        self.bos = self._find("--bos-token", bos_token, library.bos_id())
        # Unigram models weigh the ways through a whole text, with sums that lose digits in a long one.
        self.is_bpe = _model_type(content) == BYTE_PAIRS
        self.has_bytes = BYTE in self._types
        self.unknown = library.unk_id()
        self._library = SentencePieceProcessor()
        self._library.LoadFromSerializedProto(self.document_model())
        if needs_eod and self.eod is not None and self._types[self.eod] not in (CONTROL, USER_DEFINED):
            raise self._eod_is_in_texts(self._texts[self.eod])

    def _find_eod(self, eos: int, eod_token: str | None, needs_eod: bool) -> int | None:
        eod = self._find("--eod-token", eod_token, eos)
        if eod is None and needs_eod:
            raise has_no_eod(self.path)
        return eod

    def _find(self, option: str, token: str | None, of_model: int) -> int | None:
        """The id of the token that an option names, else the model's own; None if that is negative."""
        if token is None:
            return of_model if of_model >= 0 else None
        if token not in self._texts:
            raise OptionError(f"{option} {token!r}: not in the vocabulary of {self.path}")
        return self._texts.index(token)

    def token_id(self, text: str) -> int | None:
        """As ``Tokenizer.token_id``."""
        return self._texts.index(text) if text in self._texts else None

    def _markers(self) -> set[int]:
        """The user-defined pieces that a text must not become."""
        numbers = self._ids_of_type(USER_DEFINED)
        return {n for n in numbers if n in (self.eod, self.bos) or MARKER.fullmatch(self._texts[n])}

    def _ids_of_type(self, piece_type: int) -> list[int]:
        return [number for number, kind in enumerate(self._types) if kind == piece_type]

    def document_model(self, byte_fallback: bool = False) -> bytes:
        """The serialised model for a document's text: markers are control pieces.

        Args:
            byte_fallback: say in it that characters without a piece are written as bytes.
        """
        model = _with_control_pieces(self._content, self._markers())
        return _with_byte_fallback(model) if byte_fallback else model

    @property
    def changes_texts(self) -> bool:
        """Whether the model does more to a text than to write spaces in its own way, and one at the front."""
        return _changes_texts(self._content)

    def normalize(self, text: str) -> str:
        """The text as the model sees it, with spaces in its own way."""
        return self._library.Normalize(text)

    def user_defined_texts(self) -> list[str]:
        """User-defined pieces that are not markers, as the model writes them."""
        markers = self._markers()
        return [self._texts[number] for number in self._ids_of_type(USER_DEFINED) if number not in markers]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """As ``Tokenizer.encode_batch``."""
        return encode_in_parts(texts, self._encode) if self.is_bpe else self._encode(texts)

    def _encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        with library_errors(lambda error: TokenizingError(first_line(error))):
            documents = self._library.Encode(list(texts), out_type=int, num_threads=1)
        return [np.array(ids, dtype=np.int32) for ids in documents]

    def reserved_texts(self) -> list[str]:
        """As ``Tokenizer.reserved_texts``."""
        return [text for text, kind in zip(self._texts, self._types, strict=True) if kind != NORMAL]

    def pieces(self, ids: Sequence[int]) -> list[bytes]:
        """As ``Tokenizer.pieces``."""
        return [self._piece(int(number)) for number in ids]

    def _piece(self, number: int) -> bytes:
        if not 0 <= number < self.vocab_size:
            raise self._has_no_token(number)
        text = self._texts[number]
        if self._types[number] == BYTE:
            return bytes.fromhex(text.removeprefix("<0x").removesuffix(">"))
        return text.replace("\u2581", " ").encode()


class _Piece:
    """The bytes of a piece of the vocabulary in a model's file, and its type."""

    def __init__(self, content: bytes, begin: int, end: int, field_begin: int) -> None:
        self.field_begin, self.begin, self.end = field_begin, begin, end
        self.type = NORMAL  # unless the file says otherwise
        for number, value, _, _ in _fields(content, begin, end):
            if number == 3:
                self.type = value


def _pieces(content: bytes) -> Iterator[_Piece]:
    """The vocabulary of a serialised ``ModelProto``: its field 1, repeated."""
    for number, _, field_begin, span in _fields(content, 0, len(content)):
        if number == 1:
            yield _Piece(content, *span, field_begin)


def _model_type(content: bytes) -> int:
    """Of a serialised ``ModelProto``: field 3 of the message in its field 2."""
    model_type = 1  # unigram, unless the file says otherwise
    for number, _, _, span in _fields(content, 0, len(content)):
        if number == 2:
            model_type = next((value for field, value, _, _ in _fields(content, *span) if field == 3), model_type)
    return model_type


def _changes_texts(content: bytes) -> bool:
    """Of a serialised ``ModelProto``: whether the message in its field 3 has a table of characters (field 2) or removes
    white space (field 4, which it does unless the file says otherwise)."""
    has_table, removes_spaces = False, True
    for number, _, _, span in _fields(content, 0, len(content)):
        if number == 3:
            for field, value, _, (begin, end) in _fields(content, *span):
                has_table = has_table or (field == 2 and end > begin)
                removes_spaces = bool(value) if field == 4 else removes_spaces
    return has_table or removes_spaces


def _with_byte_fallback(content: bytes) -> bytes:
    """The model with field 35 of the message in its field 2 set. If a message is there twice, the last one counts."""
    spec = b"".join(
        content[begin:end] for number, _, _, (begin, end) in _fields(content, 0, len(content)) if number == 2
    )
    spec += _varint(35 << 3) + b"\x01"
    return content + bytes([2 << 3 | 2]) + _varint(len(spec)) + spec


def _with_control_pieces(content: bytes, numbers: set[int]) -> bytes:
    """The model with these pieces made control pieces. If a field is there twice, the last one counts."""
    parts, copied = [], 0
    for number, piece in enumerate(_pieces(content)):
        if number in numbers:
            message = content[piece.begin : piece.end] + bytes([3 << 3, CONTROL])
            parts += [content[copied : piece.field_begin], bytes([1 << 3 | 2]), _varint(len(message)), message]
            copied = piece.end
    return b"".join([*parts, content[copied:]])


def _fields(content: bytes, offset: int, end: int) -> Iterator[tuple[int, int, int, tuple[int, int]]]:
    """The fields of a protocol buffer message: number, value if it is an integer, first byte, span of the value.

    Raises:
        ValueError: the bytes are not such a message.
    """
    while offset < end:
        field_begin = offset
        tag, offset = _read_varint(content, offset)
        value, begin = 0, offset
        if tag & 7 == 0:
            value, offset = _read_varint(content, offset)
        elif tag & 7 == 2:
            size, begin = _read_varint(content, offset)
            offset = begin + size
        elif tag & 7 in (1, 5):
            offset += 8 if tag & 7 == 1 else 4
        else:
            raise ValueError(f"byte {field_begin} begins no field")
        if offset > end:
            raise ValueError("it is cut off")
        yield tag >> 3, value, field_begin, (begin, offset)


def _read_varint(content: bytes, offset: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if offset >= len(content) or shift > 63:
            raise ValueError("it is cut off")
        byte = content[offset]
        value |= (byte & 127) << shift
        offset, shift = offset + 1, shift + 7
        if byte < 128:
            return value, offset


def _varint(value: int) -> bytes:
    digits = []
    while value > 127:
        digits.append(value & 127 | 128)
        value >>= 7
    return bytes([*digits, value])
