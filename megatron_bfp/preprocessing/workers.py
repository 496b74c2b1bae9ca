"""Batches to tokenized batches by worker processes, in the order of the batches.

Only a bounded number of batches is under way at once, so memory does not grow with the input.
"""

import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context, parent_process

from ..errors import InputError
from .documents import Batch
from .tokenization import TokenizedBatch, TokenizerOptions, tokenize
from .tokenizer_interface import Tokenizer


def tokenized(
    batches: Iterable[Batch], keys: Sequence[str], options: TokenizerOptions, tokenizer: Tokenizer, workers: int
) -> Iterator[TokenizedBatch]:
    """Tokenize batches, with one worker in this process.

    Args:
        tokenizer: what ``options`` load.

    Raises:
        InputError: an input cannot be read, or a worker was killed.
        OptionError: a library that an input needs is not installed.
    """
    if workers == 1:
        yield from map(partial(tokenize, keys=keys, tokenizer=tokenizer, append_eod=options.append_eod), batches)
        return
    with ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (keys, options)) as executor:
        under_way: deque = deque()
        try:
            for batch in batches:
                with _signals_held():
                    under_way.append(executor.submit(_tokenize_in_worker, batch))
                if len(under_way) > 2 * workers:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        except BrokenProcessPool:
            raise InputError("a worker process was killed, perhaps for lack of memory; try fewer --workers") from None
        finally:
            executor.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _signals_held() -> Iterator[None]:
    """Hold back Ctrl-C and SIGTERM here, and for ever in processes started meanwhile: they are the parent's business.

    Both may reach a whole group of processes. The parent then ends the workers, without a traceback from each.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(keys: Sequence[str], options: TokenizerOptions) -> None:
    global _tokenize_in_this_process
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    _tokenize_in_this_process = partial(tokenize, keys=keys, tokenizer=options.load(), append_eod=options.append_eod)


def _end_with_the_parent() -> None:
    """A worker whose parent was killed would wait for work for ever."""
    parent_process().join()
    os._exit(1)


def _tokenize_in_worker(batch: Batch) -> TokenizedBatch:
    return _tokenize_in_this_process(batch)
