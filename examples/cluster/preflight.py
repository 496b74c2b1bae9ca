"""Check the nodes of a cluster before training, so that a problem is a line of text and not a run that hangs.

The launchers start it once on each node, with the options that the trainer will get. Each node checks what training
needs: datasets, their sequence indexes and the tokenizer can be read, checkpoints can be written, packages and GPUs are
there. The node of rank 0 listens on the master port, as training will, collects the findings of the others and
compares them: all nodes must have the same data and the same versions. A port that is taken and nodes that cannot reach
each other are reported too. Every node exits with status 0 if all is well, else with 2; the node of rank 0 prints a
line for each problem, with the node's name.

Then all GPUs of all nodes reduce some data together, or one CPU rank of each node does, and the bandwidth is printed.

Fingerprints read a fixed amount of each file: its first and last 64 KiB and 256 blocks between them.
"""

import argparse
import hashlib
import importlib.metadata
import os
import platform
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainer.arguments import blend
from trainer.checkpoints.save_folder import check_save, smallest_checkpoint
from trainer.config import not_negative

import megatron_bfp
from megatron_bfp.commands.shared import Parser
from megatron_bfp.console import run
from megatron_bfp.errors import BFPError, OptionError
from megatron_bfp.indexed_dataset.format import bin_path
from megatron_bfp.indexed_dataset.memory_maps import map_file
from megatron_bfp.indexed_dataset.reader import IndexedDataset
from megatron_bfp.samples.vocabulary import check_sampled_ids
from megatron_bfp.sequence_index.fingerprints import sampled_fingerprint
from megatron_bfp.tokenizers.registry import TOKENIZER_TYPES, load_tokenizer

from .all_reduce import LEAVE_SECONDS, backend_of, measure, ranks_of_a_node, size_of
from .bandwidth import judge
from .indexes import is_built_at_start, open_split
from .memory import Model, num_parameters
from .options import RunOptions, run_options, trainer_and_words
from .recipe import vocab_size_of
from .rendezvous import PreflightError, compare, gather, report

PACKAGES = ("torch", "megatron-core", "deepspeed", "flash-attn", "transformer-engine", "numpy")


def main() -> None:
    """Check this node, and all of them together.

    Raises:
        BFPError: something is wrong.
    """
    options = parse_arguments()
    if int(os.environ.get("LOCAL_RANK", "0")):  # DeepSpeed's launcher starts one for each GPU
        return
    trained = run_options(*trainer_and_words(options.trainer))
    findings = {"node": options.node_name, "rank": options.node_rank, **inspect(options, trained)}
    agreed = meet(findings, options, options.timeout, lambda nodes: agreement(nodes, options), options.hosts)
    if size_of(options) and options.nodes * ranks_of_a_node(options) > 1:
        findings["measured"] = measure(options, agreed["store_port"])
        seconds = options.timeout + 2 * LEAVE_SECONDS  # others may still wait for their ranks
        meet(findings, options, seconds, lambda nodes: measured_together(nodes, options), agreed["names"])


def meet(
    findings: dict[str, Any],
    options: argparse.Namespace,
    seconds: float,
    judge: Callable[[list[dict[str, Any]]], dict[str, Any]],
    names: Sequence[str],
) -> dict[str, Any]:
    """Bring the findings of all nodes together; the node of rank 0 prints what it tells them. Call it on all nodes.

    Args:
        seconds, judge, names: as for ``gather``.

    Raises:
        PreflightError: there are problems.
    """
    if options.node_rank:
        answer = report(findings, options, seconds)
    else:
        answer = gather(findings, options, seconds, judge, names)
    if answer["problems"]:
        lines = "\npreflight: error: ".join(answer["problems"])
        raise PreflightError(lines if options.node_rank == 0 else "the node of rank 0 says why")
    if options.node_rank == 0:
        for line in answer["lines"]:
            print(f"preflight: {line}", flush=True)
    return answer


