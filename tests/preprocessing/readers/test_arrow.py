"""Arrow streams and files: every row once, in order, in pieces; damaged and cut files are errors."""

from random import Random

import pytest

pyarrow = pytest.importorskip("pyarrow")

from megatron_bfp.errors import InputError
from megatron_bfp.preprocessing.readers import arrow
from megatron_bfp.preprocessing.readers.documents import BadDocument, Record
from megatron_bfp.preprocessing.readers.inputs import Piece, read_batches

NUM_ROWS, ROWS_A_BATCH = 1200, 100
KINDS = {"stream": pyarrow.ipc.new_stream, "file": pyarrow.ipc.new_file}
KEYS = ["text", "meta.summary"]
WANTED = [[f"text {number} é", f"summary {number}"] for number in range(NUM_ROWS)]


def write(path, kind="stream", in_dictionary=False, compression=None, texts=None):
    texts = pyarrow.array(texts or [text for text, _ in WANTED])
    columns = {
        "number": range(NUM_ROWS),
        "text": texts.dictionary_encode() if in_dictionary else texts,
        "meta": [{"summary": summary} for _, summary in WANTED],
    }
    table = pyarrow.table(columns)
    options = pyarrow.ipc.IpcWriteOptions(compression=compression)
    with KINDS[kind](str(path), table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=ROWS_A_BATCH)
    return str(path)


def records(path, keys=KEYS, begin=0, end=None, first_row=1):
    piece = Piece(path, 1000, begin, end, first_row=first_row)
    return [record for batch, _ in read_batches(piece, keys) for record in batch.records(keys)]


@pytest.mark.parametrize("in_dictionary", [False, True])
@pytest.mark.parametrize("compression", [None, "zstd", "lz4"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_is_read_once_in_order(tmp_path, kind, compression, in_dictionary):
    read = records(write(tmp_path / "a", kind, in_dictionary, compression))
    assert [record.texts for record in read] == WANTED
    assert [record.location.row for record in read] == list(range(1, NUM_ROWS + 1))


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_cover_every_row_once(tmp_path, kind):
    path = write(tmp_path / "a", kind)
    with open(path, "rb") as file:
        batches = arrow.record_batches(file, path)
    assert len(batches) == NUM_ROWS // ROWS_A_BATCH
    random = Random(1)
    for _ in range(5):
        cuts = sorted({0, *random.sample(range(1, len(batches)), 3)})
        read = []
        for first, end in zip(cuts, [*cuts[1:], len(batches)]):
            read += records(path, KEYS, batches[first].begin, batches[end - 1].end, batches[first].first_row)
        assert [record.texts for record in read] == WANTED
        assert [record.location.row for record in read] == list(range(1, NUM_ROWS + 1))
    missing = records(path, KEYS, batches[1].begin, batches[-1].end, batches[1].first_row)
    assert len(missing) == NUM_ROWS - ROWS_A_BATCH


def test_a_file_with_dictionaries_is_not_cut(tmp_path):
    path = write(tmp_path / "a", in_dictionary=True)
    with open(path, "rb") as file:
        assert arrow.record_batches(file, path) is None


def test_a_bad_row_is_a_bad_document(tmp_path):
    texts = [b"a", b"\xff", None] * (NUM_ROWS // 3)
    bad = [
        record for record in records(write(tmp_path / "a", texts=texts), ["text"]) if isinstance(record, BadDocument)
    ]
    assert [str(document).removeprefix(str(tmp_path)) for document in bad[:2]] == [
        "/a: row 2: byte 1 of 'text' is not UTF-8",
        "/a: row 3: 'text' holds null, not text",
    ]
    with pytest.raises(InputError, match="no column 'txt'; its columns are .*; did you mean 'text'"):
        records(str(tmp_path / "a"), ["txt"])
    with pytest.raises(InputError, match="column 'number' holds int64, not text"):
        records(str(tmp_path / "a"), ["number"])


@pytest.mark.parametrize("in_dictionary", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_cut_anywhere_is_an_error(tmp_path, kind, in_dictionary):
    whole = (tmp_path / "a", kind, in_dictionary)
    content = open(write(*whole), "rb").read()
    end = content.rindex(arrow.END) if kind == "file" else len(content) - len(arrow.END)
    for size in [8, 12, end, end + 7, *Random(2).sample(range(9, end), 20)]:
        (tmp_path / "cut").write_bytes(content[:size])
        with pytest.raises(InputError, match="cut: (.*cut off; get a whole copy|damaged or unusual Arrow)"):
            records(str(tmp_path / "cut"))
    (tmp_path / "cut").write_bytes(content[: end + len(arrow.END)])
    assert len(records(str(tmp_path / "cut"))) == NUM_ROWS


@pytest.mark.parametrize("in_dictionary", [False, True])
def test_damaged_files_end_no_process(tmp_path, in_dictionary):
    content = open(write(tmp_path / "a", "stream", in_dictionary), "rb").read()
    random = Random(3)
    for _ in range(60):
        damaged = bytearray(content)
        damaged[random.randrange(8, 6000)] ^= random.randrange(1, 256)
        (tmp_path / "damaged").write_bytes(damaged)
        try:
            read = records(str(tmp_path / "damaged"))
        except InputError as error:
            assert "\n" not in str(error)
        else:
            assert all(isinstance(record, (Record, BadDocument)) for record in read)
