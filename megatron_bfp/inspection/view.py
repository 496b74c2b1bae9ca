"""One sequence as people look at it: its chunks, which parts of documents they are, and their text.

What is shown is a sample as training gets it, from ``samples.build_sample``.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple
from unicodedata import east_asian_width

import numpy as np

from ..errors import OptionError
from ..packing.chunks import ChunkSpan
from ..samples.fill_in_the_middle import FimEpoch, RearrangedSpan
from ..samples.sample import Sample, build_sample
from ..sequence_index.reader import SequenceIndex
from ..tables import WIDTH, format_table

SHORTEST_TEXT = 16
"""Characters of a chunk's text in the table, at the least: as many as fit."""


class ShownChunk(NamedTuple):
    """A chunk, and where it is in its sequence and in its document."""

    span: ChunkSpan
    begin: int
    """Its first position in the sequence."""
    offset: int
    """Tokens of the document before this chunk."""
    targets: int
    """Positions with loss."""
    continues: bool
    """Whether the document continues in a later sequence."""
    parts: list[tuple[str, int, int]]
    """For fill-in-the-middle: name, begin and end of its parts among the chunk's tokens; empty without."""

    @property
    def document(self) -> int:
        """Id of its document."""
        return self.span.document

    @property
    def length(self) -> int:
        """Tokens that are inputs."""
        return self.span.num_tokens

    @property
    def end(self) -> int:
        """The end of its positions in the sequence, exclusive."""
        return self.begin + self.length

    @property
    def document_length(self) -> int:
        """Tokens of the whole document."""
        return self.offset + self.span.document_end - self.span.start

    @property
    def is_rearranged(self) -> bool:
        """Whether it is shown for fill-in-the-middle."""
        return isinstance(self.span, RearrangedSpan)

    @property
    def part(self) -> str:
        """Which part of its document this is, in words."""
        if self.is_rearranged:
            return "whole, rearranged for fill-in-the-middle with 3 tokens more"
        if self.offset == 0:
            return "begins here, continues in a later sequence" if self.continues else "whole"
        end = "continues in a later one" if self.continues else "ends here"
        return f"goes on from an earlier sequence, {end}"

    @property
    def short_part(self) -> str:
        """The same in one word."""
        if self.is_rearranged:
            return "rearranged"
        if self.offset == 0:
            return "first" if self.continues else "whole"
        return "middle" if self.continues else "last"


@dataclass(frozen=True)
class SequenceView:
    """A sequence, and where it comes from."""

    prefix: str
    """The dataset's path."""
    index_name: str
    sequence: int
    num_sequences: int
    """Sequences of the index."""
    sample: Sample
    chunks: list[ShownChunk]
    origin: str = ""
    """Which sample of a run this is, if it was asked for as one."""

    @property
    def seq_length(self) -> int:
        """Positions."""
        return len(self.sample.tokens)

    @property
    def num_tokens(self) -> int:
        """Positions that are not padding."""
        return self.chunks[-1].end

    @property
    def padding(self) -> int:
        """Positions without a document's token."""
        return self.seq_length - self.num_tokens

    @property
    def num_targets(self) -> int:
        """Positions with loss."""
        return int(np.count_nonzero(self.sample.loss_mask))


def view_sequence(index: SequenceIndex, sequence: int, origin: str = "", fim: FimEpoch | None = None) -> SequenceView:
    """Read one sequence.

    Args:
        origin: which sample of a run it is, in words.
        fim: how rearranged documents are shown; needed if the index has such ones.

    Raises:
        OptionError: there is no such sequence.
        SequenceIndexError, IndexedDatasetError: the index or the data is damaged.
    """
    if not len(index):
        raise OptionError(f"{index.path}: has no sequences, as its documents have no tokens; choose another --split")
    if not 0 <= sequence < len(index):
        raise OptionError(f"--sequence {sequence}: {index.path} has the sequences 0 to {len(index) - 1}")
    spans = index.chunk_spans(sequence)
    sample = build_sample(index.dataset, spans, index.key.seq_length, fim=fim)
    document_spans = index.dataset.spans(np.array([span.document for span in spans]))
    chunks = []
    for span, (document_start, _), begin in zip(spans, document_spans, sample.cu_seqlens.tolist(), strict=False):
        targets = int(np.count_nonzero(sample.loss_mask[begin : begin + span.num_tokens]))
        continues = span.end + index.key.targets_only < span.document_end
        parts = []
        if fim is not None and isinstance(span, RearrangedSpan):
            tokens = index.dataset.tokens(span.start, span.document_end - span.start)
            parts = fim.parts(span.document, tokens)
        chunks.append(ShownChunk(span, begin, span.start - document_start, targets, continues, parts))
    name = index.key.name
    return SequenceView(index.dataset.prefix, name, sequence, len(index), sample, chunks, origin)


