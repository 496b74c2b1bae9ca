"""Preprocessing beside Megatron-LM's own tools, and beside what the tokenizer alone could do, in one run.

    python benchmarks/preprocessing.py --make-corpus /usr/lib/python3 --megabytes 200 --input corpus.jsonl \
        --tokenizer-model FOLDER --workers 8 --megatron-lm Megatron-LM --megatron-python venv/bin/python

Contenders, each as a process of its own on the same JSON Lines file:

- Megatron-LM's tools/preprocess_data.py, on a share of the input (``--megatron-megabytes``), for it is slow;
- its tools/preprocess_data_fast.py, where the checkout has one, with as many threads as the others have workers;
- tools/preprocess_bfp.py, also on Megatron's share, so that their files can be compared byte by byte;
- gigatoken's ``encode_batch`` of texts that are in memory already: the ceiling, without reading, parsing or writing.

A rate is that of text, in megabytes (10**6 bytes) of UTF-8 without the JSON around it, and of tokens, after the
startup: a run with one document, for imports and loading the tokenizer, is subtracted. Contenders run in turn, there
and back, and figures are medians. Memory is anonymous memory (RssAnon), which leaves out mapped files; pages that a
forked worker shares count for each. An input too small to tell its time from the startup gives no rate.

The tokenizer is copied without its post-processor, which in some puts a token before each text: Megatron's tools keep
that, ours and gigatoken do not.
"""

import argparse
import filecmp
import hashlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir))

from megatron_bfp.arguments import checked_count
from megatron_bfp.commands.shared import Parser
from megatron_bfp.console import run
from megatron_bfp.errors import InputError, OptionError
from megatron_bfp.indexed_dataset.format import bin_path, idx_path
from megatron_bfp.indexed_dataset.reader import IndexedDataset
from megatron_bfp.progress import terminal_progress
from megatron_bfp.tables import format_table

TEXT_SUFFIXES = tuple(".py .pyi .h .hpp .c .cpp .cu .cuh .txt .md .rst .js .json .html".split())
CORPUS_FILE_BYTES = 1 << 20
"""Larger files are left out of a corpus: they are data, and few of them would be all of it."""
SHORTEST_WAIT, LONGEST_WAIT = 0.02, 0.5
"""Seconds between looks at a contender's memory: many in a short run, and few in a long one, which they slow down."""
BATCH_BYTES = 1 << 26
"""Text in one call of gigatoken's ``encode_batch``."""
TOOL = os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, "tools", "preprocess_bfp.py")
MEGATRON, MEGATRON_FAST = "Megatron-LM preprocess_data.py", "Megatron-LM preprocess_data_fast.py"
OURS_ON_SHARE, OURS, GIGATOKEN = "ours, on Megatron's share", "ours", "gigatoken encode_batch, in memory"


class Corpus(NamedTuple):
    """A JSON Lines file with a "text" in each line."""

    path: str
    documents: int
    text_bytes: int


class Memory(NamedTuple):
    """Peaks of anonymous memory, bytes: of one process, and of all processes of a contender at one time."""

    largest: int
    total: int


def make_corpus(path: str, folders: Sequence[str], text_bytes: int, special_texts: Sequence[str]) -> None:
    """Write the text files under folders as JSON Lines, until there are so many bytes of text.

    The order is that of a hash of the paths, so that any share of the corpus is a sample of it. Left out are files that
    are not UTF-8, contain a special token's text, or have the same content as one before.

    Raises:
        InputError: there is not enough text.
        OptionError: the file exists.
    """
    if os.path.exists(path):
        raise OptionError(f"--input {path}: exists; leave out --make-corpus to use it, or remove it")
    forbidden = re.compile("|".join(map(re.escape, special_texts)) or r"(?!)")
    seen, written = set(), 0
    partial = path + ".part"
    with open(partial, "w", encoding="utf-8") as file:
        for text in _texts(terminal_progress(_text_files(folders), None, "reading files")):
            content = text.encode()
            digest = hashlib.blake2b(content).digest()
            if not text.strip() or digest in seen or forbidden.search(text):
                continue
            seen.add(digest)
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            written += len(content)
            if written >= text_bytes:
                break
    if written < text_bytes:
        os.remove(partial)
        raise InputError(f"--make-corpus: {written / 1e6:.1f} MB of text are there; give more folders, or --megabytes")
    os.replace(partial, path)


