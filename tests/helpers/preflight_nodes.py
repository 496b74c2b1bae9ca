"""Nodes for the preflight: folders on this host, and a process in each."""

import shutil
import subprocess
import sys

from helpers.datasets import ROOT, documents_of, write
from helpers.launching import ENVIRONMENT, free_port
from megatron_bfp.sequence_index.builder import build
from megatron_bfp.sequence_index.key import IndexKey

NODES = ("node-a", "node-b", "node-c", "node-d")


def make_node(folder):
    """What a node has: a dataset, its indexes, a tokenizer."""
    from tokenizers import Tokenizer, models

    folder.mkdir()
    dataset = write(folder / "data", documents_of([7, 40, 12, 64, 3, 30, 9, 21, 5, 11]))
    for first, end in ((0, 8), (8, 10)):
        build(dataset, IndexKey(64, first, end), f"{dataset.prefix}.bfp")
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1} | {chr(0x100 + i): i for i in range(2, 203)}, []))
    tokenizer.add_special_tokens(["<eod>"])
    tokenizer.save(str(folder / "tokenizer.json"))


TRAINED = ("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--micro-batch-size", "1")
TRAINED += ("--train-iters", "2", "--data-path", "data", "--seq-length", "64", "--split", "80,20")
TRAINED += ("--eval-interval", "1", "--tokenizer-model", "tokenizer.json")


def make_nodes(folder, count=3):
    """Folders of equal nodes."""
    make_node(folder / NODES[0])
    for name in NODES[1:count]:
        shutil.copytree(folder / NODES[0], folder / name)
    return [folder / name for name in NODES[:count]]


def preflight(
    nodes, *words, trainer="pretrain_gpt", port=None, starting=None, gpus=0, timeout=30, megabytes=0, **environments
):
    """Exit statuses and the outputs of the nodes.

    Args:
        words: options of the trainer, after the usual ones.
        megabytes: of the all-reduce; 0 for none.
        environments: more variables for a node, by its letter.
    """
    port = port or free_port()
    options = [
        "--nodes",
        str(len(nodes)),
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(port),
        "--timeout",
        str(timeout),
    ]
    options += ["--gpus-per-node", str(gpus), "--vocab-size", "3", "--all-reduce-mb", str(megabytes)]
    trained = ["--trainer", trainer, *TRAINED, *(["--eod-token", "<eod>"] if trainer == "pretrain_gpt" else []), *words]
    processes = []
    for rank, node in enumerate(nodes if starting is None else nodes[:starting]):
        command = [sys.executable, str(ROOT / "examples/preflight.py"), *options]
        command += ["--node-rank", str(rank), "--node-name", node.name, *trained]
        environment = ENVIRONMENT | environments.get(node.name[-1], {})
        processes.append(
            subprocess.Popen(
                command, cwd=node, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    return [process.returncode for process in processes], outputs
