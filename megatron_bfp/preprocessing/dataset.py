"""Texts to PREFIX.bin/.idx: lines are read here, parsed and tokenized in worker processes, and written here in order.

The order of documents is the order of the files and lines given, whatever the number of workers. Only a bounded number
of batches is under way at once, so memory does not grow with the input.
"""

import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context, parent_process
from typing import Any

import numpy as np

from ..errors import InputError
from ..indexed_dataset import IndexedDatasetWriter, optimal_dtype
from ..progress import Progress, without_progress
from .jsonl import LineBatch, read_batches, texts
from .tokenizers import load_tokenizer


@dataclass(frozen=True)
class TokenizerOptions:
    """What a worker process needs to load the tokenizer."""

    tokenizer_type: str
    path: str
    eod_token: str | None
    append_eod: bool

    def load(self) -> Any:
        """The tokenizer.

        Raises:
            OptionError: it cannot be loaded, or has no EOD to append.
        """
        return load_tokenizer(self.tokenizer_type, self.path, self.eod_token, needs_eod=self.append_eod)


@dataclass(frozen=True)
class TokenizedBatch:
    """The documents of a batch of lines."""

    tokens: np.ndarray
    """int32 [sum of lengths]."""
    lengths: np.ndarray
    """int64 [documents], EOD included."""
    num_empty: int
    """Documents without a character but white space; they are left out."""


def write_datasets(
    paths: Sequence[str],
    prefixes: dict[str, str],
    options: TokenizerOptions,
    workers: int = 1,
    progress: Progress = without_progress,
) -> list[int]:
    """Tokenize files of JSON Lines into a dataset for each key: all of them, or none.

    Args:
        prefixes: for each key of the documents' objects, the path of its dataset.

    Returns:
        For each, the number of documents left out because they are empty.

    Raises:
        OptionError: the tokenizer cannot be used.
        InputError: a line is bad, or there is no document at all. No file is left behind.
        IndexedDatasetError: a dataset cannot be written. No file is left behind.
    """
    tokenizer = options.load()
    num_empty = []
    with ExitStack() as stack:
        writers = []
        for key, prefix in prefixes.items():
            writers.append(stack.enter_context(IndexedDatasetWriter(prefix, optimal_dtype(tokenizer.vocab_size))))
            batches = progress((batch for path in paths for batch in read_batches(path)), None, f"tokenizing {key!r}")
            num_empty.append(_write(writers[-1], _tokenized(batches, key, options, tokenizer, workers), paths))
        for writer in writers:
            writer.finalize()
    return num_empty


def _write(writer: IndexedDatasetWriter, batches: Iterable["TokenizedBatch"], paths: Sequence[str]) -> int:
    """Write batches; returns the number of empty documents."""
    num_documents = num_empty = 0
    for batch in batches:
        writer.add(batch.tokens, batch.lengths)
        num_documents += len(batch.lengths)
        num_empty += batch.num_empty
    if not num_documents:
        raise InputError(f"{', '.join(paths)}: 0 documents with text ({num_empty} empty ones); nothing to write")
    return num_empty


def tokenize(batch: LineBatch, key: str, tokenizer: Any, append_eod: bool) -> TokenizedBatch:
    """Parse and tokenize a batch of lines.

    Raises:
        InputError: a line is bad.
    """
    documents = texts(batch, key)
    with_text = [text for text in documents if text and not text.isspace()]
    ids = tokenizer.encode_batch(with_text)
    end = np.array([tokenizer.eod] if append_eod else [], dtype=np.int32)
    pieces = [piece for document in ids for piece in (document, end)]
    lengths = np.array([len(document) + len(end) for document in ids], dtype=np.int64)
    tokens = np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int32)
    return TokenizedBatch(tokens, lengths, len(documents) - len(with_text))


def _tokenized(
    batches: Iterable[LineBatch], key: str, options: TokenizerOptions, tokenizer: Any, workers: int
) -> Iterator[TokenizedBatch]:
    if workers == 1:
        yield from map(partial(tokenize, key=key, tokenizer=tokenizer, append_eod=options.append_eod), batches)
        return
    with ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (key, options)) as executor:
        under_way: deque = deque()
        try:
            for batch in batches:
                under_way.append(executor.submit(_tokenize_in_worker, batch))
                if len(under_way) > 2 * workers:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        except BrokenProcessPool:
            raise InputError("a worker process was killed, perhaps for lack of memory; try fewer --workers") from None
        finally:
            executor.shutdown(wait=True, cancel_futures=True)


def _start_worker(key: str, options: TokenizerOptions) -> None:
    global _tokenize_in_this_process
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's business
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    _tokenize_in_this_process = partial(tokenize, key=key, tokenizer=options.load(), append_eod=options.append_eod)


def _end_with_the_parent() -> None:
    """A worker whose parent was killed would wait for work for ever."""
    parent_process().join()
    os._exit(1)


def _tokenize_in_worker(batch: LineBatch) -> TokenizedBatch:
    return _tokenize_in_this_process(batch)
