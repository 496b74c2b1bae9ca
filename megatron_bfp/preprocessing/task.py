"""One shard to a folder of its own: a small dataset for each key and a record of what happened.

A shard's folder gets its name when it is complete, so what has the name is done, whoever made it and however often it
was tried.
"""

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial

from ..errors import InputError
from ..files import sync_file, write_whole
from ..indexed_dataset.format import optimal_dtype
from ..indexed_dataset.writer import IndexedDatasetWriter
from ..tokenizers.fast.tokenizer import DifferentIds, FastTokenizer, NoFastTokenizer, load_fast_tokenizer
from ..tokenizers.interface import Tokenizer, TokenizingError
from ..tokenizers.registry import TokenizerOptions
from .plan import Shard
from .progress import Amount
from .readers.documents import BadDocument, Batch, Place
from .readers.inputs import read_batches
from .tokenization import TokenizedBatch, tokenize

RECORD = "record"
COMPARED_CHARACTERS = 2048
"""Of one document in each batch, tokenized by the reference too: 0.1 % of the text, at some 5 % of the time."""

Report = Callable[[Amount], None]


@dataclass(frozen=True)
class ShardWork:
    """What is the same for all shards of a run."""

    folder: str
    keys: tuple[str, ...]
    tokenizer: TokenizerOptions
    skip_bad_documents: bool


@dataclass
class ShardRecord:
    """What is known of a shard."""

    num_documents: list[int]
    """[keys]; those that were written."""
    num_empty: list[int]
    """[keys]."""
    num_tokens: list[int]
    """[keys]."""
    num_lines: list[int]
    """[pieces]."""
    library: str
    """What made the token ids."""
    remark: str | None
    """Why the fast library did not."""
    amount: Amount = field(default_factory=Amount)
    bad: list[tuple[int, BadDocument]] = field(default_factory=list)
    """Each with the number of its piece. Lines are counted from the piece's first."""

    @classmethod
    def empty(cls, num_keys: int, num_pieces: int, library: str, remark: str | None) -> "ShardRecord":
        """The record of a shard that is begun."""
        return cls([0] * num_keys, [0] * num_keys, [0] * num_keys, [0] * num_pieces, library, remark)

    def add(self, piece: int, batch: Batch, found: TokenizedBatch, input_bytes: float) -> Amount:
        """Count a batch of a piece; returns how much it was."""
        for key, texts in enumerate(found.texts):
            self.num_documents[key] += len(texts.lengths)
            self.num_empty[key] += texts.num_empty
            self.num_tokens[key] += len(texts.tokens)
        self.num_lines[piece] += batch.num_lines
        self.bad += [(piece, document) for document in found.bad]
        num_tokens = sum(len(texts.tokens) for texts in found.texts)
        amount = Amount(found.num_documents, batch.num_bytes, num_tokens, input_bytes)
        self.amount += amount
        return amount


class BadDocumentFound(Exception):
    """A document cannot be used, and is not to be left out.

    Args:
        shard: number of its shard.
        record: what is known of the shard up to the document.
    """

    def __init__(self, shard: int, record: ShardRecord) -> None:
        super().__init__(shard, record)
        self.shard, self.record = shard, record


def shard_folder(folder: str, number: int) -> str:
    """Where a finished shard is."""
    return os.path.join(folder, f"{number:06d}")


def shard_prefix(folder: str, number: int, key: int) -> str:
    """The path of a finished shard's dataset for a key, given by its number."""
    return os.path.join(shard_folder(folder, number), str(key))


def read_record(folder: str, number: int) -> ShardRecord:
    """The record of a finished shard.

    Raises:
        InputError: it cannot be read.
    """
    path = os.path.join(shard_folder(folder, number), RECORD)
    try:
        with open(path, encoding="utf-8") as file:
            values = json.load(file)
        bad = [(piece, BadDocument(Place(*place), reason)) for piece, (place, reason) in values.pop("bad")]
        return ShardRecord(**values | {"amount": Amount(**values["amount"]), "bad": bad})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(f"{path}: cannot be read ({error}); remove {shard_folder(folder, number)}") from None


