"""Packing is exactly best-fit decreasing, loses nothing and cuts nothing but what is longer than a sequence."""

from collections import Counter

import numpy as np
import pytest
from helpers.datasets import DATA
from helpers.oracle import best_fit_decreasing, best_fit_decreasing_capped, chunk_lengths
from helpers.packings import assert_whole, random_lengths
from hypothesis import given, settings
from hypothesis import strategies as st

import megatron_bfp
from megatron_bfp.packing import best_fit, census, placing, table
from megatron_bfp.packing.table import first_above
from megatron_bfp.sequence_index.key import IndexKey

SEQ_LENGTHS = [1, 2, 3, 7, 64, 100, 1000, 1023, 1024, 2047, 2048, 4097, 5000]


@pytest.mark.case(14)
def test_packing_equals_the_oracle_on_2000_random_inputs():
    rng = np.random.default_rng(2024)
    for round_number in range(2000):
        seq_length = int(rng.choice(SEQ_LENGTHS)) if round_number % 2 else int(rng.integers(1, 5001))
        lengths = random_lengths(rng, seq_length)
        packing = megatron_bfp.pack(lengths, seq_length)
        oracle = best_fit_decreasing(lengths.tolist(), seq_length)
        assert packing.num_sequences == len(oracle)
        assert_whole(packing, lengths, seq_length)
        if round_number % 10 == 0:  # not only as many sequences: the same ones, but for which document is which
            ours = Counter(tuple(sorted(packing[i][:, 2].tolist())) for i in range(len(packing)))
            assert ours == Counter(tuple(sorted(sequence)) for sequence in oracle)


@pytest.mark.case(16)
@pytest.mark.parametrize("cap", [1, 2, 3, 8])
def test_a_cap_equals_the_per_document_algorithm_with_its_tie_rule(cap):
    rng = np.random.default_rng(cap)
    for _ in range(500):
        seq_length = int(rng.integers(1, 200))
        lengths = random_lengths(rng, seq_length)[:80]
        packing = megatron_bfp.pack(lengths, seq_length, max_documents_per_sequence=cap)
        assert packing.num_sequences == len(best_fit_decreasing_capped(lengths.tolist(), seq_length, cap))
        assert all(len(packing[i]) <= cap for i in range(len(packing)))
        assert_whole(packing, lengths, seq_length)


@pytest.mark.case(15)
@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 70), max_size=60), st.integers(1, 40), st.none() | st.integers(1, 5))
def test_every_chunk_is_in_exactly_one_sequence(lengths, seq_length, cap):
    packing = megatron_bfp.pack(lengths, seq_length, cap)
    assert_whole(packing, lengths, seq_length)
    assert packing.num_tokens == sum(lengths)
    assert packing.padding == packing.num_sequences * seq_length - sum(lengths)


def test_the_figure_of_the_paper():
    packing = megatron_bfp.pack([14, 7, 5, 2, 3], 8)
    assert [packing[i].tolist() for i in range(len(packing))] == [
        [[0, 0, 8]],
        [[1, 0, 7]],
        [[0, 8, 6], [3, 0, 2]],
        [[2, 0, 5], [4, 0, 3]],
    ]


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
def test_any_integer_dtype_gives_the_same_packing(dtype):
    lengths = np.random.default_rng(1).integers(0, 120, 5000)
    for seq_length in (7, 100, 127, 128, 255, 256, 32768, 65536, 70000):
        expected = megatron_bfp.pack(lengths, seq_length)
        packing = megatron_bfp.pack(lengths.astype(dtype), seq_length)
        assert packing.num_sequences == expected.num_sequences
        assert np.array_equal(packing.table.runs, expected.table.runs)
        assert np.array_equal(packing.table.document_ids, expected.table.document_ids)


