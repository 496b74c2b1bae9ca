"""Preprocessing compared with Megatron-LM's own tools, and with the tokenizer alone, in one run.

    python benchmarks/preprocessing.py --make-corpus /usr/lib/python3 --megabytes 200 --input corpus.jsonl \
        --tokenizer-model FOLDER --workers 8 --megatron-lm Megatron-LM --megatron-python venv/bin/python

Contenders, each a process of its own on the same JSON Lines file:

- Megatron-LM's tools/preprocess_data.py, on a part of the input (``--megatron-megabytes``), as it is slow;
- its tools/preprocess_data_fast.py, if the checkout has it, with as many threads as the others have workers;
- tools/preprocess_bfp.py, also on Megatron's part, to compare their files byte by byte;
- gigatoken's ``encode_batch`` on texts in memory: the ceiling, without reading, parsing or writing.

Rates are MB of text per second (10**6 bytes of UTF-8, without the JSON around it) and tokens per second. The startup,
that is imports and loading the tokenizer, is measured by a run on one document and subtracted; an input that takes not
much longer than that gives no rate. Contenders run in turn, there and back, and figures are medians. Memory is
described in ``benchmarks/processes.py``.

The tokenizer is copied without its post-processor: Megatron's tools keep the token that some put before each text, ours
and gigatoken do not.
"""

import argparse
import filecmp
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir))

from benchmarks.corpus import Corpus, copy_tokenizer, first_documents, make_corpus
from benchmarks.processes import Finished, Memory, timed
from megatron_bfp.arguments import checked_count
from megatron_bfp.commands.shared import Parser
from megatron_bfp.console import run
from megatron_bfp.errors import InputError, OptionError
from megatron_bfp.indexed_dataset.format import bin_path, idx_path
from megatron_bfp.indexed_dataset.reader import IndexedDataset
from megatron_bfp.tables import format_table

HERE = os.path.dirname(os.path.abspath(__file__))
TOOL = os.path.join(HERE, os.pardir, "tools", "preprocess_bfp.py")
MEGATRON, MEGATRON_FAST = "Megatron-LM preprocess_data.py", "Megatron-LM preprocess_data_fast.py"
OURS_ON_SHARE, OURS, GIGATOKEN = "ours, on Megatron's share", "ours", "gigatoken encode_batch, in memory"


@dataclass
class Contender:
    """A tool that writes a dataset, or gigatoken's encoder, and its measurements."""

    name: str
    command: Callable[[str, str], list[str]]
    """The command line, for an input file and the output's prefix."""
    folder: str
    """For its output. Emptied before each run."""
    environment: dict[str, str]
    has_output: bool = True
    startups: list[float] = field(default_factory=list)
    """Seconds of runs with one document."""
    seconds: list[float] = field(default_factory=list)
    peaks: list[Memory] = field(default_factory=list)
    num_tokens: int = 0

    @property
    def prefix(self) -> str:
        """The prefix of its dataset."""
        return os.path.join(self.folder, "dataset_text_document")

    def run(self, corpus: Corpus, one: Corpus) -> None:
        """Run it on one document, and on the corpus.

        Raises:
            InputError: it failed.
        """
        if not self.has_output:
            finished = self._timed(corpus)
            printed = json.loads(finished.output)
            self.startups.append(0.0)
            self.seconds.append(printed["seconds"])
            self.num_tokens = printed["tokens"]
        else:
            if not self.startups:
                self._timed(one)  # not counted: it fills the disk's cache
            self.startups.append(self._timed(one).seconds)
            finished = self._timed(corpus)
            self.seconds.append(finished.seconds)
            self.num_tokens = IndexedDataset(self.prefix).num_tokens
        self.peaks.append(finished.memory)

    def _timed(self, corpus: Corpus) -> Finished:
        shutil.rmtree(self.folder, ignore_errors=True)
        os.makedirs(self.folder)
        print(f"{self.name}: {corpus.text_bytes / 1e6:.1f} MB of text ...", file=sys.stderr, flush=True)
        return timed(self.name, self.command(corpus.path, os.path.join(self.folder, "dataset")), **self.environment)