def agreement(nodes: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """The answer to the findings of the nodes: what differs, and what they need for the all-reduce."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    lines = [f"{options.nodes} nodes agree: {', '.join(sorted(map(told, facts(nodes[0]))))}"]
    names = [node["node"] for node in nodes]
    return {"problems": compare(nodes), "lines": lines, "store_port": port, "names": names}


def measured_together(nodes: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """The answer to the measurements of the nodes."""
    problems, lines = judge(nodes, size_of(options), backend_of(options), options.timeout)
    return {"problems": compare(nodes) + problems, "lines": lines}


def parse_arguments() -> argparse.Namespace:
    """The options: of the cluster, and after ``--trainer`` those that the trainer will get.

    Raises:
        OptionError: one has a value that cannot be used.
    """
    parser = Parser(
        prog="preflight",
        description=__doc__.partition("\n\n")[0],
        allow_abbrev=False,  # of the trainer's options neither
    )
    rank = next((os.environ[name] for name in ("NODE_RANK", "CROSS_RANK", "SLURM_NODEID") if name in os.environ), 0)
    add = parser.add_argument
    add("--nodes", type=int, required=True, metavar="N", help="nodes of the run (required)")
    add("--node-rank", type=int, default=int(rank), metavar="N", help="of this node (default: the launcher's)")
    add("--node-name", default=socket.gethostname(), metavar="NAME", help="for messages (default: the host's)")
    add("--master-addr", required=True, metavar="HOST", help="the node of rank 0 (required)")
    add("--master-port", type=int, required=True, metavar="PORT", help="where it listens (required)")
    add("--hosts", type=split_names, default=(), metavar="NAME,...", help="of all nodes, for messages (default: ranks)")
    add("--timeout", type=float, default=120, metavar="SECONDS", help="wait for other nodes (default: %(default)s)")
    add(
        "--all-reduce-mb",
        type=int,
        metavar="N",
        help="MiB that the ranks reduce together; 0: none (default: 256 on GPUs, 16 on CPUs)",
    )
    add("--gpus-per-node", type=int, required=True, metavar="N", help="0: train on CPUs, check no GPUs (required)")
    add("--vocab-size", required=True, metavar="N", help="of the tokenizer, for the size of a checkpoint (required)")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument(
        "--trainer",
        nargs=argparse.REMAINDER,
        required=True,
        metavar="NAME OPTIONS",
        help="the trainer's name and all its options; give it last (required)",
    )
    options = parser.parse_args()
    if not 0 <= options.node_rank < options.nodes:
        raise OptionError(f"--node-rank {options.node_rank}: not one of {options.nodes} nodes")
    if options.hosts and len(options.hosts) != options.nodes:
        raise OptionError(f"--hosts: {len(options.hosts)} names for {options.nodes} nodes")
    if options.all_reduce_mb is not None:
        not_negative("--all-reduce-mb", options.all_reduce_mb)
    return options


def split_names(text: str) -> list[str]:
    """Names with commas between them."""
    return text.split(",")


def inspect(options: argparse.Namespace, trained: RunOptions) -> dict[str, Any]:
    """What this node has: "facts", which must be equal on all nodes, and "problems", which it sees by itself."""
    local_facts: dict[str, str] = versions()
    problems: list[str] = []
    checks = (
        lambda: check_data(trained),
        lambda: check_tokenizer(trained),
        lambda: check_gpus(options),
        lambda: check_checkpoints(trained, vocab_size_of(options.vocab_size)),
    )
    for check in checks:
        try:
            local_facts |= check()
        except (BFPError, OSError) as error:
            problems.append(str(error))
    return {"facts": local_facts, "problems": problems}


def versions() -> dict[str, str]:
    """Versions of Python and the packages. Checkouts of this package may differ, so its source counts as well."""
    installed = {"Python": platform.python_version()}
    for name in PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = "not installed"
    package = Path(megatron_bfp.__file__).parent
    digest = hashlib.sha256()
    for path in sorted([*package.rglob("*.py"), *Path(__file__).parents[1].rglob("*.py")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return installed | {"megatron_bfp": f"{megatron_bfp.__version__} (source {digest.hexdigest()[:12]})"}


def check_data(trained: RunOptions) -> dict[str, str]:
    """Fingerprints of all datasets and their sequence indexes.

    Raises:
        BFPError: one cannot be read, or an index has not been built.
    """
    fingerprints = {}
    for prefix in blend(trained.data_path)[0]:
        dataset = IndexedDataset(prefix)
        fingerprints[f"{prefix}.idx"] = fingerprint(dataset.idx_content)
        fingerprints[f"{prefix}.bin"] = fingerprint(map_file(bin_path(prefix)))
        if trained.data_impl == "bfp":
            fingerprints |= check_indexes(dataset, trained)
    return fingerprints


def check_indexes(dataset: IndexedDataset, trained: RunOptions) -> dict[str, str]:
    """Checksums of a dataset's sequence indexes, for the splits that the run reads.

    Raises:
        BFPError: one has not been built, or is damaged or stale.
    """
    checksums = {}
    for split_name in trained.used_splits:
        name = f"{dataset.prefix}'s {split_name} index"
        if is_built_at_start(trained, dataset, split_name):
            checksums[name] = "built when training starts"
            continue
        packed_split = open_split(trained, dataset, split_name)
        if packed_split is not None:
            checksums[name] = packed_split.index.checksum
    return checksums


def check_tokenizer(trained: RunOptions) -> dict[str, str]:
    """Fingerprint of the tokenizer's files.

    Raises:
        BFPError: it cannot be loaded, or a dataset has ids outside its vocabulary.
        OSError: a file cannot be read.
    """
    if trained.tokenizer_model is None:
        return {}
    digest, path = hashlib.sha256(), Path(trained.tokenizer_model)
    if trained.tokenizer_type in set(TOKENIZER_TYPES) - {"GPT2BPETokenizer"}:  # Megatron's others have other files
        tokenizer = load_tokenizer(
            trained.tokenizer_type, trained.tokenizer_model, trained.eod_token, needs_eod=trained.needs_eod
        )
        check_ids(trained, Model(trained, tokenizer.vocab_size, on_cpu=False).padded_vocab)
        digest.update(f"{tokenizer.vocab_size} {tokenizer.eod}".encode())
    for file in sorted(path.glob("tokenizer*")) if path.is_dir() else [path]:
        digest.update(file.read_bytes())
    return {"tokenizer": digest.hexdigest()}


def check_ids(trained: RunOptions, vocab_size: int) -> None:
    """Check a sample of each dataset's ids.

    Args:
        vocab_size: rows of the model's embedding.

    Raises:
        IndexedDatasetError: an id is outside.
    """
    for prefix in blend(trained.data_path)[0]:
        try:
            dataset = IndexedDataset(prefix)
        except BFPError:
            continue  # check_data says what is wrong with it
        check_sampled_ids(dataset, vocab_size)


def check_checkpoints(trained: RunOptions, vocab_size: int) -> dict[str, str]:
    """Check that ``--save`` can be written and has room for a checkpoint.

    Raises:
        OptionError: it cannot, or has no room.
    """
    if trained.save is not None:
        of_a_rank = num_parameters(Model(trained, vocab_size, on_cpu=False))
        check_save(trained.save, smallest_checkpoint(of_a_rank * trained.tensor_parallel))
    return {}


def check_gpus(options: argparse.Namespace) -> dict[str, str]:
    """Names of the GPUs, and versions of CUDA and NCCL.

    Raises:
        OptionError: there are fewer than ``--gpus-per-node``.
    """
    if options.gpus_per_node == 0:
        return {}
    import torch

    count = torch.cuda.device_count()
    if count < options.gpus_per_node:
        raise OptionError(f"{count} GPUs, {options.gpus_per_node} are needed (GPUS_PER_NODE)")
    names = Counter(torch.cuda.get_device_name(device) for device in range(options.gpus_per_node))
    gpus = ", ".join(f"{number} x {name}" for name, number in sorted(names.items()))
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {"GPUs": gpus, "CUDA": str(torch.version.cuda), "NCCL": nccl}


def fingerprint(content: Any) -> str:
    """Size and sampled sha256 of a file, as one text."""
    sampled = sampled_fingerprint(content)
    return f"{sampled['bytes']} bytes, {sampled['sampled_sha256']}"


def facts(findings: dict[str, Any]) -> list[tuple[str, str]]:
    """The facts for people: versions and GPUs, not fingerprints."""
    return [(name, value) for name, value in findings["facts"].items() if len(value) < 50 and value != "not installed"]


def told(fact: tuple[str, str]) -> str:
    """A fact as words."""
    return " ".join(fact)


def console() -> int:
    """Run the command; returns its exit status."""
    return run(main, "preflight")
