"""The example trainer with an accident that happens at one moment of every run. Run it as ``examples/pretrain_gpt.py``.

The environment variable FAULT is "RANK SIGNAL MOMENT": the rank sends itself the signal. MOMENT is the number of a
micro-batch, whose loss has been computed, or the end of a file's path, of which half is written. With "RANK boundaries
0" the rank loses the document boundaries between batch and model.
"""

import itertools
import os
import signal
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "examples")]

import pretrain_gpt  # noqa: E402
import torch  # noqa: E402

rank, name, moment = os.environ["FAULT"].split()


def strike():
    os.kill(os.getpid(), signal.Signals[name])


def in_a_step(summed_loss, numbers=itertools.count(1)):
    def computed(*arguments):
        loss = summed_loss(*arguments)
        if next(numbers) == int(moment):
            strike()
        return loss

    return computed


def in_a_write(save):
    def written(state, path, *arguments, **keywords):
        save(state, path, *arguments, **keywords)
        if str(path).endswith(moment):
            os.truncate(path, os.path.getsize(path) // 2)
            strike()

    return written


def of_whole_rows(document_boundaries):
    def lost(cu_seqlens, device):
        whole = torch.zeros_like(cu_seqlens)
        whole[:, -1] = cu_seqlens[:, -1]
        return document_boundaries(whole, device)

    return lost


if rank == os.environ["RANK"]:
    if name == "boundaries":
        pretrain_gpt.document_boundaries = of_whole_rows(pretrain_gpt.document_boundaries)
    elif moment.isdigit():
        pretrain_gpt.summed_loss = in_a_step(pretrain_gpt.summed_loss)
    else:
        torch.save = in_a_write(torch.save)
sys.exit(pretrain_gpt.start())
