"""One sequence as an HTML page: its make-up and its attention drawn to scale, and every token with what it predicts.

The page is one file that loads nothing, and the same bytes each time. Nothing depends on colour alone: chunks are
hatched in turn, and what has no target is hatched, dashed and struck through.
"""

from collections.abc import Iterator
from functools import lru_cache
from html import escape
from importlib.resources import files
from typing import Any

from .view import SequenceView, ShownChunk, chunk_title, printable

SHOWN_WHOLE = 8192
"""Positions up to which every token is shown."""
SHOWN_AT_ENDS = 64
"""Tokens at each end of a chunk that are shown in longer sequences."""
CELL_CHARACTERS = 40
"""Characters of a token in its cell; the rest of a longer one is in its tooltip."""
MARKS = {" ": "·", "\n": "↵", "\t": "⇥"}
COLOURS = 6
"""Colours of chunks, in turn; an even number, so that hatching alternates with them."""
WIDTH = 1136
"""Of the bar, in pixels."""
MASK_WIDTH = 380
"""Of the attention mask, in pixels."""
LABEL_HEIGHT = 14
"""Of a line of text in a figure, in pixels."""
SWATCH = 'width="34" height="14"'

STYLE_FILE = "page.css"
"""Beside this module; the page holds its content."""

PATTERNS = (
    '<defs><pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<path d="M0 0V7" stroke="#1d2430" stroke-width="1.6" stroke-opacity=".45"/></pattern>'
    '<pattern id="cross" width="6" height="6" patternUnits="userSpaceOnUse"><path d="M0 0L6 6M6 0L0 6" '
    'stroke="#8a93a1" stroke-width=".8"/></pattern></defs>'
)


def to_html(view: SequenceView, tokenizer: Any = None) -> str:
    """The whole page.

    Args:
        tokenizer: gives the texts of tokens, as ``load_tokenizer`` returns it; without one their ids are shown.

    Raises:
        OptionError: a token is not in the tokenizer's vocabulary.
    """
    style = files(__package__).joinpath(STYLE_FILE).read_text(encoding="utf-8")
    title = f"Sequence {view.sequence:,} of {view.num_sequences:,}, counted from 0"
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            # hostile text is escaped; this keeps the page from loading or running anything even so
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            f"<title>{title}: {escape(printable(view.prefix))}</title>\n<style>\n{style}</style>\n</head>\n<body>",
            _header(view, title),
            "<h2>What the sequence is made of</h2>",
            _bar(view),
            "<h2>What each token attends to</h2>",
            _attention(view),
            "<h2>What each token predicts</h2>",
            _legend(view, tokenizer is not None),
            *_tokens(view, tokenizer),
            "</body>\n</html>\n",
        ]
    )


def _header(view: SequenceView, title: str) -> str:
    origin = f"{view.origin} · " if view.origin else ""
    share = f"{100 * view.padding / view.seq_length:.2f}"
    figures = [
        (view.seq_length, "positions"),
        (view.num_tokens, "tokens of documents"),
        (len(view.chunks), "chunks of documents"),
        (view.num_targets, "targets (positions with loss)"),
        (view.padding, f"padding ({share} %)"),
    ]
    boxes = "".join(f"<li><b>{number:,}</b>{name}</li>" for number, name in figures)
    path = escape(printable(view.prefix))
    return (
        f'<h1>{title}</h1>\n<p class="origin">{origin}dataset {path} · index {view.index_name}</p>\n'
        f'<ul class="figures">{boxes}</ul>'
    )


