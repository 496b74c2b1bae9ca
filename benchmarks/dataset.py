"""Samples per second of BFPGPTDataset, compared with megatron-core's GPTDataset in one run.

    python benchmarks/dataset.py --seq-length 2048 8192 131072 --workers 0 2 --corpora 1 8 --output dataset.json
    python benchmarks/dataset.py --data-path PREFIX --seq-length 2048 --corpora 1
    python benchmarks/dataset.py --lengths tests/data/code_lengths.npy --fim-rate 0.9 --seq-length 2048 --corpora 1

Without ``--data-path`` it writes simulated RefinedWeb corpora of random tokens to a temporary folder. They are read
alone and in a blend, whose samples megatron-core makes. BFPGPTDataset is measured with every token as an input, with
targets only, and with some of the documents rearranged for fill-in-the-middle. GPTDataset is measured without masks,
with ``reset_attention_mask`` and its dense mask, and with inter-document masking if megatron-core has it. Contenders
take turns, round by round, each continuing in its epoch. Without workers, processor time is taken. The figure is the
median of the rounds, and a ratio is the median of the ratios of each round. At the end, ``--reads`` samples are read
with BFPGPTDataset to show its memory.
"""

import argparse
import contextlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from torch.utils.data import Dataset

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir))

from megatron_bfp import BFPGPTDataset, BFPGPTDatasetConfig
from megatron_bfp.arguments import checked_count, checked_seq_length
from megatron_bfp.commands.shared import Parser
from megatron_bfp.console import run
from megatron_bfp.errors import OptionError
from megatron_bfp.indexed_dataset.writer import IndexedDatasetWriter
from megatron_bfp.tables import format_table

LARGEST_MASK = 1 << 28
"""Bytes. A contender with a larger dense mask is left out."""

STOCK = "GPTDataset, no mask"
PACKED = "BFPGPTDataset"
TARGETS_ONLY = "BFPGPTDataset, targets only"
FIM = "BFPGPTDataset, fill-in-the-middle"
SENTINELS = {"prefix": 64_996, "middle": 64_997, "suffix": 64_998}


class Tokenizer:
    """The part of a tokenizer that the datasets need."""

    vocab_size = 65_000
    eod = eos = 0
    pad = 64_999
    unique_identifiers = {"class": "benchmark"}


def contenders(seq_length: int, fim_rate: float = 0.5) -> dict[str, tuple[type, type, dict[str, Any]]]:
    """Dataset class, config class and its options, by name."""
    classes = {
        PACKED: (BFPGPTDataset, BFPGPTDatasetConfig, {}),
        TARGETS_ONLY: (BFPGPTDataset, BFPGPTDatasetConfig, {"targets_only": True}),
        FIM: (BFPGPTDataset, BFPGPTDatasetConfig, {"fim_rate": fim_rate, "fim_extra_tokens": SENTINELS}),
        STOCK: (GPTDataset, GPTDatasetConfig, {"create_attention_mask": False}),
    }
    if "inter_document_masking" in {field.name for field in fields(GPTDatasetConfig)}:
        options = {"create_attention_mask": False, "inter_document_masking": True}
        classes["GPTDataset, inter-document masking"] = (GPTDataset, GPTDatasetConfig, options)
    if seq_length**2 <= LARGEST_MASK:
        options = {"create_attention_mask": True, "reset_attention_mask": True}
        classes["GPTDataset, reset_attention_mask"] = (GPTDataset, GPTDatasetConfig, options)
    return classes


def make_dataset(
    prefixes: list[str],
    cache_path: str,
    seq_length: int,
    dataset_class: type,
    config_class: type,
    options: dict[str, Any],
) -> Dataset:
    """One epoch of the training dataset of a contender, made by megatron-core's builder: a blend of several corpora."""
    settings = {
        "random_seed": 1234,
        "sequence_length": seq_length,
        "blend": (prefixes, None),
        "split": "1,0,0",
        "path_to_cache": cache_path,
        "tokenizer": Tokenizer(),
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
    }
    config = config_class(**(settings | options))
    return BlendedMegatronDatasetBuilder(dataset_class, [None, None, None], lambda: True, config).build()[0]


