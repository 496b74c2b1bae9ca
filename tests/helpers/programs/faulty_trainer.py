"""The example trainer with an accident that happens at one moment of every run. Run it as ``examples/pretrain_gpt.py``.

The environment variable FAULT is "RANK WHAT MOMENT". WHAT is a signal that the process sends itself, or RAISE for an
exception that nobody expects. MOMENT is one of

    the number of a micro-batch     its loss has been computed
    the end of a file's path        half of it is written
    worker                          a process that reads samples has read a few
    evaluation, dataset, load       in it, before anything is done
    exit                            the run is done, and Python ends

With "RANK boundaries 0" the rank loses the document boundaries between batch and model.
If FAULT_TIME is there too, it is a file that gets the time of the accident.
"""

import atexit
import itertools
import os
import signal
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[3]), str(Path(__file__).parents[3] / "examples")]

import torch
from torch.utils.data import get_worker_info
from trainer import data, training

rank, what, moment = os.environ["FAULT"].split()
READ_BEFORE = 5


def strike(*arguments, **keywords):
    if "FAULT_TIME" in os.environ and not os.path.exists(os.environ["FAULT_TIME"]):
        Path(os.environ["FAULT_TIME"]).write_text(str(time.time()))
    if what == "RAISE":
        raise RuntimeError("an accident")
    os.kill(os.getpid(), signal.Signals[what])


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


def in_a_worker(getitem, numbers=itertools.count(1)):
    def read(dataset, idx):
        if get_worker_info() is not None and get_worker_info().id == 0 and next(numbers) > READ_BEFORE:
            strike()
        return getitem(dataset, idx)

    return read


def of_whole_rows(document_boundaries):
    def lost(cu_seqlens, device):
        whole = torch.zeros_like(cu_seqlens)
        whole[:, -1] = cu_seqlens[:, -1]
        return document_boundaries(whole, device)

    return lost


if rank == os.environ["RANK"]:
    if what == "boundaries":
        training.document_boundaries = of_whole_rows(training.document_boundaries)
    elif moment.isdigit():
        training.summed_loss = in_a_step(training.summed_loss)
    elif moment == "worker":
        data.BFPGPTDataset.__getitem__ = in_a_worker(data.BFPGPTDataset.__getitem__)
    elif moment == "evaluation":
        training.evaluate = strike
    elif moment == "dataset":
        data._check_data = strike
    elif moment == "exit":
        atexit.register(strike)
    elif moment == "load":
        training.find_checkpoint = strike
    else:
        torch.save = in_a_write(torch.save)
training.start()
