"""Counts of cut documents, and the table they are shown in."""

import dataclasses

import numpy as np
from conftest import documents_of
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bfp import report
from megatron_bfp.index_building import build
from megatron_bfp.index_format import IndexKey, index_directory


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 30), max_size=40), st.integers(1, 20), st.integers(1, 7))
def test_cuts_of_concatenation_are_those_of_a_plain_count(lengths, seq_length, block):
    position, documents, needlessly = 0, 0, 0
    for length in lengths:
        sequences = {token // seq_length for token in range(position, position + length)}
        documents += len(sequences) > 1
        needlessly += len(sequences) > 1 and length <= seq_length
        position += length
    original, report.BLOCK = report.BLOCK, block
    try:
        found = report.cut_by_concatenation(np.array(lengths, dtype=np.int32), seq_length)
    finally:
        report.BLOCK = original
    assert found == report.Truncation(documents, needlessly)


def test_packing_cuts_only_what_is_too_long(write_dataset):
    dataset = write_dataset(documents_of([3, 8, 9, 16, 0, 7, 25]))
    index = build(dataset, IndexKey(8, 0, 7), index_directory(dataset.prefix))
    assert report.cut_by_packing(index) == report.Truncation(documents=3, needlessly=0)
    index = build(dataset, IndexKey(8, 5, 6), index_directory(dataset.prefix))
    assert report.cut_by_packing(index) == report.Truncation(0, 0)


def test_packing_s_cuts_are_counted_from_the_index(write_dataset):
    dataset = write_dataset(documents_of([3, 4, 5]))
    index = build(dataset, IndexKey(8, 0, 3), index_directory(dataset.prefix))
    forged = dataclasses.replace(index.table, document_ids=np.array([1, 2, 1], dtype=np.uint32))
    index.table = forged
    assert report.cut_by_packing(index) == report.Truncation(documents=1, needlessly=1)


def test_a_table_aligns_numbers_to_the_right():
    table = report.format_table(["name", "tokens"], [["a", 1234567], ["longer", 8]])
    assert table.splitlines() == ["name       tokens", "------  ---------", "a       1,234,567", "longer          8"]