@pytest.mark.parametrize("seq_length", [13, 2048, 65536, 65537, 100_000])
def test_blocks_change_nothing(seq_length, monkeypatch):
    lengths = np.load(DATA / "text_lengths.npy")[:20_000]
    whole = megatron_bfp.pack(lengths, seq_length)
    monkeypatch.setattr(census, "BLOCK", 1 << 10)
    blocks = megatron_bfp.pack(lengths, seq_length)
    for name in ("runs", "document_ids", "long_documents"):
        assert np.array_equal(getattr(whole.table, name), getattr(blocks.table, name))


@pytest.mark.case(15)
@pytest.mark.parametrize("name, seq_length", [("text", 2048), ("text", 8192), ("code", 2048), ("code", 8192)])
def test_real_lengths_pack_to_within_a_few_sequences_of_the_bound(name, seq_length):
    lengths = np.load(DATA / f"{name}_lengths.npy")
    packing = megatron_bfp.pack(lengths, seq_length)
    bound = -(-int(lengths.sum()) // seq_length)
    assert bound <= packing.num_sequences <= bound * 1.001
    assert packing.num_sequences == len(best_fit_decreasing(lengths.tolist(), seq_length))
    assert len(packing.table.runs) < 3 * seq_length


def test_documents_of_one_length_of_no_length_and_no_documents():
    assert len(megatron_bfp.pack([], 8)) == 0
    assert len(megatron_bfp.pack([0, 0], 8)) == 0
    assert megatron_bfp.pack([0, 0, 3], 8).census.num_empty == 2
    packing = megatron_bfp.pack([8] * 3, 8)
    assert [packing[i].tolist() for i in range(3)] == [[[0, 0, 8]], [[1, 0, 8]], [[2, 0, 8]]]
    packing = megatron_bfp.pack([3], 1)
    assert [packing[i].tolist() for i in range(3)] == [[[0, 0, 1]], [[0, 1, 1]], [[0, 2, 1]]]


def full_chunks(kind, size, generator):
    """Full chunks of each document that has some: as in any corpus, sorted by length, a few far longer, one each."""
    return {
        "any": generator.integers(1, 4, size),
        "sorted": np.sort(generator.integers(1, 1000, size)),
        "heavy tail": (generator.pareto(0.5, size) * 3).astype(np.int64) + 1,
        "one each": np.ones(size, np.int64),
    }[kind]


@pytest.mark.parametrize("kind", ["any", "sorted", "heavy tail", "one each"])
def test_the_document_of_a_full_chunk_is_found_as_by_bisection(kind):
    generator = np.random.default_rng(len(kind))
    for size in (1, 2, 511, 512, 513, 514, 1024, 5000, 60_000):
        ends = np.cumsum(full_chunks(kind, size, generator))
        table = np.stack([np.arange(size), ends], axis=1)
        for value in (0, int(ends[-1]) - 1, *ends[:-1][-2:].tolist(), *generator.integers(0, ends[-1], 50).tolist()):
            assert first_above(table[:, 1], value) == np.searchsorted(ends, value, side="right")


def test_the_document_of_a_full_chunk_is_found_with_few_reads_of_pages():
    """Bisection of 4 M documents takes 22 steps, the last eight of them in one page."""
    ends = np.cumsum(np.random.default_rng(3).integers(1, 4, 1 << 22))

    class Probed:
        def __init__(self):
            self.pages = set()

        def __len__(self):
            return len(ends)

        def __getitem__(self, item):
            first, last = (item.start, item.stop - 1) if isinstance(item, slice) else (item, item)
            self.pages |= {first % len(ends) // 256, last % len(ends) // 256}
            return ends[item]

    for value in np.random.default_rng(4).integers(0, ends[-1], 100).tolist():
        probed = Probed()
        assert first_above(probed, value) == np.searchsorted(ends, value, side="right")
        assert len(probed.pages) <= 10


def test_damaged_counts_of_full_chunks_do_not_make_the_search_endless():
    generator = np.random.default_rng(5)
    for _ in range(50):
        counts = generator.integers(-(2**62), 2**62, 10_000)
        assert 0 <= first_above(counts, int(generator.integers(0, 2**40))) < 10_000


@pytest.mark.case(30)
@pytest.mark.parametrize("index", [-5, 4, 100])
def test_a_sequence_that_is_not_there_is_an_index_error(index):
    with pytest.raises(IndexError):
        megatron_bfp.pack([14, 7, 5, 2, 3], 8)[index]


@pytest.mark.parametrize(
    "arguments, named",
    [
        (([3, -1], 8), "document 1"),
        (([3.0], 8), "float64"),
        (([[3]], 8), "1-d"),
        (([[3], [3, 4]], 8), "1-d"),
        ((np.array([1, 1 << 63], dtype=np.uint64), 8), "document 1"),
        (([3], 0), "seq_length"),
        (([3], 2.0), "seq_length"),
        (([3], True), "seq_length"),
        (([3], (1 << 24) + 1), "seq_length must be an integer from 1 to 16,777,216"),
        (([3], 8, 0), "max_documents_per_sequence"),
    ],
)
def test_bad_arguments_are_named(arguments, named):
    with pytest.raises(megatron_bfp.OptionError, match=named):
        megatron_bfp.pack(*arguments)


def test_fault_C10_the_last_sequence_and_slices():
    packing = megatron_bfp.pack([14, 7, 5, 2, 3], 8)
    assert packing[-1].tolist() == packing[3].tolist() == [[2, 0, 5], [4, 0, 3]]
    assert packing[-4].tolist() == packing[0].tolist() == packing[np.int64(0)].tolist()
    assert [chunks.tolist() for chunks in packing[1:3]] == [packing[1].tolist(), packing[2].tolist()]
    assert [len(chunks) for chunks in packing[::-1]] == [2, 2, 1, 1] and packing[4:] == []
    assert [chunks.tolist() for chunks in packing] == [packing[i].tolist() for i in range(4)]
    with pytest.raises(TypeError):
        packing[1.0]


def test_fault_C10_a_packing_is_printed_in_one_line():
    packing = megatron_bfp.pack(np.arange(10_000), 64)
    assert repr(megatron_bfp.pack([14, 7, 5, 2, 3], 8)) == (
        "Packing(5 documents, 31 tokens in 4 sequences of 8, padding 1)"
    )
    assert len(repr(packing)) < 100
    assert packing == packing and packing != megatron_bfp.pack([1], 8) and len({packing}) == 1


@pytest.mark.parametrize("seq_length", [(1 << 24) + 1, (1 << 31) - 1, 1 << 62])
def test_fault_B09_a_sequence_is_not_longer_than_memory_can_hold(seq_length):
    for refuse in (lambda: megatron_bfp.pack([3], seq_length), lambda: IndexKey(seq_length, 0, 1)):
        with pytest.raises(megatron_bfp.OptionError, match=f"from 1 to 16,777,216 tokens, got {seq_length}"):
            refuse()


def test_fault_B09_the_longest_sequence_is_taken():
    assert IndexKey(1 << 24, 0, 1).name == "s16777216-d0-1"


@pytest.mark.slow
def test_fault_B09_the_longest_sequence_can_be_packed():
    assert len(megatron_bfp.pack([3, 1 << 24, (1 << 24) + 5], 1 << 24)) == 3


def test_fault_D01_runs_assembled_in_pieces_are_the_same(monkeypatch):
    """With pieces of a few ids, a run is assembled in many steps, and each takes its own share of every move."""
    rng = np.random.default_rng(11)
    for seq_length, lengths in ((64, rng.integers(0, 70, 3000)), (13, np.full(500, 4)), (8, rng.integers(1, 9, 900))):
        for cap in (None, 2):
            whole = megatron_bfp.pack(lengths, seq_length, cap)
            for piece in (1, 3, 10, 1000):
                monkeypatch.setattr(placing, "PIECE", piece)
                pieces = megatron_bfp.pack(lengths, seq_length, cap)
                assert np.array_equal(pieces.table.document_ids, whole.table.document_ids)
                assert_whole(pieces, lengths, seq_length)
            monkeypatch.undo()


def test_fault_D01_pieces_are_no_longer_than_asked_for(monkeypatch):
    monkeypatch.setattr(placing, "PIECE", 10)
    runs = best_fit.plan_runs(np.array([0, 0, 0, 100, 0, 0, 0, 0]), 8)
    pieces = list(placing.place_documents(runs, np.arange(100)))
    assert [len(piece) for piece in pieces] == [10] * 10 and np.concatenate(pieces).tolist() == list(range(100))


@pytest.mark.parametrize(
    "seq_length, dtype", [(1 << 16, np.uint16), ((1 << 16) + 1, np.uint32), (1 << 17, np.uint32), (257, np.uint16)]
)
def test_fault_D02_remainders_are_kept_in_a_dtype_that_holds_them(seq_length, dtype):
    lengths = np.array([seq_length - 1, seq_length, seq_length + 1, 3 * seq_length - 1, 0], dtype=np.int64)
    remainders = census.remainder_lengths(lengths, seq_length)
    assert remainders.tolist() == [seq_length - 1, 0, 1, seq_length - 1, 0]
    assert remainders.dtype == dtype


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int16])
def test_fault_D02_a_sequence_as_long_as_the_dtype_s_largest_value(dtype):
    largest = int(np.iinfo(dtype).max)
    for seq_length in (largest - 1, largest, largest + 1):
        lengths = np.array([largest, 1, largest - 1, largest, 2], dtype=dtype)
        narrow, wide = (megatron_bfp.pack(values, seq_length) for values in (lengths, lengths.astype(np.int64)))
        assert_whole(narrow, lengths, seq_length)
        assert len(narrow) == len(wide) == len(best_fit_decreasing(lengths.tolist(), seq_length))
        assert len(narrow.census.long_documents) == int((lengths.astype(int) >= seq_length).sum())


