"""Megatron-DeepSpeed's own pretrain_gpt.py from a real checkout, on the CPU: a copy of the checkout, and runs of it.

The environment variable MEGATRON_DEEPSPEED_PATH names the checkout.
"""

import json
import os
import re
import subprocess

import numpy as np
import pytest

from helpers.datasets import ROOT, write
from helpers.launching import ENVIRONMENT, free_port, make_corpus
from helpers.real_megatron.deepspeed_on_cpu import copy_for_cpu
from helpers.real_megatron.lm import left
from megatron_bfp.indexed_dataset.reader import IndexedDataset

CHECKOUT = os.environ.get("MEGATRON_DEEPSPEED_PATH")
NEEDS_CHECKOUT = pytest.mark.skipif(
    not CHECKOUT, reason="MEGATRON_DEEPSPEED_PATH does not name a checkout of Megatron-DeepSpeed"
)
INTEGRATION = ROOT / "tests/integration"
STEP = re.compile(r"iteration +(\d+)/ .*consumed samples: +(\d+) .*lm loss: (\S+) ")
EVALUATION = re.compile(r"draw from (\w+) set \| lm loss value: (\S+) ")
WATCHED = re.compile(r"^watched (.*)$", re.MULTILINE)
EOD = 511
OPTIONS = """--num-layers 3 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128
    --swiglu --normalization rmsnorm --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --global-batch-size 8 --lr 3e-3 --lr-warmup-iters 2 --lr-decay-iters 10
    --min-lr 1e-4 --clip-grad 1.0 --weight-decay 0 --tokenizer-type NullTokenizer --vocab-size 511 --log-interval 1
    --eval-interval 1000 --eval-iters 2 --num-workers 0 --no-gradient-accumulation-fusion --no-masked-softmax-fusion
    --no-bias-gelu-fusion --no-bias-dropout-fusion --distributed-backend gloo --use-cpu-initialization --deepspeed"""
PACKED = ["--data-impl", "bfp"]
ALONG = ["--no-pipeline-parallel"]


@pytest.fixture(scope="session")
def megatron_deepspeed(tmp_path_factory):
    copy = tmp_path_factory.mktemp("checkout")
    copy_for_cpu(CHECKOUT, copy)
    script = (copy / "pretrain_gpt.py").read_text()
    (copy / "with_install.py").write_text(f"import megatron_bfp; megatron_bfp.install()\n{script}")
    return copy


@pytest.fixture(scope="session")
def megatron_deepspeed_corpus(tmp_path_factory):
    """Real documents, all ending in the EOD that NullTokenizer has; blends of them, and many of one token."""
    folder = make_corpus(tmp_path_factory.mktemp("corpus"))
    dataset = IndexedDataset(str(folder / "data_text_document"))
    documents = []
    for start, end in dataset.spans(np.arange(dataset.num_documents)):
        tokens = dataset.tokens(start, end - start).astype(np.int64)
        swapped = np.select([tokens == 0, tokens == EOD], [EOD, 0], tokens)
        documents.append(swapped.tolist())
    write(folder / "text", documents)
    pieces = [document[at : at + 40] for document in documents for at in range(0, min(len(document), 400), 40)]
    for part in range(3):
        write(folder / f"part{part}", pieces[part::3])
    write(folder / "short", [*documents[:20], *([[EOD]] * 3000)])
    return folder


def launch(
    checkout,
    corpus,
    *options,
    script=None,
    ranks=1,
    data="text",
    split="90,5,5",
    iters=10,
    micro_batch=2,
    zero=0,
    watched=None,
    plugin=True,
    without=(),
):
    """Exit status and output of ``deepspeed``. ``script`` is a list that may begin with ``--module``.

    ``iters`` may be None, for runs that count samples. ``without`` names options of ``OPTIONS`` that are left out, with
    their values.
    """
    script = script or ["--module", "megatron_bfp", checkout / "pretrain_gpt.py"]
    environment = ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": ""}
    paths = [str(checkout), *([str(INTEGRATION / "flash_attn_on_cpu")] if "--use-flash-attn-v2" in options else [])]
    environment["PYTHONPATH"] = os.pathsep.join([*paths, *([str(ROOT)] if plugin else [])])
    if watched:
        environment |= {"WATCHED": watched, "WATCHED_SCRIPT": str(checkout / "pretrain_gpt.py")}
        script = [INTEGRATION / "megatron_deepspeed_watched.py"]
    settings = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": zero},
        "bf16": {"enabled": "--bf16" in options},
    }
    (corpus / "deepspeed.json").write_text(json.dumps(settings))
    command = ["deepspeed", "--num_gpus", ranks, "--master_port", free_port(), *script, *options]
    command += [*left(OPTIONS, without), "--data-path", *data.split(), "--split", split]
    command += ["--train-iters", iters] if iters else []
    command += ["--micro-batch-size", micro_batch, "--zero-stage", zero, "--deepspeed_config", "deepspeed.json"]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=280, env=environment, cwd=corpus
    )
    return done.returncode, done.stdout + done.stderr


def train(checkout, corpus, *options, **keywords):
    """The printed (consumed samples, loss) of each iteration, those of the evaluations, and the output."""
    status, output = launch(checkout, corpus, *options, **keywords)
    assert status == 0, output[-5000:]
    steps = {int(iteration): values for iteration, *values in STEP.findall(output)}
    assert steps
    return steps | {f"{name}": ("0", loss) for name, loss in EVALUATION.findall(output)}, output


def losses(steps):
    return [float(loss) for _, loss in steps.values()]


def watched(output):
    return [json.loads(line) for line in WATCHED.findall(output)]
