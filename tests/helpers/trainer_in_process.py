"""The example trainer as one rank in this process: seconds for a run, and a debugger can look at it."""

import contextlib
import io
import os
import signal
from unittest import mock

import deepspeed
from megatron.core import parallel_state
from torch import distributed
from trainer import training
from trainer.ranks import STOP_SIGNALS

from helpers.megatron_helpers import Tokenizer

NEEDED = {"--num-layers": 2, "--hidden-size": 32, "--num-attention-heads": 4, "--ffn-hidden-size": 64}
NEEDED |= {"--micro-batch-size": 2, "--global-batch-size": 4, "--train-iters": 4, "--seq-length": 32}
NEEDED |= {"--split": "1,1,0", "--tokenizer-model": "none", "--num-workers": 0, "--lr": 1e-2}
NEEDED |= {"--make-vocab-size-divisible-by": 8}


class SmallTokenizer(Tokenizer):
    vocab_size = 480


def command_line(prefix, *options):
    """Options of a small run; those that are given replace others. None leaves one out."""
    pairs = {"--data-path": prefix} | NEEDED
    names = [str(option) for option in options]
    return [str(part) for name, value in pairs.items() if name not in names for part in (name, value)] + names


def leave_world():
    """Forget the process groups of this process."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if distributed.is_initialized():
        distributed.destroy_process_group()
    deepspeed.comm.comm.cdb = None


@contextlib.contextmanager
def alone():
    """This process as if no launcher had started it; worlds that it enters are left afterwards."""
    before, handlers = dict(os.environ), {number: signal.getsignal(number) for number in STOP_SIGNALS}
    leave_world()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    try:
        yield
    finally:
        leave_world()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.environ.clear()
        os.environ.update(before)


def run_trainer(prefix, *options, tokenizer=None):
    """A run in this process; returns its exit status and what it printed. Its errors are raised."""
    output = io.StringIO()
    with alone(), contextlib.redirect_stdout(output), mock.patch("sys.argv", ["", *command_line(prefix, *options)]):
        with mock.patch.object(training, "load_tokenizer", lambda *_: tokenizer or SmallTokenizer()):
            status = training.main()
    return status, output.getvalue()