class Benchmark:
    """Runs the contenders and collects their figures.

    Args:
        folder: an empty folder, for all files.
        options: of the command line.
    """

    def __init__(self, folder: str, options: argparse.Namespace) -> None:
        self.folder, self.options = folder, options
        self.tokenizer = os.path.join(folder, "tokenizer")
        self.rows: list[dict[str, Any]] = []
        self.are_identical: dict[str, bool] = {}

    def run(self) -> None:
        """Run all contenders.

        Raises:
            BFPError: bad options or input, or a required contender failed.
        """
        options = self.options
        special_texts = copy_tokenizer(options.tokenizer_model, self.tokenizer)
        if options.make_corpus:
            make_corpus(options.input[0], options.make_corpus, int(options.megabytes * 1e6), special_texts)
        self.one = first_documents(options.input, os.path.join(self.folder, "one.jsonl"), 0)
        everything = first_documents(options.input, os.path.join(self.folder, "all.jsonl"))
        contenders = [self._ours(OURS), self._gigatoken()]
        if options.megatron_lm is None:
            print("Megatron-LM: left out, --megatron-lm was not given", flush=True)
        else:
            share_bytes = options.megatron_megabytes * 1e6
            share = first_documents(options.input, os.path.join(self.folder, "share.jsonl"), share_bytes)
            self._measure([self._ours(OURS_ON_SHARE), self._megatron(MEGATRON, "preprocess_data.py")], share, 1)
            if os.path.exists(os.path.join(options.megatron_lm, "tools", "preprocess_data_fast.py")):
                contenders.insert(1, self._megatron(MEGATRON_FAST, "preprocess_data_fast.py"))
            else:
                print(f"{MEGATRON_FAST}: left out, this checkout has none", flush=True)
        self._measure(contenders, everything, options.repeats)

    def _measure(self, contenders: list[Contender], corpus: Corpus, repeats: int) -> None:
        """Run contenders in turn, there and back, so that slow minutes of the machine hit all of them alike.

        Args:
            contenders: ours first.
        """
        for number in range(repeats):
            for contender in contenders[:: -1 if number % 2 else 1]:
                try:
                    contender.run(corpus, self.one)
                except InputError as error:
                    if contender.name not in (MEGATRON_FAST, GIGATOKEN):
                        raise
                    print(f"left out: {error}", flush=True)  # not installed, or not for this tokenizer
                    contenders.remove(contender)
        for contender in contenders:
            self._add_row(contender, corpus)
            if contender.has_output and contender is not contenders[0]:
                self.are_identical[contender.name] = _have_same_bytes(contender.prefix, contenders[0].prefix)

    def _ours(self, name: str) -> Contender:
        def command(source: str, prefix: str) -> list[str]:
            specific = ["--workers", str(self.options.workers), "--seq-length", "2048"]
            return [sys.executable, TOOL, *self._shared_options(source, prefix), *specific]

        return Contender(name, command, os.path.join(self.folder, name), self._threads())

    def _megatron(self, name: str, script: str) -> Contender:
        checkout = os.path.abspath(self.options.megatron_lm)
        path = os.path.join(checkout, "tools", script)
        if not os.path.exists(path):
            raise OptionError(f"--megatron-lm {checkout}: has no tools/{script}; give a checkout of Megatron-LM")

        def command(source: str, prefix: str) -> list[str]:
            specific = ["--workers", str(self.options.workers)] if name == MEGATRON else ["--use-gigatoken"]
            return [self.options.megatron_python, path, *self._shared_options(source, prefix), *specific]

        # its scripts append the checkout to the path, so an installed megatron-core would come first
        python_path = os.pathsep.join(filter(None, [checkout, os.environ.get("PYTHONPATH")]))
        return Contender(name, command, os.path.join(self.folder, name), self._threads() | {"PYTHONPATH": python_path})

    def _gigatoken(self) -> Contender:
        def command(source: str, _: str) -> list[str]:
            return [sys.executable, os.path.join(HERE, "encode_in_memory.py"), source, self.tokenizer]

        return Contender(GIGATOKEN, command, os.path.join(self.folder, GIGATOKEN), self._threads(), has_output=False)

    def _shared_options(self, source: str, prefix: str) -> list[str]:
        tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", self.tokenizer, "--append-eod"]
        return ["--input", source, "--output-prefix", prefix, *tokenizer]

    def _threads(self) -> dict[str, str]:
        return {"RAYON_NUM_THREADS": str(self.options.workers), "HF_HUB_OFFLINE": "1"}

    def _add_row(self, contender: Contender, corpus: Corpus) -> None:
        startup = statistics.median(contender.startups)
        working = statistics.median(contender.seconds) - startup
        is_measurable = working > startup / 5  # else the input is too small
        self.rows.append(
            {
                "contender": contender.name,
                "documents": corpus.documents,
                "text_bytes": corpus.text_bytes,
                "tokens": contender.num_tokens,
                "seconds": contender.seconds,
                "startup_seconds": contender.startups,
                "text_bytes_per_second": corpus.text_bytes / working if is_measurable else None,
                "tokens_per_second": contender.num_tokens / working if is_measurable else None,
                "largest_process_bytes": max(peak.largest for peak in contender.peaks),
                "all_processes_bytes": max(peak.total for peak in contender.peaks),
            }
        )