def endless(dataset: Dataset, num_workers: int) -> Iterator[Any]:
    """Samples in order, epoch after epoch."""
    if num_workers == 0:
        while True:
            for index in range(len(dataset)):
                yield dataset[index]
    loader = torch.utils.data.DataLoader(dataset, batch_size=4, num_workers=num_workers, persistent_workers=True)
    while True:
        for batch in loader:
            yield from batch["tokens"]


def compare(
    prefixes: list[str], cache_path: str, seq_length: int, num_workers: int, seconds: float, fim_rate: float
) -> list[dict[str, Any]]:
    """Time all contenders at one sequence length, in rounds of about ``seconds`` per contender."""
    streams = {
        name: endless(make_dataset(prefixes, cache_path, seq_length, *classes), num_workers)
        for name, classes in contenders(seq_length, fim_rate).items()
    }
    rates: dict[str, list[float]] = {name: [] for name in streams}
    clock = time.perf_counter if num_workers else time.thread_time  # other work on the machine matters less
    for round_number in range(6):
        for name, stream in streams.items():
            start, count, taken = clock(), 0, 0.0
            while taken < seconds:
                next(stream)
                count, taken = count + 1, clock() - start
            if round_number:  # the first fills caches and starts workers
                rates[name].append(count / taken)

    def ratio(name: str, base: str) -> float:
        return statistics.median(np.divide(rates[name], rates[base]).tolist())

    return [
        {
            "seq_length": seq_length,
            "corpora": len(prefixes),
            "workers": num_workers,
            "dataset": name,
            "samples_per_second": statistics.median(measured),
            "ratio_to_stock": ratio(name, STOCK),
            "ratio_to_packed": ratio(name, PACKED),
        }
        for name, measured in rates.items()
    ]


