"""The report: counts of cuts beside plain counts and Megatron's own dataset, bounds, percentiles, pages."""

import json

import numpy as np
import pytest
from helpers.datasets import documents_of
from helpers.oracle import chunk_lengths
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bfp import pack
from megatron_bfp.commands import report as report_command
from megatron_bfp.errors import BFPError
from megatron_bfp.inspection import report, report_pages
from megatron_bfp.inspection.figures import draw_sequences, draw_truncations
from megatron_bfp.inspection.waiting import Ranks
from megatron_bfp.packing import bounds
from megatron_bfp.packing import census as counting
from megatron_bfp.packing.census import take_census
from megatron_bfp.tables import format_table

LENGTHS = st.lists(st.integers(0, 30), max_size=40)


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(1, 20), st.lists(st.integers(1, 29), unique=True, max_size=3), st.integers(1, 7))
def test_cuts_are_those_of_a_plain_count(lengths, seq_length, edges, block):
    edges = sorted(edges)
    expected = [[0] * 6 for _ in range(len(edges) + 1)]
    position = 0
    for length in lengths:
        concatenation = len({token // seq_length for token in range(position, position + length)}) - 1
        cut = len(range(0, length, seq_length)) - 1
        position += length
        if length:
            row = expected[sum(edge < length for edge in edges)]
            for column, count in enumerate((1, length, concatenation > 0, concatenation, cut > 0, cut)):
                row[column] += count
    original, counting.BLOCK = counting.BLOCK, block
    try:
        classes = report.count_cuts(np.array(lengths, dtype=np.int32), seq_length, edges)
    finally:
        counting.BLOCK = original
    assert [[*vars(row).values()][2:] for row in classes] == expected
    assert [(row.shortest, row.longest) for row in classes] == list(
        zip([1, *(edge + 1 for edge in edges)], [*edges, counting.LONGEST_DOCUMENT])
    )


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(1, 20), st.booleans())
def test_packing_cuts_where_pack_cuts(lengths, seq_length, targets_only):
    packed = pack(lengths, seq_length, targets_only=targets_only)
    chunks = np.zeros(len(lengths) + 1, dtype=np.int64)
    for i in range(len(packed)):
        np.add.at(chunks, packed[i][:, 0], 1)
    longest = seq_length + targets_only
    array = np.array(lengths, dtype=np.int32)
    classes = report.count_cuts(array, seq_length, [longest], targets_only=targets_only)
    assert [row.cut_by_packing for row in classes] == [0, np.count_nonzero(chunks > 1)]
    assert sum(row.cuts_of_packing for row in classes) == np.maximum(chunks - 1, 0).sum()


@pytest.mark.parametrize("seed, seq_length", [(1234, 8), (7, 5), (7, 64)])
def test_cuts_of_concatenation_are_those_of_megatrons_dataset(write_dataset, seed, seq_length):
    from helpers.megatron_helpers import build, config
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    lengths = np.random.default_rng(seed).integers(1, 4 * seq_length, 300)
    dataset = write_dataset(documents_of(lengths.tolist()))
    settings = config(([dataset.prefix], None), seq_length, GPTDatasetConfig, random_seed=seed, split="90,10,0")
    megatron = build([None, None, None], settings, GPTDataset)[0]
    cut = np.zeros(300, dtype=np.int64)
    for position, offset in megatron.sample_index[1:].tolist():
        if offset:  # the sample begins inside a document
            cut[megatron.document_index[position]] += 1
    ordered = report.megatron_order(lengths[:270], seed)
    assert ordered.tolist() == lengths[megatron.document_index].tolist()
    classes = report.count_cuts(ordered, seq_length, [seq_length])
    assert sum(row.cuts_of_concatenation for row in classes) == cut.sum() > 0
    assert [row.cut_by_concatenation for row in classes] == [
        np.count_nonzero(cut[lengths <= seq_length]),
        np.count_nonzero(cut[lengths > seq_length]),
    ]


@pytest.mark.case(16)
@settings(max_examples=300, deadline=None)
@given(LENGTHS, st.integers(1, 20), st.sampled_from([None, 1, 2, 3]))
def test_figures_of_packing_are_those_of_pack(lengths, seq_length, cap):
    packed = pack(lengths, seq_length, cap)
    compactness = report.measure_packing(packed.census, seq_length, cap)
    chunks = [packed[i][:, 2] for i in range(len(packed))]
    assert (compactness.sequences, compactness.padding) == (len(packed), packed.padding)
    for seen, values in (
        (compactness.documents_per_sequence, sorted(len(of_sequence) for of_sequence in chunks)),
        (compactness.attention_work, sorted((of_sequence**2).sum() / seq_length**2 for of_sequence in chunks)),
    ):
        ranks = [-(-len(values) * percent // 100) - 1 for percent in (50, 99, 100)]
        assert [seen.median, seen.p99, seen.maximum] == ([values[rank] for rank in ranks] if values else [0, 0, 0])


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(1, 20))
def test_the_figures_of_even_sequences_are_those_of_pack(lengths, seq_length):
    packed = {even: pack(lengths, seq_length, even=even) for even in (False, True)}
    figures = report.make_report(np.array(lengths, dtype=np.int64), seq_length)
    assert (figures.even.sequences, figures.even.padding) == (len(packed[True]), packed[True].padding)
    documents = {even: sorted(len(packed[even][i]) for i in range(len(packed[even]))) for even in packed}
    work = {even: sorted(packed[even].work / seq_length**2) for even in packed}
    assert bool(figures.distribution) == bool(sum(lengths))
    for point in figures.distribution:
        for seen, values in (
            (point.documents, documents[False]),
            (point.documents_even, documents[True]),
            (point.work, work[False]),
            (point.work_even, work[True]),
        ):
            rank = max(1, -(-len(values) * round(100 * point.percent) // 10_000))
            assert seen == values[rank - 1]


def test_the_report_says_what_targets_only_saves():
    lengths = np.array([9, 1, 0, 17, 4, 1], dtype=np.int32)
    figures = report.make_report(lengths, 8)
    packed = pack(lengths, 8, targets_only=True)
    assert (figures.targets_only.sequences, figures.targets_only.padding) == (len(packed), packed.padding) == (4, 5)
    assert (figures.one_token_documents, figures.empty_documents, figures.packings[0].sequences) == (2, 1, 4)
    page = " ".join(report_pages.to_markdown("data", "", [report.make_report(np.array([9] * 8), 8)], 4096).split())
    assert "packing needs 8 sequences instead of 9 (11.111 % fewer)." in page


def test_even_sequences_differ_from_best_fit_where_documents_are_tiny():
    lengths = np.ceil(np.random.default_rng(0).lognormal(3, 1.2, 3000)).astype(np.int64)
    figures = report.make_report(lengths, 512)
    assert figures.even.documents_per_sequence.maximum < figures.packings[0].documents_per_sequence.maximum / 2
    assert [point.documents for point in figures.distribution] != [p.documents_even for p in figures.distribution]


def test_figures_are_drawn_of_any_corpus():
    for lengths in ([0], [9, 9, 20]):
        figures = report.make_report(np.array(lengths, dtype=np.int64), 8)
        assert draw_truncations([figures]).startswith(b"\x89PNG") and draw_sequences([figures]).startswith(b"\x89PNG")


def fewest_sequences(chunks, seq_length, cap):
    """The optimum, by trying every way to put chunks into sequences."""
    best = len(chunks)

    def search(left, spaces):
        nonlocal best
        if len(spaces) >= best:
            return
        if not left:
            best = len(spaces)
            return
        for i, (space, count) in enumerate(spaces):
            if space >= left[0] and count != cap:
                search(left[1:], spaces[:i] + [(space - left[0], count + 1)] + spaces[i + 1 :])
        search(left[1:], [*spaces, (seq_length - left[0], 1)])

    search(sorted(chunks, reverse=True), [])
    return best


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 24), max_size=8), st.integers(1, 12), st.sampled_from([None, 1, 2]))
def test_the_lower_bound_is_valid_and_above_the_plain_one(lengths, seq_length, cap):
    census = take_census(np.array(lengths, dtype=np.int32), seq_length)
    bound = bounds.lower_bound(census, seq_length, cap)
    assert -(-sum(lengths) // seq_length) <= bound
    assert bound <= fewest_sequences(chunk_lengths(lengths, seq_length), seq_length, cap)


def test_the_lower_bound_sees_that_halves_do_not_fill_up():
    lengths = np.full(100, 6, dtype=np.int32)
    assert bounds.lower_bound(take_census(lengths, 10), 10) == 100
    assert bounds.lower_bound(take_census(np.array([7] * 50 + [4] * 50, dtype=np.int32), 10), 10) == 70


def test_the_lower_bound_under_a_cap_is_rounded_up():
    census = take_census(np.array([1, 1, 1, 10], dtype=np.int32), 10)
    assert [bounds.lower_bound(census, 10, cap) for cap in (None, 3, 2, 1)] == [2, 2, 3, 4]


def test_a_corpus_without_tokens_has_a_report():
    for lengths in ([], [0, 0]):
        empty = report.make_report(np.array(lengths, dtype=np.int32), 8, [None, 2], ranks=[Ranks(2, 2)])
        assert empty.documents == len(lengths) and empty.length_classes == []
        assert [(p.sequences, p.lower_bound) for p in (*empty.packings, empty.even)] == [(0, 0)] * 3
        assert empty.waiting == empty.distribution == []


def test_the_command_writes_four_files_and_prints_the_first(write_dataset, tmp_path, capsys):
    dataset = write_dataset(documents_of([3, 8, 9, 16, 0, 7, 25]))
    output = tmp_path / "new" / "report"
    report_command.main([dataset.prefix, "--seq-length", "8", "64", "--output", str(output), "--seed", "5"])
    text = (output / "report.md").read_text()
    assert text.split("![")[0].strip() in capsys.readouterr().out
    figures = json.loads((output / "report.json").read_text())
    assert [figures_of_length["seq_length"] for figures_of_length in figures["reports"]] == [8, 64]
    assert [figures_of_length["documents"] for figures_of_length in figures["reports"]] == [7, 7]
    figures = ["sequences.png", "truncations.png"]
    assert all((output / name).read_bytes().startswith(b"\x89PNG") and f"({name})" in text for name in figures)
    assert (output / figures[0]).read_bytes() != (output / figures[1]).read_bytes()
    assert sorted(path.name for path in output.iterdir()) == ["report.json", "report.md", *figures]
    again = tmp_path / "again"
    report_command.main([dataset.prefix, "--seq-length", "8", "64", "--output", str(again), "--seed", "5"])
    assert (again / "report.json").read_bytes() == (output / "report.json").read_bytes()


def test_a_report_of_an_idx_alone_and_of_a_split(write_dataset, tmp_path, capsys):
    dataset = write_dataset(documents_of([3] * 10))
    (tmp_path / "data.bin").unlink(missing_ok=True)
    report_command.main([dataset.prefix, "--seq-length", "8", "--split", "7,3"])
    assert "Documents 0 to 7 of 10." in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nowhere", "--seq-length", "8"], "no such file"),
        (["PREFIX", "--seq-length", "0"], "--seq-length"),
        (["PREFIX", "--seq-length", "8", "--split", "0,1,0"], "train split"),
        (["PREFIX", "--seq-length", "8", "--seed", "-1"], "--seed"),
        (["PREFIX", "--seq-length", "8", "--max-documents-per-sequence", "0"], "max_documents_per_sequence"),
        (["PREFIX", "--seq-length", "8", "--output", "/dev/null/x"], "--output"),
    ],
)
def test_bad_options_are_named(write_dataset, arguments, message):
    dataset = write_dataset(documents_of([3, 4]))
    with pytest.raises(BFPError, match=message):
        report_command.main([dataset.prefix if argument == "PREFIX" else argument for argument in arguments])


