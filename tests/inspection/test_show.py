"""``show``: what it prints and draws of a sequence is what the index and the sample hold."""

import re
from html import unescape
from html.parser import HTMLParser

import numpy as np
import pytest
from helpers.chunks import chunk_rows
from helpers.datasets import documents_of

from megatron_bfp.commands import main as command
from megatron_bfp.errors import BFPError
from megatron_bfp.inspection import page as sequence_page
from megatron_bfp.inspection.page import to_html
from megatron_bfp.inspection.view import headline, printable, to_text, view_sequence
from megatron_bfp.samples.balance import balanced_order
from megatron_bfp.samples.fill_in_the_middle import FimDocuments
from megatron_bfp.samples.order import shuffled
from megatron_bfp.samples.sample import build_sample
from megatron_bfp.sequence_index.builder import build
from megatron_bfp.sequence_index.key import IndexKey, cached_index_directory, index_directory
from megatron_bfp.sequence_index.split import PackedSplit

LENGTHS = [5, 0, 21, 3, 16, 2, 2, 9, 7, 1, 20, 8]
HOSTILE = [
    "</span>",
    "<script>alert('a')</script>",
    ' "b" onclick=alert(1)',
    "&lt;",
    "<!--",
    "\x1b[31m",
    "\n\t\u202e",
    "😀",
]
SHOWN = [*HOSTILE[:2], '·"b"·onclick=alert(1)', "&lt;", "<!--", "U+001B[31m", "↵⇥U+202E", "😀"]
EOD = "<|endoftext|>"


class PlainTokenizer:
    """A tokenizer whose tokens' texts are given."""

    bos = eod = None

    def __init__(self, texts):
        self.texts = texts

    def pieces(self, ids):
        return [self.texts[number].encode() for number in ids]

    def decode(self, ids):
        return b"".join(self.pieces(ids)).decode("utf-8", errors="replace")