def _text_files(folders: Sequence[str]) -> list[str]:
    paths = [
        (hashlib.blake2b(os.path.relpath(os.path.join(parent, name), folder).encode()).digest(), parent, name)
        for folder in folders
        for parent, _, names in os.walk(folder)
        for name in names
        if name.endswith(TEXT_SUFFIXES)
    ]
    return [os.path.join(parent, name) for _, parent, name in sorted(paths)]


def _texts(paths: Iterable[str]) -> Iterator[str]:
    for path in paths:
        try:
            if os.path.getsize(path) <= CORPUS_FILE_BYTES:
                with open(path, encoding="utf-8", newline="") as file:
                    yield file.read()
        except (OSError, UnicodeDecodeError):
            continue


def first_documents(inputs: Sequence[str], path: str, text_bytes: float = float("inf")) -> Corpus:
    """Copy lines of JSON Lines files into one file until there are so many bytes of text.

    Raises:
        InputError: a file is missing, has a line that is no JSON object with a "text", or there are no lines at all.
    """
    documents = copied = 0
    with open(path, "wb") as target:
        for name, number, line in terminal_progress(_lines(inputs), None, "copying documents"):
            target.write(line if line.endswith(b"\n") else line + b"\n")
            documents, copied = documents + 1, copied + len(_text(name, number, line).encode())
            if copied >= text_bytes:
                break
    if not documents:
        raise InputError(f"--input {inputs[0]}: there are no documents; see --make-corpus")
    return Corpus(path, documents, copied)


def _lines(inputs: Sequence[str]) -> Iterator[tuple[str, int, bytes]]:
    for name in inputs:
        try:
            with open(name, "rb") as file:
                for number, line in enumerate(file, 1):
                    yield name, number, line
        except OSError as error:
            raise InputError(f"--input {name}: cannot be read: {error.strerror}") from None


def _text(name: str, number: int, line: bytes) -> str:
    try:
        return json.loads(line)["text"]
    except (ValueError, KeyError, TypeError):
        raise InputError(f'--input {name}: line {number} is no JSON object with a "text"') from None


def copy_tokenizer(folder: str, target: str) -> list[str]:
    """Copy a Hugging Face tokenizer's folder without its post-processor; returns the texts of its special tokens.

    Raises:
        OptionError: there is no tokenizer.json in it.
    """
    try:
        with open(os.path.join(folder, "tokenizer.json"), encoding="utf-8") as file:
            description = json.load(file)
    except (OSError, ValueError) as error:
        raise OptionError(f"--tokenizer-model {folder}: give the folder of a tokenizer.json: {error}") from None
    os.mkdir(target)
    with open(os.path.join(target, "tokenizer.json"), "w", encoding="utf-8") as file:
        json.dump(description | {"post_processor": None}, file, ensure_ascii=False)
    config = os.path.join(folder, "tokenizer_config.json")
    if os.path.exists(config):
        shutil.copy(config, target)
    return [token["content"] for token in description.get("added_tokens", ())]


class MemoryWatch:
    """Looks at the memory of a process and its descendants while the ``with`` block runs.

    Args:
        leader: process id of the leader of their session.
    """

    def __init__(self, leader: int) -> None:
        self.peak = Memory(0, 0)
        self._leader, self._is_done = str(leader), threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._is_done.set()
        self._thread.join()

    def _watch(self) -> None:
        seconds = SHORTEST_WAIT
        while not self._is_done.wait(seconds):
            seconds = min(1.5 * seconds, LONGEST_WAIT)
            sizes = [size for size in map(self._anonymous_bytes, filter(str.isdigit, os.listdir("/proc"))) if size]
            self.peak = Memory(max([self.peak.largest, *sizes]), max(self.peak.total, sum(sizes)))

    def _anonymous_bytes(self, process: str) -> int:
        try:
            with open(f"/proc/{process}/stat") as file:
                session = file.read().rpartition(")")[2].split()[3]
            if session != self._leader:
                return 0
            with open(f"/proc/{process}/status") as file:
                return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon:"))
        except (OSError, IndexError, StopIteration):  # it ended
            return 0


