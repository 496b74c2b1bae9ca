"""A batch of raw documents: bad ones are named in order, empty ones counted, whatever the tokenizer refuses."""

import numpy as np

from megatron_bfp.preprocessing.progress import Amount
from megatron_bfp.preprocessing.readers.jsonl import LineBatch
from megatron_bfp.preprocessing.readers.parquet import RowBatch
from megatron_bfp.preprocessing.task import TaskRecord
from megatron_bfp.preprocessing.tokenization import TokenizedBatch, TokenizedTexts, tokenize
from megatron_bfp.tokenizers.interface import TokenizingError


class Refusing:
    """Encodes a text as its characters, and refuses those with an x."""

    eod = 0

    def encode_batch(self, texts):
        if any("x" in text for text in texts):
            raise TokenizingError("x is refused")
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]


class NoSpecialTokens:
    """Around documents."""

    before = after = ()

    def __bool__(self):
        return False


NOTHING = NoSpecialTokens()


def test_bad_documents_of_a_batch_are_in_the_order_of_lines():
    lines = ['{"text": "x1"}', "bad", '{"text": "a"}', '{"text": "x2"}', "[]", '{"text": " "}', '{"text": "x3"}']
    tokenized = tokenize(LineBatch("file", 5, 0, "\n".join(lines).encode()), ["text"], Refusing(), NOTHING)
    assert [document.location.line for document in tokenized.bad] == [5, 6, 8, 9, 11]
    assert (tokenized.num_documents, tokenized.texts[0].num_empty) == (7, 1)
    assert tokenized.texts[0].tokens.tolist() == [ord("a")] and tokenized.sample in (("a",), (" ",))


def test_bad_documents_of_a_batch_are_in_the_order_of_rows():
    columns = ([b"x", None, b"a", b"x", b"\xff", b"b"],)
    tokenized = tokenize(RowBatch("file", 1, columns, 6), ["text"], Refusing(), NOTHING)
    assert [document.location.row for document in tokenized.bad] == [1, 2, 4, 5]
    assert tokenized.texts[0].lengths.tolist() == [1, 1]


def texts(tokens, lengths, num_empty):
    return TokenizedTexts(np.array(tokens, np.int32), np.array(lengths), num_empty)


def test_a_record_adds_up_all_batches():
    batch = LineBatch("file", 1, 0, b'{"text": "a"}\n\n')
    record = TaskRecord.empty(2, 2, "library", None)
    bad = tokenize(LineBatch("file", 1, 0, b"bad\n"), ["text"], Refusing(), NOTHING).bad
    first = TokenizedBatch((texts([1, 2, 3], [2, 1], 4), texts([1], [1], 5)), bad, 7, ())
    second = TokenizedBatch((texts([1], [1], 1), texts([2, 2], [2], 2)), (), 2, ())
    assert record.add(0, batch, first, 10.0) == Amount(7, batch.num_bytes, 4, 10.0)
    record.add(1, batch, second, 5.0)
    record.add(1, batch, second, 5.0)
    assert (record.num_documents, record.num_empty, record.num_tokens) == ([4, 3], [6, 9], [5, 5])
    assert record.num_lines == [2, 4] and record.bad == [(0, bad[0])]
    assert record.amount == Amount(11, 3 * batch.num_bytes, 10, 20.0)