class Page(HTMLParser):
    """The elements of a page, its texts, and the cells of its tokens: class, title and text of each."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.cells, self.texts, self.headings = set(), [], [], []
        self._open = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.add(tag)
        if tag == "span" and "title" in attributes:
            self.cells.append([attributes.get("class"), attributes["title"], ""])
        if tag == "h3":
            self.headings.append("")
        if tag not in ("meta", "rect", "polygon", "path"):
            self._open.append(tag if "title" in attributes else f"{tag} without title")

    def handle_endtag(self, tag):
        if tag not in ("rect", "polygon", "path"):
            assert self._open.pop().startswith(tag)

    def handle_data(self, data):
        self.texts.append(data)
        if "span" in self._open:
            self.cells[-1][2] += data
        if "h3 without title" in self._open:
            self.headings[-1] += data


@pytest.fixture
def dataset(write_dataset):
    return write_dataset(documents_of(LENGTHS))


def build_index(dataset, seq_length=8, cap=None, first=0, end=None, directory=None):
    key = IndexKey(seq_length, first, dataset.num_documents if end is None else end, cap)
    return build(dataset, key, directory or index_directory(dataset.prefix))


def show(*arguments):
    command.main(["show", *map(str, arguments)])


def printed_rows(text):
    """Of each row of the table: first and last position, document, its first and last token, of, targets; the part."""
    rows = [line for line in text.splitlines() if re.match(r"[\d,]+ to [\d,]+  ", line)]
    return [([int(number.replace(",", "")) for number in re.findall(r"[\d,]+", row)], row.split()[-1]) for row in rows]


@pytest.mark.parametrize("cap", [None, 2])
def test_the_table_is_what_index_and_sample_hold(dataset, capsys, cap):
    index = build_index(dataset, cap=cap)
    options = [] if cap is None else ["--max-documents-per-sequence", cap]
    parts = set()
    for sequence in range(len(index)):
        show(dataset.prefix, "--seq-length", 8, "--sequence", sequence, *options)
        text = capsys.readouterr().out
        sample = build_sample(dataset, index.chunk_spans(sequence), 8)
        expected, begin = [], 0
        for document, offset, length in chunk_rows(index, sequence).tolist():
            targets = int(sample.loss_mask[begin : begin + length].sum())
            span = [offset, offset + length - 1]
            expected.append([begin, begin + length - 1, document, *span, LENGTHS[document], targets])
            begin += length
        rows = printed_rows(text)
        assert [numbers for numbers, _ in rows] == expected
        assert (
            f"index {index.key.name}\nsequence {sequence} of {len(index)}\n{begin} tokens in {len(rows)} chunk" in text
        )
        assert f"{8 - begin} padding, {int(sample.loss_mask.sum())} targets" in text
        for (_, _, _, offset, last, of, targets), part in rows:
            assert (
                part == {(0, 0): "whole", (0, 1): "first", (1, 1): "middle", (1, 0): "last"}[offset > 0, last < of - 1]
            )
            assert targets == last + 1 - offset - (last == of - 1)
            parts.add(part)
    assert len(parts) == 4  # whole, and the first, a middle and the last chunk of a document


def test_a_sample_is_the_one_that_training_sees(dataset, capsys):
    index = build_index(dataset)
    for sample in (0, 3, len(index) - 1, len(index), 5 * len(index) + 2):
        epoch, number = divmod(sample, len(index))
        show(dataset.prefix, "--seq-length", 8, "--sample", sample, "--seed", 7)
        text = capsys.readouterr().out
        show(
            dataset.prefix,
            "--seq-length",
            8,
            "--sequence",
            shuffled(number, len(index), 7, epoch, index.identity),
        )
        expected = capsys.readouterr().out
        assert text.replace(f"sample {sample} with seed 7 (epoch {epoch}): ", "") == expected
    show(dataset.prefix, "--seq-length", 8, "--sample", 3)
    default = capsys.readouterr().out
    show(dataset.prefix, "--seq-length", 8, "--sample", 3, "--seed", 1234)
    assert default == capsys.readouterr().out


def test_a_balanced_sample_is_the_one_that_training_sees(dataset, capsys):
    index = build_index(dataset)
    split = PackedSplit(index, "train")
    for size in (1, 3, 4, len(index) + 5):
        shown = []
        for sample in range(2 * len(index)):
            show(dataset.prefix, "--seq-length", 8, "--sample", sample, "--seed", 7, "--global-batch-size", size)
            text = capsys.readouterr().out
            assert f"sample {sample} with seed 7 and balanced batches of {size} (epoch {sample // len(index)})" in text
            shown.append(int(re.search(r"sequence (\d+) of", text)[1]))
        random = [split.sequence_of(sample, 7) for sample in range(2 * len(index))]
        for epoch in (0, len(index)):
            assert sorted(shown[epoch : epoch + len(index)]) == [*range(len(index))]
        starts = [start for start in range(0, 2 * len(index), size) if start + size <= len(index)]
        for start in starts:  # whole batches of the first epoch: the same samples by balanced_order
            batch = slice(start, start + size)
            order = balanced_order(split.work_of(np.arange(start, start + size), 7))
            assert shown[batch] == [random[batch][slot] for slot in order]
        assert (shown == random) == (size == 1)


def test_splits_and_the_cache_path_choose_the_index(dataset, tmp_path, capsys):
    cache = tmp_path / "cache"
    build_index(dataset, first=6, end=12, directory=cached_index_directory(dataset, str(cache)))
    options = ["--seq-length", 8, "--sequence", 0, "--split", "5,5", "--split-name", "valid"]
    show(dataset.prefix, *options, "--data-cache-path", cache)
    assert "index s8-d6-12" in capsys.readouterr().out
    with pytest.raises(BFPError, match="no sequence index s8-d6-12"):
        show(dataset.prefix, *options)


def test_the_page_shows_every_token_with_what_it_predicts(dataset):
    index = build_index(dataset)
    for sequence in range(len(index)):
        view = view_sequence(index, sequence)
        page = Page(to_html(view))
        sample = build_sample(dataset, index.chunk_spans(sequence), 8)
        num_tokens = int(chunk_rows(index, sequence)[:, 2].sum())
        assert len(page.cells) == 8
        for position, (kind, title, text) in enumerate(page.cells):
            token, label = sample.tokens[position], sample.labels[position]
            if position >= num_tokens:
                assert (kind, text) == ("n", "pad") and title.endswith(
                    f"position {position}: padding (token 0), no target"
                )
            elif sample.loss_mask[position]:
                assert title == f"position {position}: token {token}, target {label}" and kind in (None, "cut")
            else:
                assert title == f"position {position}: token {token}, no target: the document ends here"
                assert kind == "n"
        cuts = [position for position, cell in enumerate(page.cells) if cell[0] == "cut"]
        assert cuts == [chunk.end - 1 for chunk in view.chunks if chunk.span.continues]
        headings = page.headings[: len(view.chunks)]
        for heading, (document, offset, length) in zip(headings, chunk_rows(index, sequence).tolist(), strict=True):
            assert heading.startswith(f"Document {document} offset {offset}, length {length} of {LENGTHS[document]} ")
        assert len(page.headings) == len(view.chunks) + (num_tokens < 8)


def test_a_cut_shows_its_target_in_the_later_sequence(write_dataset):
    dataset = write_dataset([range(10)])
    page = to_html(view_sequence(build_index(dataset), 0), PlainTokenizer("abcdefghij"))
    assert "→ <span>i</span> at offset 8, in a later sequence" in page
    assert 'title="position 7: token 7 “h”, target 8 “i”"' in page


def test_with_targets_only_the_last_token_is_shown_as_a_target(write_dataset):
    dataset = write_dataset([range(10), [3, 4, 5]])
    index = build(dataset, IndexKey(8, 0, 2, targets_only=True), index_directory(dataset.prefix))
    page = to_html(view_sequence(index, 0), PlainTokenizer("abcdefghij"))
    assert "→ <span>i</span> at offset 8, in a later sequence" in page
    view = view_sequence(index, 1)
    assert [chunk.short_part for chunk in view.chunks] == ["whole", "last"]
    assert [(chunk.length, chunk.document_length, chunk.targets) for chunk in view.chunks] == [(2, 3, 2), (1, 10, 1)]
    page = to_html(view, PlainTokenizer("abcdefghij"))
    assert "→ <span>f</span> last token, end of the document" in page and "later sequence" not in page
    assert "The token predicts its last one, which is no input" in page and "No target, so no loss" not in page
    assert [cell[0] for cell in Page(page).cells] == [None] * 3 + ["n"] * 5
    assert "3 tokens in 2 chunks, 5 padding, 3 targets" in headline(view)


def test_parts_of_a_rearranged_document_are_marked(tmp_path, write_dataset, tokenizer_file, capsys):
    dataset = write_dataset([[*range(300, 340), 0]] * 3)
    fim = ("--fim-rate", "1", "--fim-prefix-token", "<|pad|>", "--fim-middle-token", "a", "--fim-suffix-token", "b")
    call = ("show", dataset.prefix, "--seq-length", "44", *fim, "--tokenizer-model", tokenizer_file, "--eod-token", EOD)
    build(dataset, IndexKey(44, 0, 3, fim=FimDocuments(1, 7)), index_directory(dataset.prefix))
    shown = []
    for sample in ("0", "3"):  # of two epochs
        command.main([*call, "--seed", "7", "--sample", sample, "--html", str(tmp_path / "page.html")])
        assert "0 to 40" in (printed := capsys.readouterr().out) and "rearranged" in printed
        page = (tmp_path / "page.html").read_text()
        assert "Prefix, suffix and middle of a document that is rearranged" in page and "3 tokens more" in page
        shown.append([cell[0] for cell in Page(page).cells])
        kinds = {kind: shown[-1].count(kind) for kind in ("prefix", "suffix", "middle", None)}
        assert sum(kinds.values()) == 43 and kinds["prefix"] + kinds["suffix"] + kinds["middle"] == 40
    assert shown[0] != shown[1]
    command.main([*call, "--seed", "7", "--sequence", "0", "--json"])
    assert '"part": "rearranged"' in capsys.readouterr().out
    with pytest.raises(BFPError, match="--fim-rate needs --tokenizer-model"):
        command.main([*call[:6], "--sequence", "0"])


def test_segments_of_bar_and_mask_are_to_scale(dataset):
    index = build_index(dataset)
    for sequence in range(len(index)):
        page = to_html(view_sequence(index, sequence))
        boundaries = [0, *np.cumsum(chunk_rows(index, sequence)[:, 2]).tolist()]
        widths = re.findall(r'<rect x="([\d.]+)" y="1" width="([\d.]+)" height="44" class="c', page)
        scale = sequence_page.WIDTH / 8
        assert [(float(x), float(x) + float(width)) for x, width in widths] == [
            (begin * scale, end * scale) for begin, end in zip(boundaries, boundaries[1:])
        ]
        triangles = re.findall(r'<polygon points="([^"]+)" class="c', page)
        scale = sequence_page.MASK_WIDTH / 8
        assert [[float(number) for number in re.split("[ ,]", points)] for points in triangles] == [
            [corner * scale for corner in (begin, begin, begin, end, end, end)]
            for begin, end in zip(boundaries, boundaries[1:])
        ]


def test_hostile_text_acts_neither_on_the_page_nor_on_a_terminal(write_dataset):
    dataset = write_dataset([range(len(HOSTILE))], name="<img src=x onerror=alert(1)>")
    view = view_sequence(build_index(dataset, len(HOSTILE)), 0)
    source = to_html(view, PlainTokenizer(HOSTILE))
    page = Page(source)
    assert not page.tags & {"script", "img", "link", "iframe"} and "\x1b" not in source and "\u202e" not in source
    assert re.findall(r"(?:https?:|//|url\((?!#))", source) == []
    assert [text for _, _, text in page.cells] == SHOWN
    for token, (_, title, _) in enumerate(page.cells):
        target = f"target {token + 1} “{SHOWN[token + 1]}”" if token < 7 else "no target: the document ends here"
        assert title == f"position {token}: token {token} “{SHOWN[token]}”, {target}"
    assert "&lt;img src=x onerror=alert(1)&gt;" in source
    printed = to_text(view, PlainTokenizer(HOSTILE), whole_texts=True)
    assert "\x1b" not in printed and "\u202e" not in printed and "\\x1b[31m\n\t\\u202e😀" in printed
    assert printable("a\nb\x00é\u2028") == "a\\nb\\x00é\\u2028"


def test_the_page_is_the_same_bytes_and_whole(dataset, tmp_path, capsys):
    build_index(dataset)
    for name in ("a.html", "b.html"):
        show(dataset.prefix, "--seq-length", 8, "--sequence", 4, "--html", tmp_path / name)
        assert f"wrote {tmp_path / name}" in capsys.readouterr().out
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
    assert (tmp_path / "a.html").read_bytes().endswith(b"</html>\n")
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("length, seq_length, cells", [(8192, 8192, 8192), (9000, 9001, 129), (128, 8193, 256)])
def test_long_sequences_show_the_ends_of_chunks(write_dataset, length, seq_length, cells):
    dataset = write_dataset([[7] * length], dtype=np.int32)
    page = to_html(view_sequence(build_index(dataset, seq_length), 0))
    assert len(Page(page).cells) == cells
    left_out = re.findall(r"… ([\d,]+) tokens …</em>\n", page)
    assert sum(int(count.replace(",", "")) for count in left_out) == seq_length - cells


def test_with_a_tokenizer_texts_are_shown(write_dataset, tmp_path, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(special_tokens=[EOD], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = ["One line\nand a second\n" * 8, "naïve 😀"]
    dataset = write_dataset([[*tokenizer.encode(text).ids, 0] for text in texts])
    build_index(dataset, 256)
    options = ["--seq-length", 256, "--sequence", 0, "--tokenizer-model", tmp_path / "tokenizer.json"]
    show(dataset.prefix, *options)
    table = capsys.readouterr().out
    assert "One line\\nand a second\\n" in table and "…\n" in table
    assert max(map(len, table.splitlines()[1:])) == 80  # as much text as there is room for
    assert f"naïve 😀{EOD}\n" in table and "--- document" not in table
    show(dataset.prefix, *options, "--text", "--html", tmp_path / "page.html")
    printed = capsys.readouterr().out
    for document, text in enumerate(texts):
        assert f"--- document {document}: " in printed and f"\n{text}{EOD}\n" in printed
    cells = [unescape(text) for _, _, text in Page((tmp_path / "page.html").read_text()).cells]
    assert "".join(cells[:4]) == "One·" and cells.count(EOD) == 2 and "\\xf0" in cells
    with pytest.raises(BFPError, match="has no token 300"):
        other = write_dataset([[300]], name="other")
        build_index(other, 256)
        show(other.prefix, *options)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nowhere", "--seq-length", "8", "--sequence", "0"], "nowhere.idx: no such file"),
        (["PREFIX", "--seq-length", "0", "--sequence", "0"], "--seq-length"),
        (["PREFIX", "--seq-length", "8"], "--sequence --sample"),
        (["PREFIX", "--seq-length", "8", "--sequence", "1", "--sample", "1"], "not allowed with"),
        (["PREFIX", "--seq-length", "8", "--sequence", "-1"], r"--sequence -1: .*s8-d0-12 has the sequences 0 to 11"),
        (["PREFIX", "--seq-length", "8", "--sequence", "12"], r"--sequence 12: .*s8-d0-12 has the sequences 0 to 11"),
        (["PREFIX", "--seq-length", "8", "--sample", "-1"], "--sample -1: samples are counted from 0"),
        (["PREFIX", "--seq-length", "8", "--sequence", "1", "--seed", "1"], "--seed"),
        (["PREFIX", "--seq-length", "8", "--sequence", "1", "--split-name", "valid"], "give --split too"),
        (["PREFIX", "--seq-length", "8", "--sequence", "1", "--split", "x"], "--split 'x'"),
        (["PREFIX", "--seq-length", "8", "--sequence", "1", "--split", "0,1"], "its train split has no documents"),
        (["PREFIX", "--seq-length", "8", "--sequence", "1", "--text"], "--text needs --tokenizer-model"),
        (["PREFIX", "--seq-length", "8", "--sequence", "1", "--html", "/dev/null/x"], "--html /dev/null/x: cannot"),
        (["PREFIX", "--seq-length", "8", "--sequence", "1", "--tokenizer-model", "none"], "--tokenizer-model none"),
        (
            ["PREFIX", "--seq-length", "8", "--sequence", "1", "--tokenizer-type", "X", "--tokenizer-model", "x"],
            "--tokenizer-type X: choose one of",
        ),
        (
            ["PREFIX", "--seq-length", "9", "--sequence", "0", "--max-documents-per-sequence", "2"],
            r"no sequence index s9-d0-12-m2, only s8-d0-12\. Build it: megatron-bfp index \S+data "
            r"--seq-length 9 --max-documents-per-sequence 2$",
        ),
        (["PREFIX", "--seq-length", "8", "--sequence", "0", "--split", "1,1"], "--seq-length 8 --split 1,1$"),
    ],
)
def test_bad_options_are_each_one_error_and_print_nothing(dataset, capsys, arguments, message):
    build_index(dataset)
    with pytest.raises(BFPError, match=message) as raised:
        show(*[dataset.prefix if argument == "PREFIX" else argument for argument in arguments])
    assert "\n" not in str(raised.value)
    assert capsys.readouterr().out == ""


def test_an_index_without_sequences_says_so(write_dataset):
    dataset = write_dataset([[], []])
    build_index(dataset)
    for entry in ("--sequence", "--sample"):
        with pytest.raises(BFPError, match="has no sequences"):
            show(dataset.prefix, "--seq-length", 8, entry, 0)


def test_nothing_is_built(dataset, tmp_path):
    with pytest.raises(BFPError, match="Build it"):
        show(dataset.prefix, "--seq-length", 8, "--sequence", 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.bin", "data.idx"]


def test_the_headline_has_one_chunk_or_several(dataset):
    index = build_index(dataset)
    assert "8 tokens in 1 chunk, 0 padding, 8 targets" in headline(view_sequence(index, 0))
