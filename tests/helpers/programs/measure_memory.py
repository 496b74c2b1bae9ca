"""Train as examples/pretrain_gpt.py does, and print by how much the memory of this rank grew at most, in bytes.

Counted is anonymous memory, from before the model is built. Every tensor of some size is a map of its own
(MALLOC_MMAP_THRESHOLD_), which goes back to the system when the tensor is freed.
"""

import re
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

from torch import distributed
from trainer import training
from trainer.process import run_rank

PAUSE = 0.001


def anonymous_memory():
    """Bytes of this process that are in memory and in no file."""
    with open("/proc/self/status", encoding="ascii") as file:
        return 1024 * int(re.search(r"RssAnon:\s+(\d+) kB", file.read())[1])


class Sampler(threading.Thread):
    """Reads the memory again and again."""

    def __init__(self):
        super().__init__(daemon=True)
        self.before = self.most = anonymous_memory()

    def run(self):
        while True:
            self.most = max(self.most, anonymous_memory())
            time.sleep(PAUSE)


build_engine, samplers = training.build_engine, []


def build_engine_and_watch(*arguments):
    samplers.append(Sampler())
    samplers[0].start()
    return build_engine(*arguments)


training.build_engine = build_engine_and_watch


def train_and_measure():
    training.main()
    print(f"rank {distributed.get_rank()} measured {samplers[0].most - samplers[0].before}", flush=True)


run_rank(train_and_measure, "measure_memory")
distributed.destroy_process_group()