def to_text(view: SequenceView, tokenizer: Any = None, whole_texts: bool = False) -> str:
    """The sequence for a terminal of 80 columns: what it is, a table of its chunks and, if asked for, their texts.

    Args:
        tokenizer: gives the texts, as ``load_tokenizer`` returns it; None for none.
        whole_texts: after the table, the text of every chunk in full.

    Raises:
        OptionError: a token is not in the tokenizer's vocabulary.
    """
    header = ["positions", "document", "its tokens", "of", "targets", "part"]
    rows = []
    for chunk in view.chunks:
        last = chunk.offset + chunk.span.end - chunk.span.start - 1
        tokens = f"{chunk.offset:,} to {last:,}"
        rows.append([f"{chunk.begin:,} to {chunk.end - 1:,}", chunk.document, tokens, chunk.document_length])
        rows[-1] += [chunk.targets, chunk.short_part]
    if tokenizer:
        room = WIDTH - 2 - max(map(len, format_table(header, rows, width=None).splitlines()))
        header.append("text")
        for row, chunk in zip(rows, view.chunks, strict=True):
            row.append(_short_text(view.sample.tokens[chunk.begin : chunk.end], tokenizer, max(room, SHORTEST_TEXT)))
    parts = ["\n".join([_name(view), _counts(view)]), format_table(header, rows)]
    if whole_texts:
        for chunk in view.chunks:
            text = tokenizer.decode(view.sample.tokens[chunk.begin : chunk.end])
            parts.append(f"--- {chunk_title(chunk)}\n{printable(text, keep=chr(10) + chr(9))}")
    return "\n\n".join(parts)


def headline(view: SequenceView) -> str:
    """What this is, in one line: dataset, index, sequence and counts."""
    return f"{_name(view)}, {_counts(view)}".replace("\n", ", ")


def _name(view: SequenceView) -> str:
    """Dataset, index and which sequence, a line each."""
    origin = f"{view.origin}: " if view.origin else ""
    sequence = f"{origin}sequence {view.sequence:,} of {view.num_sequences:,}"
    return f"{printable(view.prefix)}\nindex {view.index_name}\n{sequence}"


def _counts(view: SequenceView) -> str:
    chunks = f"{len(view.chunks)} chunk{'s' * (len(view.chunks) > 1)}"
    return f"{view.num_tokens:,} tokens in {chunks}, {view.padding:,} padding, {view.num_targets:,} targets"


def chunk_title(chunk: ShownChunk) -> str:
    """A chunk's heading."""
    return (
        f"document {chunk.document}: {chunk.length:,} of its {chunk.document_length:,} tokens from offset "
        f"{chunk.offset:,}, at positions {chunk.begin:,} to {chunk.end - 1:,}; {chunk.part}"
    )


def printable(text: str, keep: str = "") -> str:
    """Text without characters that act on a terminal or a page: they are written as escapes, such as \\n or \\x1b.

    Args:
        keep: characters that stay as they are.
    """
    return "".join(
        character
        if character.isprintable() or character in keep
        else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def _short_text(tokens: np.ndarray, tokenizer: Any, room: int) -> str:
    """The beginning of a text, on one line of at most ``room`` columns."""
    text = printable(tokenizer.decode(tokens[:room]))
    if len(tokens) <= room and _columns(text) <= room:
        return text
    while _columns(text) > room - 1:
        text = text[:-1]
    return text + "…"


def _columns(text: str) -> int:
    """The width of a text on a terminal, where Chinese characters and the like take two columns."""
    return sum(1 + (east_asian_width(character) in "WF") for character in text)