def anonymous_memory() -> int:
    """RssAnon of this process, bytes: its memory without mapped files."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("RssAnon:"))


def memory_over_reads(dataset: Dataset, reads: int) -> list[dict[str, int]]:
    """RssAnon after each tenth of the reads."""
    stream, rows = endless(dataset, 0), []
    for tenth in range(10):
        for _ in range(reads * (tenth + 1) // 10 - reads * tenth // 10):
            next(stream)
        rows.append({"reads": reads * (tenth + 1) // 10, "anonymous_bytes": anonymous_memory()})
    return rows


def write_corpus(prefix: str, tokens: int, seed: int = 2024, of_documents: np.ndarray | None = None) -> None:
    """Simulated documents of random tokens, in Megatron's format.

    Args:
        of_documents: integers [n], lengths to draw from; by default, those of RefinedWeb are simulated.
    """
    generator = np.random.default_rng(seed)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for _ in range(-(-tokens // (1 << 22))):
            if of_documents is None:
                lengths = np.ceil(generator.lognormal(5.84, 0.98, 1 << 14)).astype(np.int32)
            else:
                lengths = generator.choice(of_documents, 1 << 14).astype(np.int32)
            lengths = lengths[: np.searchsorted(np.cumsum(lengths), 1 << 22)]
            writer.add(generator.integers(1, 64_999, int(lengths.sum()), dtype=np.uint16), lengths)
        writer.finalize()


def main() -> None:
    """Parse the command line, measure, print.

    Raises:
        BFPError: bad options or input.
    """
    parser = Parser(
        prog="benchmarks/dataset.py",
        description="Samples per second, compared with megatron-core's own dataset.",
    )
    add = parser.add_argument
    add("--data-path", nargs="+", metavar="PREFIX", help="indexed datasets; by default, they are simulated")
    add("--tokens", type=int, default=400_000_000, help="of all simulated ones together (default: %(default)s)")
    add("--lengths", metavar="FILE", help="a .npy of document lengths that simulated ones have (default: web text's)")
    add("--fim-rate", type=float, default=0.5, metavar="R", help="documents rearranged (default: %(default)s)")
    add(
        "--corpora",
        nargs="+",
        type=int,
        metavar="N",
        help="datasets read at once, as a blend if there are several (default: 1 8; with --data-path: 1 and all)",
    )
    add(
        "--seq-length",
        nargs="+",
        type=int,
        default=[2048, 8192, 131_072],
        metavar="L",
        help="tokens per sequence (default: 2048 8192 131072)",
    )
    add("--workers", nargs="+", type=int, default=[0, 2], metavar="N", help="DataLoader processes (default: 0 2)")
    add("--seconds", type=float, default=1.0, help="time per contender in each of five rounds (default: %(default)s)")
    add("--reads", type=int, default=100_000, help="samples read to measure memory (default: %(default)s)")
    add("--output", metavar="FILE", help="also write the figures as JSON")
    options = parser.parse_args()
    for name in ("tokens", "reads"):
        checked_count(f"--{name}", getattr(options, name))
    lengths = [checked_seq_length("--seq-length", seq_length) for seq_length in options.seq_length]
    counts = _counts(options)
    with tempfile.TemporaryDirectory() as directory, _process_group():
        prefixes = options.data_path or _simulated(directory, max(counts), options)
        rows = []
        for seq_length, count, num_workers in itertools.product(lengths, counts, options.workers):
            _say(f"seq_length {seq_length}, {count} corpora, {num_workers} workers")
            rows += compare(prefixes[:count], directory, seq_length, num_workers, options.seconds, options.fim_rate)
        _say(f"{options.reads:,} reads at seq_length {lengths[0]}")
        packed = contenders(lengths[0])[PACKED]
        memory = memory_over_reads(make_dataset(prefixes[:1], directory, lengths[0], *packed), options.reads)
    _print(rows, memory)
    if options.output:
        with open(options.output, "w", encoding="utf-8") as file:
            json.dump({"rates": rows, "memory": memory}, file, indent=2)


def _counts(options: argparse.Namespace) -> list[int]:
    """How many corpora are read at once, in turn.

    Raises:
        OptionError: more than there are.
    """
    if options.corpora is None:
        return sorted({1, len(options.data_path or range(8))})
    for count in options.corpora:
        checked_count("--corpora", count)
        if options.data_path and count > len(options.data_path):
            raise OptionError(f"--corpora {count}: --data-path names {len(options.data_path)}; name more of them")
    return options.corpora


def _simulated(directory: str, count: int, options: argparse.Namespace) -> list[str]:
    """Prefixes of new corpora, all together of the tokens that are asked for."""
    tokens, of_documents = options.tokens, None if options.lengths is None else np.load(options.lengths)
    prefixes = [os.path.join(directory, f"simulated_{number}_text_document") for number in range(count)]
    _say(f"writing {tokens:,} simulated tokens")
    for number, prefix in enumerate(prefixes):
        write_corpus(prefix, -(-tokens // count), seed=2024 + number, of_documents=of_documents)
    return prefixes


@contextlib.contextmanager
def _process_group() -> Iterator[None]:
    """A process group of one rank, if there is none: megatron-core asks for the rank before it writes the cache of a
    blend."""
    if torch.distributed.is_initialized():
        yield
        return
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def _say(text: str) -> None:
    print(f"{text} ...", file=sys.stderr, flush=True)


def _print(rows: list[dict[str, Any]], memory: list[dict[str, int]]) -> None:
    cells = []
    for row in rows:
        rate = row["samples_per_second"]
        times = [f"{1e6 / rate:.1f}", f"{1e9 / rate / row['seq_length']:.1f}"]
        cells.append([row["dataset"], row["seq_length"], row["corpora"], row["workers"], round(rate), *times])
        cells[-1] += [f"{row['ratio_to_stock']:.2f}", f"{row['ratio_to_packed']:.2f}"]
    header = ["dataset", "L", "corpora", "workers", "samples/s", "us per sample", "ns per token"]
    header += ["ratio to no mask", "to packed"]
    print(format_table(header, cells))
    print("\nMemory of BFPGPTDataset (RssAnon):")
    memory_cells = [[row["reads"], f"{row['anonymous_bytes'] / 1e6:.1f}"] for row in memory]
    print(format_table(["samples read", "MB"], memory_cells), flush=True)


if __name__ == "__main__":
    sys.exit(run(main, "benchmarks/dataset.py"))