def test_fault_D02_document_ids_below_2_to_the_32_are_32_bits():
    bound = 1 << 32
    assert table.id_dtype(bound - 1) == table.id_dtype(bound) == np.uint32
    assert table.id_dtype(bound + 1) == np.uint64


def test_fault_D02_the_longest_document():
    longest = census.LONGEST_DOCUMENT
    assert census.take_census(np.array([1, longest]), 1 << 16).num_tokens == longest + 1
    with pytest.raises(megatron_bfp.OptionError, match="document 1 has the length"):
        census.take_census(np.array([1, longest + 1]), 1 << 16)


def test_fault_D03_a_table_has_no_sequence_behind_the_last():
    table = megatron_bfp.pack([14, 7, 5, 2, 3], 8).table
    for sequence in (-1, table.num_sequences, table.num_sequences + 1):
        with pytest.raises(IndexError, match=r"is not in \[0, 4\)"):
            table.entry(sequence)
    assert table.entry(table.num_sequences - 1).documents.tolist() == [2, 4]
    only_full = megatron_bfp.pack([16], 8).table
    with pytest.raises(IndexError):
        only_full.entry(2)


def test_the_oracle_chunks_as_the_paper_does():
    assert chunk_lengths([0, 5, 16, 17], 8) == [5, 8, 8, 8, 8, 1]


@pytest.mark.parametrize("value", [True, False, 0, -1, 2.0, "2", 1 << 31])
def test_what_is_no_count_is_no_cap(value):
    """A flag that was meant for another option is not the number 1."""
    assert len(megatron_bfp.pack([1, 1, 1], 8, 1)) == 3
    with pytest.raises(megatron_bfp.OptionError, match="max_documents_per_sequence must be an integer from 1"):
        megatron_bfp.pack([1, 1, 1], 8, value)