def _bar(view: SequenceView) -> str:
    """The sequence from left to right, to scale."""
    scale = WIDTH / view.seq_length
    parts = []
    for number, chunk in enumerate(view.chunks):
        x, width = chunk.begin * scale, chunk.length * scale
        shape = f'x="{x:.2f}" y="1" width="{width:.2f}" height="44"'
        parts.append(f'<a href="#chunk{number}"><title>{chunk_title(chunk)}</title>{_filled("rect", shape, number)}')
        parts.append(f"{_label(f'document {chunk.document}', x, width)}</a>")
    if view.padding:
        x, width = view.num_tokens * scale, view.padding * scale
        shape = f'<rect x="{x:.2f}" y="1" width="{width:.2f}" height="44"'
        parts.append(
            f"<g><title>padding: {view.padding:,} positions</title>{_padding(shape)}{_label('padding', x, width)}</g>"
        )
    for quarter in range(5):
        position = view.seq_length * quarter // 4
        anchor = ("start", "middle", "middle", "middle", "end")[quarter]
        parts.append(f'<text x="{position * scale:.2f}" y="64" text-anchor="{anchor}">{position:,}</text>')
    return (
        "<p>Chunks of documents one after another, to scale. A click on one leads to its tokens.</p>\n"
        f'<svg width="{WIDTH}" height="70" viewBox="0 0 {WIDTH} 70" role="img" aria-label="chunks in the sequence">'
        f"{PATTERNS}{''.join(parts)}</svg>"
    )


def _attention(view: SequenceView) -> str:
    """The block-diagonal mask to scale, a triangle for each chunk, and what it means."""
    scale = MASK_WIDTH / view.seq_length
    parts = [f'<polygon points="{_triangle(0, MASK_WIDTH)}" class="grey"/>']
    for number, chunk in enumerate(view.chunks):
        begin, end = chunk.begin * scale, chunk.end * scale
        shape = _filled("polygon", f'points="{_triangle(begin, end)}"', number)
        parts.append(f"<g><title>{chunk_title(chunk)}</title>{shape}</g>")
        if end - begin > LABEL_HEIGHT:
            middle = (begin + end) / 2
            parts.append(f'<text x="{middle + 8:.2f}" y="{middle + 2:.2f}">document {chunk.document}</text>')
    if view.padding:
        shape = f'<polygon points="{_triangle(view.num_tokens * scale, MASK_WIDTH)}"'
        parts.append(f"<g><title>padding, a segment of its own</title>{_padding(shape)}</g>")
    edge = MASK_WIDTH + 22
    return (
        f'<div class="beside">\n<svg width="{edge}" height="{edge}" viewBox="-20 -20 {edge} {edge}" role="img" '
        f'aria-label="attention mask"><rect width="{MASK_WIDTH}" height="{MASK_WIDTH}" fill="#fff" stroke="#c9ced6"/>'
        f'{"".join(parts)}<text x="0" y="-7">tokens that are seen →</text>'
        f'<text transform="translate(-7 {MASK_WIDTH}) rotate(-90)">← tokens that look</text></svg>\n'
        "<div><p>A row is a token, a column a token that it may see. Each sees itself and the tokens before it in the "
        f"same document, and nothing of other documents.</p>\n<dl>{_attention_legend(view)}</dl></div>\n</div>"
    )


