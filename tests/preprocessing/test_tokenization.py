"""A batch of raw documents: bad ones are named in order, empty ones counted, whatever the tokenizer refuses."""

from types import SimpleNamespace

import numpy as np

from megatron_bfp.preprocessing import task as task_module
from megatron_bfp.preprocessing.plan import Task
from megatron_bfp.preprocessing.progress import Amount
from megatron_bfp.preprocessing.readers.inputs import Piece
from megatron_bfp.preprocessing.readers.jsonl import LineBatch
from megatron_bfp.preprocessing.readers.parquet import RowBatch
from megatron_bfp.preprocessing.task import COMPARED_CHARACTERS, TaskRecord, TaskSettings, TaskWork
from megatron_bfp.preprocessing.tokenization import TokenizedBatch, TokenizedTexts, tokenize
from megatron_bfp.tokenizers.fast.tokenizer import DifferentIds, FastTokenizer
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


class Stripping(Refusing):
    """As a tokenizer whose normalizer removes some characters: of these alone nothing is left."""

    def encode_batch(self, texts):
        return [ids[ids != ord("-")] for ids in super().encode_batch(texts)]


def test_texts_without_a_token_are_empty_documents():
    lines = ['{"text": "a-"}', '{"text": "--"}', '{"text": ""}', '{"text": "\\n"}', '{"text": "b"}']
    tokenized = tokenize(LineBatch("file", 1, 0, "\n".join(lines).encode()), ["text"], Stripping(), NOTHING)
    (of_key,) = tokenized.texts
    assert (of_key.tokens.tolist(), of_key.lengths.tolist()) == ([ord("a"), ord("b")], [1, 1])
    assert of_key.num_empty == 3 and tokenized.bad == ()


def test_a_text_of_each_batch_is_compared_with_the_reference(tmp_path, monkeypatch):
    """Its first characters; where the ids differ, the reference does the task from its beginning."""
    compared = []

    class Fast(Stripping, FastTokenizer):
        vocab_size = 300
        __init__ = object.__init__

        def check(self, texts):
            compared.append(texts)
            if any("bad" in text for text in texts):
                raise DifferentIds("they differ")

    class Reference(Stripping):
        vocab_size = 300

    monkeypatch.setattr(task_module, "load_tokenizers", lambda _: (Reference(), Fast(), None))
    options = SimpleNamespace(template=lambda _: NOTHING)
    for number, (text, library) in enumerate((("good", "gigatoken"), ("bad", "Reference"))):
        path = tmp_path / f"{text}.jsonl"
        path.write_text('{"text": "' + text + "a" * 3000 + '"}\n')
        settings = TaskSettings(str(tmp_path), ("text",), options, False)
        work = TaskWork(Task(number, (Piece(str(path), path.stat().st_size),)), settings)
        work.compute(lambda _: None)
        assert work.finish().library == library
        assert compared.pop() == [(text + "a" * 3000)[:COMPARED_CHARACTERS]] and compared == []
