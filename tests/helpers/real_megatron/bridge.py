"""Megatron-Bridge's own pretrain on the CPU: a process that runs it, and what it prints.

The environment variable MEGATRON_BRIDGE_PYTHON names a Python 3.12 with Megatron-Bridge. If MEGATRON_BRIDGE_PATH is
set, it holds folders, separated by colons, that come first: ``src`` of a checkout of Megatron-Bridge, and a checkout of
the Megatron-LM that it goes with.
"""

import json
import os
import re
import subprocess

import pytest

from helpers.datasets import ROOT
from helpers.launching import ENVIRONMENT, free_port

PYTHON = os.environ.get("MEGATRON_BRIDGE_PYTHON")
NEEDS_BRIDGE = pytest.mark.skipif(
    not PYTHON, reason="MEGATRON_BRIDGE_PYTHON does not name a Python with Megatron-Bridge"
)
ON_CPU = ROOT / "tests/integration/megatron_bridge_on_cpu"
STEP = re.compile(r"iteration +(\d+)/ .*consumed samples: +(\d+) .*lm loss: (\S+) .*grad norm: (\S+) ")
WATCHED = re.compile(r"^watched (.*)$", re.MULTILINE)


def environment():
    """What Megatron-Bridge runs in."""
    paths = [os.environ.get("MEGATRON_BRIDGE_PATH"), str(ROOT)]
    return ENVIRONMENT | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TORCHDYNAMO_DISABLE": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NO_VCS_VERSION": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


class Bridge:
    """A process that has imported Megatron-Bridge and runs it as often as it is asked to."""

    def __init__(self):
        command = [PYTHON, str(ON_CPU / "serve.py")]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": None}
        self.process = subprocess.Popen(command, **pipes, text=True, env=environment())
        self.versions = json.loads(self.process.stdout.readline())

    def launch(self, corpus, *overrides, what="plain", ranks=1, **options):
        """The exit status and output of a run; ``options=None`` leaves Megatron-Bridge its own dataset."""
        job = {"what": what, "ranks": ranks, "port": free_port(), "folder": str(corpus), "overrides": overrides}
        job["root"] = str(ROOT)
        job["options"] = options.pop("options", options)
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        reply = json.loads(self.process.stdout.readline())
        return reply["status"], reply["output"]

    def train(self, corpus, *overrides, **keywords):
        """The printed (consumed samples, loss, gradient norm) of each iteration, and the output."""
        status, output = self.launch(corpus, *overrides, **keywords)
        assert status == 0, output[-5000:]
        return {int(iteration): values for iteration, *values in STEP.findall(output)}, output

    def watch(self, corpus, *overrides, **keywords):
        """What a run without evaluation says of itself."""
        _, output = self.train(corpus, "validation.eval_iters=0", *overrides, **keywords)
        return [json.loads(line) for line in WATCHED.findall(output)]

    def end(self):
        self.process.stdin.close()
        self.process.wait(30)


@pytest.fixture(scope="session")
def bridge():
    """Started once for all tests."""
    process = Bridge()
    yield process
    process.end()


def samples_in_order(batches):
    """The digests of the samples that a run read, by sample number; each was read once on each pipeline stage."""
    samples = {}
    for batch in batches:
        for row, digest in enumerate(batch["digests"]):
            assert samples.setdefault(batch["first"] + row, digest) == digest
    return samples
