"""Lines that several ranks write to one pipe."""

import os
import subprocess
import sys

from helpers.datasets import ROOT

TELL = "from megatron_bfp.console import tell; tell('loss 3.5')"
PRINT = "import sys; print('loss 3.5', file=sys.stderr, flush=True)"


def writes_of(program):
    """What each single write to standard error consists of, under PYTHONUNBUFFERED."""
    reading, writing = os.pipe2(os.O_DIRECT)  # keeps writes apart
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program], stderr=writing, env=environment, check=True)
    os.close(writing)
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        return list(iter(lambda: pipe.read(4096), b""))


def test_a_line_is_one_write_so_that_lines_of_several_ranks_do_not_mix():
    assert writes_of(TELL) == [b"loss 3.5\n"]


def test_control_print_writes_the_end_of_a_line_apart():
    assert writes_of(PRINT) == [b"loss 3.5", b"\n"]