def _attention_legend(view: SequenceView) -> str:
    pairs, padding, causal = (
        sum(length * (length + 1) // 2 for length in lengths)
        for lengths in ([chunk.length for chunk in view.chunks], [view.padding], [view.seq_length])
    )
    share = f"{100 * pairs / causal:.1f} % of what plain causal attention would show"
    rows = [(_filled("rect", SWATCH, 0), f"Seen: {pairs:,} pairs of tokens, {share}.")]
    if pairs + padding < causal:
        rows.append((f'<rect {SWATCH} class="grey"/>', "What plain causal attention would show besides."))
    if view.padding:
        rows.append((_padding(f"<rect {SWATCH}"), "Padding sees only padding."))
    return "".join(f'<dt><svg width="34" height="14">{shape}</svg></dt><dd>{text}</dd>' for shape, text in rows)


def _legend(view: SequenceView, has_texts: bool) -> str:
    """What the cells mean."""
    rows = [("<span>a</span>", "A token. It predicts the next cell. Point at a cell for its position, id and target.")]
    if any(not chunk.span.continues for chunk in view.chunks):
        rows.append(('<span class="n">a</span>', "No target, so no loss: the document ends here."))
    if any(chunk.continues for chunk in view.chunks):
        text = "The document is cut here. The token predicts the document's next one, which is in a later sequence."
        rows.append(('<span class="cut">a</span> <em>→ <span>b</span></em>', text))
    if any(chunk.span.continues and not chunk.continues for chunk in view.chunks):
        text = "The document ends here. The token predicts its last one, which is no input (--targets-only)."
        rows.append(("<span>a</span> <em>→ <span>b</span> last token</em>", text))
    if any(chunk.is_rearranged for chunk in view.chunks):
        samples = "".join(f'<span class="{name}">a</span>' for name in ("prefix", "suffix", "middle"))
        rows.append((samples, "Prefix, suffix and middle of a document that is rearranged for fill-in-the-middle."))
    if view.padding:
        rows.append(('<span class="n">pad</span>', "Padding: no target, no loss."))
    if has_texts:
        marks = " ".join(f"<u>{mark}</u>" for mark in MARKS.values())
        rows.append((marks, "Space, line break, tab. Other invisible characters are written as <u>U+200B</u>."))
        rows.append((r"<span><u>\xe2</u></span>", "A byte of a character that is spread over several tokens."))
    else:
        rows.append(("<span>17</span>", "A token's id; --tokenizer-model would show its text."))
    if view.seq_length > SHOWN_WHOLE:
        rows.append(("<em>… 9 tokens …</em>", f"Only the first and last {SHOWN_AT_ENDS} tokens of a chunk are shown."))
    return '<dl class="cells">' + "".join(_legend_row(sample, text) for sample, text in rows) + "</dl>"


def _legend_row(sample: str, text: str) -> str:
    return f"<dt>{sample}</dt><dd><em>{text}</em></dd>"


def _tokens(view: SequenceView, tokenizer: Any) -> Iterator[str]:
    """A heading and the cells of each chunk, then those of the padding."""
    cells = _Cells(view, tokenizer)
    for number, chunk in enumerate(view.chunks):
        yield f'<h3 id="chunk{number}" class="c{number % COLOURS}"><span>{_heading(chunk)}</span></h3>'
        yield f'<p class="cells tint{number % COLOURS}">'
        yield from cells.of(chunk.begin, chunk.end)
        yield f"{cells.after(chunk)}</p>"
    if view.padding:
        positions = f"positions {view.num_tokens:,} to {view.seq_length - 1:,}"
        yield f'<h3 class="pad"><span>Padding <small>{view.padding:,} × token 0, {positions}</small></span></h3>'
        yield '<p class="cells">'
        yield from cells.of(view.num_tokens, view.seq_length)
        yield "</p>"


def _heading(chunk: ShownChunk) -> str:
    return (
        f"Document {chunk.document} <small>offset {chunk.offset:,}, length {chunk.length:,} of "
        f"{chunk.document_length:,} tokens · positions {chunk.begin:,} to {chunk.end - 1:,} · {chunk.part}</small>"
    )


class _Cells:
    """The cells of a sequence's positions."""

    def __init__(self, view: SequenceView, tokenizer: Any) -> None:
        self._tokens, self._labels = view.sample.tokens.tolist(), view.sample.labels.tolist()
        self._has_target = view.sample.loss_mask > 0
        self._num_tokens, self._shows_all = view.num_tokens, view.seq_length <= SHOWN_WHOLE
        self._cuts = {chunk.end - 1 for chunk in view.chunks if chunk.continues}
        self._part = {
            chunk.begin + position: name
            for chunk in view.chunks
            for name, begin, end in chunk.parts
            for position in range(begin, end)
        }
        self._tokenizer = tokenizer
        self._text, self._quoted = lru_cache(maxsize=None)(self._text_of), lru_cache(maxsize=None)(self._quoted_of)

    def of(self, begin: int, end: int) -> Iterator[str]:
        """The cells of a chunk or of the padding."""
        left_out = 0 if self._shows_all else max(0, end - begin - 2 * SHOWN_AT_ENDS)
        gap = begin + SHOWN_AT_ENDS if left_out else end
        yield from map(self._cell, range(begin, gap))
        if left_out:
            yield f"<em>… {left_out:,} tokens …</em>"
        yield from map(self._cell, range(gap + left_out, end))

    def after(self, chunk: ShownChunk) -> str:
        """What follows a chunk's last cell: its target if that is not in the next cell."""
        if not chunk.span.continues:
            return "<em>end of the document</em>"
        label = self._text(self._labels[chunk.end - 1])
        if not chunk.continues:
            return f"<em>→ <span>{label}</span> last token, end of the document</em>"
        return f"<em>→ <span>{label}</span> at offset {chunk.offset + chunk.length:,}, in a later sequence</em>"

    def _cell(self, position: int) -> str:
        token, label = self._tokens[position], self._labels[position]
        if position >= self._num_tokens:
            return f'<span class="n" title="position {position:,}: padding (token 0), no target">pad</span>'
        here = f"position {position:,}: token {self._quoted(token)}"
        if not self._has_target[position]:
            return f'<span class="n" title="{here}, no target: the document ends here">{self._text(token)}</span>'
        kind = "cut" if position in self._cuts else self._part.get(position)
        shown_as = f' class="{kind}"' if kind else ""
        return f'<span{shown_as} title="{here}, target {self._quoted(label)}">{self._text(token)}</span>'

    def _text_of(self, token: int) -> str:
        """A token's text, or its id, for its cell."""
        if not self._tokenizer:
            return str(token)
        (piece,) = self._tokenizer.pieces([token])
        shown = list(_visible(piece))
        texts = [f"<u>{escape(text)}</u>" if is_mark else escape(text) for text, is_mark in shown[:CELL_CHARACTERS]]
        return "".join(texts) + "…" * (len(shown) > CELL_CHARACTERS)

    def _quoted_of(self, token: int) -> str:
        """A token's id and text for a tooltip."""
        if not self._tokenizer:
            return str(token)
        (piece,) = self._tokenizer.pieces([token])
        roles = (("BOS", self._tokenizer.bos), ("EOD", self._tokenizer.eod))
        role = "".join(f", {name}" for name, number in roles if token == number)
        return f"{token} “{escape(''.join(text for text, _ in _visible(piece)))}”{role}"


def _visible(piece: bytes) -> Iterator[tuple[str, bool]]:
    """A token's characters, and whether each is a mark that stands for what cannot be seen.

    Args:
        piece: UTF-8, perhaps with parts of characters.
    """
    for character in piece.decode("utf-8", errors="surrogateescape"):
        if "\udc80" <= character <= "\udcff":
            yield f"\\x{ord(character) - 0xDC00:02x}", True
        elif character in MARKS:
            yield MARKS[character], True
        elif not character.isprintable():
            yield f"U+{ord(character):04X}", True
        else:
            yield character, False


def _filled(element: str, shape: str, number: int) -> str:
    """A chunk's shape in its colour, hatched for every second chunk. The outline shows those less than a pixel wide."""
    drawn = f'<{element} {shape} class="c{number % COLOURS}" stroke="currentColor" stroke-width=".7"/>'
    return drawn + (f'<{element} {shape} fill="url(#hatch)"/>' if number % 2 else "")


def _label(text: str, x: float, width: float) -> str:
    """Text in the middle of a part of the bar, if there is room for it."""
    if width < 8 * len(text):
        return ""
    halo = 'stroke="#fff" stroke-width="4" stroke-linejoin="round" paint-order="stroke"'
    return f'<text x="{x + width / 2:.2f}" y="28" text-anchor="middle" {halo}>{text}</text>'


def _padding(shape: str) -> str:
    """The padding's shape: white, crossed and dashed."""
    return f'{shape} fill="#fff"/>{shape} fill="url(#cross)" stroke="#5c6573" stroke-dasharray="4 3"/>'


def _triangle(begin: float, end: float) -> str:
    """Corners of the lower triangle between two positions on the diagonal."""
    return f"{begin:.2f},{begin:.2f} {begin:.2f},{end:.2f} {end:.2f},{end:.2f}"