def test_a_table_aligns_numbers_to_the_right():
    rows = [["a", 1234567, "0.5"], ["longer", 8, "-"]]
    assert format_table(["name", "tokens", "%"], rows).splitlines() == [
        "name       tokens    %",
        "------  ---------  ---",
        "a       1,234,567  0.5",
        "longer          8    -",
    ]
    markdown = format_table(["name", "tokens", "%"], rows, markdown=True).splitlines()
    assert len(set(map(len, markdown))) == 1
    assert markdown[1] == "| ------ | --------: | --: |"


def test_a_document_as_long_as_a_sequence_fits_into_it():
    lengths = np.array([3, 8, 9, 2], dtype=np.int32)  # of 8: tokens 3 to 10, cut at 8
    figures = report.make_report(lengths, 8)
    assert report_pages.cut_needlessly(figures) == (1, 0)
    assert (figures.long_documents, figures.long_tokens) == (1, 9)


@pytest.mark.parametrize("seed, error", [(-1, "--seed -1"), (1 << 32, "--seed 4294967296"), ((1 << 32) - 1, "no such")])
def test_a_seed_is_what_numpy_takes(seed, error):
    with pytest.raises(BFPError, match=error):
        report_command.main(["gone", "--seq-length", "8", "--seed", str(seed)])
