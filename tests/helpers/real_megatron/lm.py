"""Megatron-LM's own pretrain_gpt.py from a real checkout, on the CPU: a copy of the checkout, and runs of it.

The environment variable MEGATRON_LM_PATH names the checkout.
"""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from helpers.datasets import ROOT
from helpers.launching import ENVIRONMENT, free_port

CHECKOUT = os.environ.get("MEGATRON_LM_PATH")
NEEDS_CHECKOUT = pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_LM_PATH does not name a checkout of Megatron-LM")
ON_CPU = ROOT / "tests/integration/megatron_lm_on_cpu"
STEP = re.compile(r"iteration +(\d+)/ .*consumed samples: +(\d+) .*lm loss: (\S+) .*grad norm: (\S+) ")
WATCHED = re.compile(r"^watched (.*)$", re.MULTILINE)

MODEL = """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2
    --seq-length 128 --max-position-embeddings 128 --swiglu --normalization RMSNorm --disable-bias-linear
    --position-embedding-type rope --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --micro-batch-size 2 --global-batch-size 8 --train-iters 10 --lr 3e-3 --lr-warmup-iters 2 --lr-decay-iters 10
    --min-lr 1e-4 --seed 1234 --tokenizer-type NullTokenizer --vocab-size 512
    --make-vocab-size-divisible-by 300 --calculate-per-token-loss
    --log-interval 1 --eval-interval 1000 --eval-iters 2 --num-workers 0 --ckpt-format torch"""
FOR_CPU = """--transformer-impl local --distributed-backend gloo --use-cpu-initialization --no-persist-layer-norm
    --no-gradient-accumulation-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion
    --no-masked-softmax-fusion --rerun-mode disabled"""


@pytest.fixture(scope="session")
def megatron_lm(tmp_path_factory):
    """A copy: Megatron-LM compiles into its own folder."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in os.listdir(CHECKOUT):
        source = os.path.join(CHECKOUT, name)
        if name == "megatron":
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        elif name.endswith(".py"):
            shutil.copy(source, copy)
    script = (copy / "pretrain_gpt.py").read_text()
    (copy / "with_install.py").write_text(f"import megatron_bfp; megatron_bfp.install()\n{script}")
    return copy


@pytest.fixture
def plugin_enabled():
    """The start-up file is there."""
    command = [sys.executable, "-m", "megatron_bfp"]
    subprocess.run([*command, "enable"], check=True, env=ENVIRONMENT)
    yield
    subprocess.run([*command, "disable"], check=True, env=ENVIRONMENT)


def launch(checkout, corpus, script, *options, ranks=1, data="data_text_document", split="90,5,5", without=()):
    """Exit status and output of torchrun with ``script``, a list that may begin with ``-m``.

    ``without`` names options of ``MODEL`` that are left out, with their values.
    """
    environment = ENVIRONMENT | {"TORCHDYNAMO_DISABLE": "1", "NO_VCS_VERSION": "1"}
    is_sharded = any("fsdp" in str(option) for option in options)  # which Megatron-LM refuses with the usual value
    environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "8" if is_sharded else "1"
    environment["PYTHONPATH"] = os.pathsep.join([str(ON_CPU), str(checkout), environment["PYTHONPATH"]])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--master-port", str(free_port()), *map(str, script), *left(MODEL, without), *FOR_CPU.split()]
    command += (["--data-path", *data.split(), "--split", split] if split else []) + list(map(str, options))
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, cwd=corpus)
    return done.returncode, done.stdout + done.stderr


def left(options, without):
    """Options, as words, without some, which have one value or none."""
    words = options.split()
    for option in without:
        at = words.index(option)
        has_value = not words[at + 1].startswith("--")
        del words[at : at + 1 + has_value]
    return words


def train(checkout, corpus, script, *options, **keywords):
    """The printed (consumed samples, loss, gradient norm) of each iteration, and the output."""
    status, output = launch(checkout, corpus, script, *options, **keywords)
    assert status == 0, output[-5000:]
    return {int(iteration): values for iteration, *values in STEP.findall(output)}, output


def watched(output):
    return [json.loads(line) for line in WATCHED.findall(output)]


def samples_in_order(output, ranks=1):
    """The digest of each sample that a run with ``batches`` read, in the order of samples."""
    of_rank = [[batch["digests"] for batch in watched(output) if batch["rank"] == rank] for rank in range(ranks)]
    return [digest for together in zip(*of_rank, strict=True) for digests in together for digest in digests]


def in_batches(samples, sizes):
    """The samples of each global batch."""
    ends = list(itertools.accumulate(sizes))
    return [samples[end - size : end] for size, end in zip(sizes, ends)]


def same_batches(samples, others, sizes):
    """Whether each global batch holds the same samples in both, however ordered."""
    pairs = zip(in_batches(samples, sizes), in_batches(others, sizes), strict=True)
    return all(sorted(batch) == sorted(other) for batch, other in pairs)


def losses(steps):
    return [float(loss) for _, loss, _ in steps.values()]


def by_way(checkout, way):
    """The script of a way in, as ``launch`` takes it."""
    return {"-m": ["-m", "megatron_bfp", checkout / "pretrain_gpt.py"], "install": [checkout / "with_install.py"]}[way]