def _have_same_bytes(prefix: str, other: str) -> bool:
    return all(filecmp.cmp(path(prefix), path(other), shallow=False) for path in (bin_path, idx_path))


def table(rows: list[dict[str, Any]]) -> str:
    """The table of the figures, with ratios to Megatron-LM and gigatoken."""
    rates = {row["contender"]: row["text_bytes_per_second"] for row in rows}

    def ratio(row: dict[str, Any], other: str, scale: float, digits: int) -> str:
        rate, reference = row["text_bytes_per_second"], rates.get(other)
        return f"{scale * rate / reference:.{digits}f}" if rate and reference else "-"

    cells = [
        [
            row["contender"],
            f"{row['text_bytes'] / 1e6:.1f}",
            f"{statistics.median(row['seconds']):.2f}",
            f"{statistics.median(row['startup_seconds']):.2f}",
            f"{row['text_bytes_per_second'] / 1e6:.2f}" if row["text_bytes_per_second"] else "-",
            int(row["tokens_per_second"]) if row["tokens_per_second"] else "-",
            f"{row['largest_process_bytes'] / 1e6:.0f}",
            f"{row['all_processes_bytes'] / 1e6:.0f}",
            ratio(row, MEGATRON, 1, 2),
            ratio(row, GIGATOKEN, 100, 1),
        ]
        for row in rows
    ]
    header = ["", "text MB", "seconds", "startup", "MB/s", "tokens/s", "largest process MB", "all MB"]
    return format_table([*header, "x Megatron", "% of gigatoken"], cells)


def main() -> None:
    """Parse the command line, measure, print.

    Raises:
        BFPError: bad options or input.
    """
    options = _parse()
    with tempfile.TemporaryDirectory(dir=options.work_folder) as folder:
        benchmark = Benchmark(folder, options)
        benchmark.run()
    print(f"\n{options.workers} workers or threads, {os.cpu_count()} CPUs")
    print(table(benchmark.rows))
    for name, is_identical in benchmark.are_identical.items():
        print(f".bin and .idx of {name} and ours: {'identical' if is_identical else 'NOT IDENTICAL'}", flush=True)
    if options.output:
        result = {"workers": options.workers, "cpus": os.cpu_count(), "contenders": benchmark.rows}
        with open(options.output, "w", encoding="utf-8") as file:
            json.dump(result | {"identical_to_ours": benchmark.are_identical}, file, indent=2)


def _parse() -> argparse.Namespace:
    parser = Parser(
        prog="benchmarks/preprocessing.py",
        description="Time and memory of preprocessing, compared with Megatron-LM's tools and with gigatoken.",
    )
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="FILE", help="JSON Lines")
    add("--make-corpus", nargs="+", metavar="FOLDER", help="write --input first, from the text files in these folders")
    add("--megabytes", type=float, default=100, help="text to write, MB (default: %(default)s)")
    add("--tokenizer-model", required=True, metavar="FOLDER", help="a tokenizer.json and its config")
    add(
        "--workers",
        type=int,
        default=os.cpu_count(),
        metavar="N",
        help="processes or threads (default: all CPUs, %(default)s)",
    )
    add("--megatron-lm", metavar="CHECKOUT", help="also run its tools")
    add("--megatron-python", default=sys.executable, metavar="PYTHON", help="interpreter for them (default: this one)")
    add("--megatron-megabytes", type=float, default=40, help="text for its slow tool, MB (default: %(default)s)")
    add("--repeats", type=int, default=3, help="runs of all others (default: %(default)s)")
    add("--work-folder", metavar="FOLDER", help="for temporary files, if not the system's")
    add("--output", metavar="FILE", help="also write the figures as JSON")
    options = parser.parse_args()
    checked_count("--workers", options.workers)
    checked_count("--repeats", options.repeats)
    for option in ("megabytes", "megatron_megabytes"):
        if not getattr(options, option) > 0:
            raise OptionError(f"--{option.replace('_', '-')} {getattr(options, option)}: give a number above 0")
    if options.work_folder is not None and not os.path.isdir(options.work_folder):
        raise OptionError(f"--work-folder {options.work_folder}: no such folder")
    return options


if __name__ == "__main__":
    sys.exit(run(main, "benchmarks/preprocessing.py"))
