"""The paper's tables on this machine: time of packing and number of sequences, side by side in one run.

    python benchmarks/packing.py --documents 1e5 1e6 1e7 --seq-length 2048
    python benchmarks/packing.py --lengths PREFIX --seq-length 2048 8192 --output packing.json

Lengths are simulated (RefinedWeb as lognormal(5.84, 0.98), in tokens, rounded up) or those of a dataset or .npy file.
Each contender runs in a process of its own, which also reports its peak memory. Ours and the sort are medians of
several runs after one that is not counted. Half of the runs come before the paper's two algorithms and half after them:
those take minutes, and a shared machine has slow minutes. The paper's algorithms are in plain Python, as in the paper.
"""

import json
import multiprocessing
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir))

import megatron_bfp
from megatron_bfp.arguments import checked_count, checked_seq_length
from megatron_bfp.commands.shared import Parser
from megatron_bfp.console import run
from megatron_bfp.errors import InputError, OptionError
from megatron_bfp.indexed_dataset.reader import IndexedDataset
from megatron_bfp.tables import format_table

SIMULATED = "simulated RefinedWeb, lognormal(5.84, 0.98)"
PAPER_SECONDS = {10**6: (17, 10), 10**7: (205, 106), 10**8: (2311, 1066), 10**9: (26354, 10816)}
"""Table 1 of the paper, L = 2048: seconds of first-fit and optimised best-fit decreasing on the authors' machine."""


def first_fit_decreasing(lengths: np.ndarray, seq_length: int) -> int:
    """First-fit decreasing over a segment tree of all bins (the paper's baseline); returns the number of sequences.

    A leaf is a bin's remaining space, an inner node the larger of its children: the first bin that fits is found by
    going left where the left child is large enough.
    """
    chunks = _descending_chunks(lengths, seq_length)
    size = 1
    while size < len(chunks):
        size *= 2
    tree = [seq_length] * (2 * size)
    used = 0
    for length in chunks:
        node = 1
        while node < size:
            node *= 2
            if tree[node] < length:
                node += 1
        used = max(used, node - size + 1)
        tree[node] -= length
        while node > 1:
            node //= 2
            left, right = tree[2 * node], tree[2 * node + 1]
            tree[node] = left if left > right else right
    return used


def optimized_best_fit_decreasing(lengths: np.ndarray, seq_length: int) -> int:
    """The paper's algorithm, one chunk at a time over a tree of remaining spaces; returns the number of sequences."""
    chunks = _descending_chunks(lengths, seq_length)
    size = 1
    while size < seq_length + 1:
        size *= 2
    tree = [0] * (2 * size)
    bins_by_space: list[list[int]] = [[] for _ in range(seq_length + 1)]
    contents: list[list[int]] = []

    def put(space: int, value: int) -> None:
        node = size + space
        tree[node] = value
        while node > 1:
            node //= 2
            left, right = tree[2 * node], tree[2 * node + 1]
            tree[node] = left if left > right else right

    for length in chunks:
        if tree[1] >= length:
            node = 1
            while node < size:
                node *= 2
                if tree[node] < length:
                    node += 1
            space = node - size
            bins = bins_by_space[space]
            chosen = bins.pop()
            if not bins:
                put(space, 0)
        else:
            chosen, space = len(contents), seq_length
            contents.append([])
        contents[chosen].append(length)
        space -= length
        if space:
            if not bins_by_space[space]:
                put(space, space)
            bins_by_space[space].append(chosen)
    return len(contents)


def ours(lengths: np.ndarray, seq_length: int) -> int:
    """``megatron_bfp.pack``, including chunking, until ``packing[i]`` can be read."""
    return len(megatron_bfp.pack(lengths, seq_length))


def stable_argsort(lengths: np.ndarray, seq_length: int) -> int:
    """The floor: one numpy sort of the same lengths as uint16, which numpy sorts by radix."""
    return len(np.argsort(lengths, kind="stable"))


