"""Give a target inputs that may be anything, until the time is up or something else than one of our errors comes out.

    python fuzz.py TARGET --folder F --seconds 600 --seed 1

The input at work is in F/input, so that one which crashes the process is known. Exit status 1: a finding.
"""

import argparse
import faulthandler
import random
import resource
import signal
import sys
import time
import traceback
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent.parent)]

from fuzzing.targets import TARGETS
from megatron_bfp.errors import BFPError

LARGEST_GROWTH = {"parquet": 5 << 30}
"""Bytes of memory that any input may take, all of which are below 1 MB. A page of Parquet says in 31 bits how large it
is before and after decompression, and pyarrow takes as much memory before it finds that the file is smaller."""
OTHERS_GROWTH = 300 << 20
LONGEST_SECONDS = 20
"""Of processor time, for one input."""


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def too_slow(*_):
    raise TimeoutError(f"an input takes more than {LONGEST_SECONDS} s")


def problem_with(target, content, before, largest_growth):
    """What is wrong with what comes out of an input; None if nothing is."""
    signal.setitimer(signal.ITIMER_PROF, LONGEST_SECONDS)
    try:
        target.run(content)
    except BFPError as error:
        if "\n" in str(error):
            return f"an error of several lines: {error}"
    except BaseException:
        return traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    growth = peak_bytes() - before
    return f"memory grew by {growth >> 20} MB" if growth > largest_growth else None


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1 << 62)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--input", type=Path, nargs="*", help="these inputs alone")
    options = parser.parse_args()
    faulthandler.enable()
    signal.signal(signal.SIGPROF, too_slow)
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
    target = TARGETS[options.target](options.folder)
    inputs = (path.read_bytes() for path in options.input) if options.input is not None else generated(target, options)
    deadline = time.monotonic() + options.seconds
    number = before = 0
    for number, content in enumerate(inputs, 1):
        (options.folder / "input").write_bytes(content)
        if number <= 20:  # what is imported and kept once
            before = peak_bytes()
        problem = problem_with(target, content, before, LARGEST_GROWTH.get(options.target, OTHERS_GROWTH))
        if problem is not None:
            print(f"input {number} of seed {options.seed}, kept as {options.folder / 'input'}: {problem}")
            sys.exit(1)
        if time.monotonic() > deadline:
            break
    print(f"{options.target}: {number} inputs, no finding, peak memory {peak_bytes() >> 20} MB")


def generated(target, options):
    for number in range(options.rounds):
        yield target.input(random.Random(f"{options.seed} {number}"))


if __name__ == "__main__":
    main()