def write_shard(shard: Shard, report: Report, work: ShardWork) -> Callable[[], ShardRecord]:
    """Tokenize a shard.

    Args:
        report: is told of each batch.

    Returns:
        What forces the shard to disk and gives it its name, unless another process did it meanwhile.

    Raises:
        BadDocumentFound: a document cannot be used, and is not to be left out.
        InputError: an input cannot be read, or the folder cannot be written; what is returned raises it, too.
        OptionError: the tokenizer or a library cannot be used.
        IndexedDatasetError: the shard cannot be written; what is returned raises it, too.
    """
    reference, fast, reason = load_tokenizers(work.tokenizer)
    target = shard_folder(work.folder, shard.number)
    # Containers share host names and process numbers, and a worker that was taken for lost may still write this shard.
    temporary = f"{target}.{secrets.token_hex(8)}-{os.getpid()}.part"
    with _disk_errors_as_ours(target), ExitStack() as unfinished:
        unfinished.callback(shutil.rmtree, temporary, ignore_errors=True)
        try:
            record, writers = _fill(temporary, shard, work, fast or reference, report, reason)
        except DifferentIds as difference:
            record, writers = _fill(temporary, shard, work, reference, report, f"{shard}: {difference}")
        for writer in writers:
            unfinished.enter_context(writer)
        return partial(_finish, unfinished.pop_all(), temporary, target, record, writers)


def _finish(
    unfinished: ExitStack, temporary: str, target: str, record: ShardRecord, writers: list[IndexedDatasetWriter]
) -> ShardRecord:
    with _disk_errors_as_ours(target), unfinished:
        for writer in writers:
            writer.finalize()
        write_whole(os.path.join(temporary, RECORD), json.dumps(asdict(record)).encode())
        sync_file(temporary)
        try:
            os.rename(temporary, target)
        except OSError:
            if not os.path.exists(os.path.join(target, RECORD)):  # it is not that another process did the shard
                raise
    return record


@contextmanager
def _disk_errors_as_ours(target: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"{error.filename or target}: cannot be written: {error.strerror}") from None


@lru_cache(maxsize=1)
def load_tokenizers(options: TokenizerOptions) -> tuple[Tokenizer, FastTokenizer | None, str | None]:
    """The reference, and the fast tokenizer or why there is none. Loaded once in a process and its forks.

    Raises:
        OptionError: the reference cannot be loaded.
    """
    reference = options.load()
    try:
        return reference, load_fast_tokenizer(reference), None
    except NoFastTokenizer as reason:
        return reference, None, str(reason)


def _fill(
    folder: str, shard: Shard, work: ShardWork, tokenizer: Tokenizer, report: Report, remark: str | None
) -> tuple[ShardRecord, list[IndexedDatasetWriter]]:
    """Write a shard's tokens to a folder, anew; returns writers that are to be finalized, for each key.

    Raises:
        DifferentIds: the fast tokenizer gives other ids than the reference.
    """
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    library = "gigatoken" if isinstance(tokenizer, FastTokenizer) else type(tokenizer).__name__
    record = ShardRecord.empty(len(work.keys), len(shard.pieces), library, remark)
    dtype, template = optimal_dtype(tokenizer.vocab_size), work.tokenizer.template(tokenizer)
    with ExitStack() as stack:
        paths = [os.path.join(folder, str(key)) for key in range(len(work.keys))]
        writers = [stack.enter_context(IndexedDatasetWriter(path, dtype)) for path in paths]
        for number, piece in enumerate(shard.pieces):
            share_before = 0.0
            for batch, share in read_batches(piece, work.keys):
                found = tokenize(batch, work.keys, tokenizer, template)
                _compare(tokenizer, found)
                for writer, texts in zip(writers, found.texts, strict=True):
                    writer.add(texts.tokens, texts.lengths)
                report(record.add(number, batch, found, (share - share_before) * piece.num_bytes))
                share_before = share
                if record.bad and not work.skip_bad_documents:
                    raise BadDocumentFound(shard.number, record)
        stack.pop_all()
    return record, writers


def _compare(tokenizer: Tokenizer, batch: TokenizedBatch) -> None:
    """Compare the start of one document of the batch with the reference, where the tokenizer is the fast one."""
    if isinstance(tokenizer, FastTokenizer):
        with suppress(TokenizingError):  # of the start alone: all of it could be encoded
            tokenizer.check([text[:COMPARED_CHARACTERS] for text in batch.sample])