def _descending_chunks(lengths: np.ndarray, seq_length: int) -> list[int]:
    """All chunk lengths, longest first, by a counting sort."""
    full = int((lengths // seq_length).sum())
    counts = np.bincount(lengths % seq_length, minlength=seq_length)
    counts[0] = 0
    remainders = np.repeat(np.arange(seq_length)[::-1], counts[::-1])
    return [seq_length] * full + remainders.tolist()


def measure(contender: Callable, lengths: np.ndarray, seq_length: int, repeats: int) -> dict[str, Any]:
    """Run a contender in a process of its own.

    Returns:
        "result", "seconds" of each run that counts, and "peak_bytes", by which the peak memory exceeds that at the
        start.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work() -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        seconds, result = [], None
        for _ in range(repeats + (repeats > 1)):
            start = time.perf_counter()
            result = contender(lengths, seq_length)
            seconds.append(time.perf_counter() - start)
        peak = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        sender.send({"result": result, "seconds": seconds[repeats > 1 :], "peak_bytes": peak})

    process = context.Process(target=work)
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        raise InputError(f"{contender.__name__}: its process was killed, perhaps because memory ran out") from None
    finally:
        process.join()


def simulated_lengths(documents: int) -> np.ndarray:
    """Lengths in tokens, int32 [documents], as in a .idx."""
    generator = np.random.default_rng(2024)
    lengths = np.empty(documents, dtype=np.int32)
    for first in range(0, documents, 1 << 22):
        count = min(1 << 22, documents - first)
        lengths[first : first + count] = np.ceil(generator.lognormal(5.84, 0.98, count))
    return lengths


def given_lengths(path: str) -> np.ndarray:
    """The lengths in a .npy file or of a dataset.

    Raises:
        InputError: it is neither.
    """
    if not path.endswith(".npy"):
        return np.asarray(IndexedDataset(path.removesuffix(".idx"), needs_bin=False).document_lengths[:])
    try:
        lengths = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InputError(f"--lengths {path}: {error}") from None
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu":
        raise InputError(f"--lengths {path}: not a 1-d array of integers")
    return lengths


def compare(lengths: np.ndarray, seq_length: int, python_limit: int, repeats: int) -> dict[str, Any]:
    """All figures for one corpus and sequence length."""
    short_lengths = np.minimum(lengths, 65535).astype(np.uint16)

    def measure_ours_and_argsort() -> dict[str, dict[str, Any]]:
        return {
            "ours": measure(ours, lengths, seq_length, repeats),
            "argsort": measure(stable_argsort, short_lengths, seq_length, repeats),
        }

    measured = measure_ours_and_argsort()
    if len(lengths) <= python_limit:
        measured["ffd"] = measure(first_fit_decreasing, lengths, seq_length, 1)
        measured["obfd"] = measure(optimized_best_fit_decreasing, lengths, seq_length, 1)
        if measured["obfd"]["result"] != measured["ours"]["result"]:
            counts = measured["obfd"]["result"], measured["ours"]["result"]
            raise InputError(f"sequences differ: paper {counts[0]}, ours {counts[1]}")
        for name, again in measure_ours_and_argsort().items():
            measured[name]["seconds"] += again["seconds"]
    tokens = int(lengths.sum(dtype=np.int64))
    return {
        "documents": len(lengths),
        "seq_length": seq_length,
        "tokens": tokens,
        "sequences": measured["ours"]["result"],
        "lower_bound": -(-tokens // seq_length),
        "measured": {
            name: {"seconds": statistics.median(value["seconds"]), "peak_bytes": value["peak_bytes"]}
            for name, value in measured.items()
        },
    }


def time_rows(rows: list[dict[str, Any]]) -> list[list[Any]]:
    """Table 1: seconds, ratios, peak memory."""
    table = []
    for row in rows:
        measured = row["measured"]
        seconds = {name: value["seconds"] for name, value in measured.items()}

        def ratio(above: str, below: str, seconds: dict[str, float] = seconds) -> str:
            return f"{seconds[above] / seconds[below]:.2f}" if above in seconds and below in seconds else "-"

        cells = [row["seq_length"], row["documents"]]
        cells += [f"{seconds[name]:.3f}" if name in seconds else "-" for name in ("ffd", "obfd", "ours", "argsort")]
        cells += [ratio("ffd", "obfd"), ratio("obfd", "ours"), ratio("ours", "argsort")]
        cells += [f"{1e9 * seconds['ours'] / max(1, row['documents']):.0f}"]
        cells += [f"{measured[name]['peak_bytes'] / 1e6:.0f}" if name in measured else "-" for name in ("obfd", "ours")]
        table.append(cells)
    return table


def sequence_rows(rows: list[dict[str, Any]]) -> list[list[Any]]:
    """Table 2: sequences by concatenation and by packing. Concatenation pads only the last sequence, so its number is
    the lower bound."""
    table = []
    for row in rows:
        bound, extra = row["lower_bound"], row["sequences"] - row["lower_bound"]
        share = f"{100 * extra / bound:.5f}" if bound else "0"
        table.append([row["seq_length"], row["documents"], bound, row["sequences"], extra, share, bound])
    return table


def main() -> None:
    """Parse the command line, measure, print.

    Raises:
        BFPError: bad options or input.
    """
    parser = Parser(
        prog="benchmarks/packing.py",
        description="Time and compactness of packing, compared with the paper's.",
    )
    add = parser.add_argument
    add("--documents", nargs="+", default=["1e5", "1e6"], metavar="N", help="simulated documents (default: 1e5 1e6)")
    add("--lengths", nargs="+", metavar="FILE", help="a dataset's PREFIX or .idx, or lengths as .npy")
    add("--seq-length", nargs="+", type=int, default=[2048], metavar="L", help="tokens per sequence (default: 2048)")
    add(
        "--python-limit",
        default="1e6",
        metavar="N",
        help="run plain Python up to this many documents (default: %(default)s)",
    )
    add("--repeats", type=int, default=5, help="runs of ours and of the sort (default: %(default)s)")
    add("--output", metavar="FILE", help="also write the figures as JSON")
    options = parser.parse_args()
    checked_count("--repeats", options.repeats)
    python_limit = _number("--python-limit", options.python_limit)
    corpora = [(path, None) for path in options.lengths or ()]
    corpora = corpora or [(SIMULATED, _number("--documents", text)) for text in options.documents]
    rows = []
    for name, documents in corpora:
        lengths = given_lengths(name) if documents is None else simulated_lengths(documents)
        for seq_length in options.seq_length:
            print(f"{len(lengths):,} documents at seq_length {seq_length} ...", file=sys.stderr, flush=True)
            seq_length = checked_seq_length("--seq-length", seq_length)
            rows.append({"lengths": name} | compare(lengths, seq_length, python_limit, options.repeats))
    _print(rows)
    if options.output:
        with open(options.output, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=2)


def _number(option: str, text: str) -> int:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 1 <= number <= 1e11:
        raise OptionError(f"{option} {text!r}: give a number of at least 1, such as 1e6")
    return int(number)


def _print(rows: list[dict[str, Any]]) -> None:
    print("\nTable 1: seconds (FFD and OBFD: the paper's algorithms in plain Python; argsort: numpy, stable)")
    header = ["L", "documents", "FFD", "OBFD", "ours", "argsort", "FFD/OBFD", "OBFD/ours", "ours/argsort"]
    header += ["ours, ns per document", "OBFD peak MB", "ours peak MB"]
    print(format_table(header, time_rows(rows)))
    print("\nThe paper, L 2048, its machine:")
    paper = [[documents, ffd, obfd, f"{ffd / obfd:.2f}"] for documents, (ffd, obfd) in PAPER_SECONDS.items()]
    print(format_table(["documents", "FFD", "OBFD", "FFD/OBFD"], paper))
    print("\nTable 2: sequences (the paper: 0.0024 % more at 2048 and 0.00063 % at 8192 on RefinedWeb)")
    header = ["L", "documents", "concatenation", "packing", "difference", "%", "lower bound"]
    print(format_table(header, sequence_rows(rows)))
    print("Lengths:", "; ".join(dict.fromkeys(row["lengths"] for row in rows)), flush=True)


if __name__ == "__main__":
    sys.exit(run(main, "benchmarks/packing.py"))