class Finished(NamedTuple):
    """A contender that ran to its end."""

    seconds: float
    memory: Memory
    output: str


def timed(name: str, command: Sequence[str], **environment: str) -> Finished:
    """Run a contender, once the disk has done what others left to it.

    Raises:
        InputError: it failed.
    """
    os.sync()
    with tempfile.TemporaryFile("w+") as errors, tempfile.TemporaryFile("w+") as output:
        start = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=output, stderr=errors, env=os.environ | environment, start_new_session=True
        )
        try:
            with MemoryWatch(process.pid) as watch:
                process.wait()
            seconds = time.perf_counter() - start
        finally:
            if process.poll() is None:  # Ctrl-C reached us alone
                os.killpg(process.pid, signal.SIGKILL)
        errors.seek(0), output.seek(0)
        if process.returncode:
            last = (errors.read().strip() or "no message").splitlines()[-1]
            raise InputError(f"{name}: failed with status {process.returncode}: {last}")
        return Finished(seconds, watch.peak, output.read())


@dataclass
class Contender:
    """A tool that writes a dataset, or gigatoken alone, and its runs."""

    name: str
    command: Callable[[str, str], list[str]]
    """Of an input file and the path of the output, without ending."""
    folder: str
    """For its output; emptied before each run."""
    environment: dict[str, str]
    has_output: bool = True
    startups: list[float] = field(default_factory=list)
    """Seconds of runs with one document."""
    seconds: list[float] = field(default_factory=list)
    peaks: list[Memory] = field(default_factory=list)
    num_tokens: int = 0

    @property
    def prefix(self) -> str:
        """The path of its dataset."""
        return os.path.join(self.folder, "dataset_text_document")

    def run(self, corpus: Corpus, one: Corpus) -> None:
        """Run it with one document, and with all.

        Raises:
            InputError: it failed.
        """
        if not self.has_output:
            finished = self._timed(corpus)
            found = json.loads(finished.output)
            self.startups.append(0.0)
            self.seconds.append(found["seconds"])
            self.num_tokens = found["tokens"]
        else:
            if not self.startups:
                self._timed(one)  # not counted: it brings what is imported into the disk's cache
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
    """Runs the contenders and keeps their figures.

    Args:
        folder: an empty one, for all files.
        options: the command line's.
    """

    def __init__(self, folder: str, options: argparse.Namespace) -> None:
        self.folder, self.options = folder, options
        self.tokenizer = os.path.join(folder, "tokenizer")
        self.rows: list[dict[str, Any]] = []
        self.are_identical: dict[str, bool] = {}

    def run(self) -> None:
        """Run all of them.

        Raises:
            BFPError: bad options or input, or one failed that must not.
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
        """Run contenders, ours first, in turn and back again: each follows each, and meets the machine as they do."""
        for number in range(repeats):
            for contender in contenders[:: -1 if number % 2 else 1]:
                try:
                    contender.run(corpus, self.one)
                except InputError as error:
                    if contender.name not in (MEGATRON_FAST, GIGATOKEN):
                        raise
                    print(f"left out: {error}", flush=True)  # not installed, or too young to work everywhere
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

        # its scripts append the checkout to the path, where an installed megatron-core would come first
        python_path = os.pathsep.join(filter(None, [checkout, os.environ.get("PYTHONPATH")]))
        return Contender(name, command, os.path.join(self.folder, name), self._threads() | {"PYTHONPATH": python_path})

    def _gigatoken(self) -> Contender:
        def command(source: str, _: str) -> list[str]:
            this = [sys.executable, os.path.abspath(__file__)]
            return [*this, "--encode-in-memory", source, "--tokenizer-model", self.tokenizer]

        return Contender(GIGATOKEN, command, os.path.join(self.folder, GIGATOKEN), self._threads(), has_output=False)

    def _shared_options(self, source: str, prefix: str) -> list[str]:
        tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", self.tokenizer, "--append-eod"]
        return ["--input", source, "--output-prefix", prefix, *tokenizer]

    def _threads(self) -> dict[str, str]:
        return {"RAYON_NUM_THREADS": str(self.options.workers), "HF_HUB_OFFLINE": "1"}

    def _add_row(self, contender: Contender, corpus: Corpus) -> None:
        startup = statistics.median(contender.startups)
        working = statistics.median(contender.seconds) - startup
        is_measurable = working > startup / 5  # or the input is too small to tell it from the startup
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


def encode_in_memory(path: str, tokenizer_folder: str) -> dict[str, float]:
    """Encode all texts of a JSON Lines file with gigatoken; returns the seconds of its calls, and tokens.

    Raises:
        InputError: gigatoken is not installed or does not know the tokenizer.
    """
    try:
        import awkward
        import gigatoken
    except ImportError:
        raise InputError("gigatoken is not installed") from None
    try:
        tokenizer = gigatoken.Tokenizer(tokenizer_folder)
    except Exception as error:  # whatever it raises for what it does not know
        raise InputError(f"gigatoken does not know this tokenizer: {error}") from None
    batches: list[list[str]] = [[]]
    num_bytes = 0
    for name, number, line in _lines([path]):
        text = _text(name, number, line)
        if num_bytes > BATCH_BYTES:
            batches.append([])
            num_bytes = 0
        batches[-1].append(text)
        num_bytes += len(text.encode())
    tokenizer.encode_batch(["startup"])
    seconds, tokens = 0.0, 0
    for batch in batches:
        start = time.perf_counter()
        encoded = tokenizer.encode_batch(batch)
        seconds += time.perf_counter() - start
        tokens += int(awkward.count(encoded))
    return {"seconds": seconds, "tokens": tokens}


def table(rows: list[dict[str, Any]]) -> str:
    """The figures as text."""
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
    if options.encode_in_memory:
        print(json.dumps(encode_in_memory(options.encode_in_memory, options.tokenizer_model)))
        return
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
    parser = Parser(prog="benchmark_preprocessing", description="Time and memory of preprocessing, beside Megatron's.")
    parser.add_argument("--input", nargs="+", metavar="FILE", help="JSON Lines; what --make-corpus writes")
    parser.add_argument("--make-corpus", nargs="+", metavar="FOLDER", help="write --input from the text files in these")
    parser.add_argument("--megabytes", type=float, default=100, help="text in it, MB (default: %(default)s)")
    parser.add_argument("--tokenizer-model", required=True, metavar="FOLDER", help="of a tokenizer.json and its config")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), metavar="N", help="default: CPUs, %(default)s")
    parser.add_argument("--megatron-lm", metavar="CHECKOUT")
    parser.add_argument("--megatron-python", default=sys.executable, metavar="PYTHON", help="that runs it")
    parser.add_argument("--megatron-megabytes", type=float, default=40, help="of text for it (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of all but Megatron's slow tool (default: 3)")
    parser.add_argument("--work-folder", metavar="FOLDER", help="for temporary files (default: the system's)")
    parser.add_argument("--output", metavar="FILE", help="also write the figures as JSON")
    parser.add_argument("--encode-in-memory", help=argparse.SUPPRESS)
    options = parser.parse_args()
    checked_count("--workers", options.workers)
    checked_count("--repeats", options.repeats)
    for option in ("megabytes", "megatron_megabytes"):
        if not getattr(options, option) > 0:
            raise OptionError(f"--{option.replace('_', '-')} {getattr(options, option)}: give a number above 0")
    if options.work_folder is not None and not os.path.isdir(options.work_folder):
        raise OptionError(f"--work-folder {options.work_folder}: there is no such folder")
    if not options.input and not options.encode_in_memory:
        raise OptionError("give --input, and --make-corpus to have it written")
    return options


if __name__ == "__main__":
    sys.exit(run(main, "benchmark_preprocessing"))
