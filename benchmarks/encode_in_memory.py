"""The ceiling of preprocessing: gigatoken's ``encode_batch`` on texts in memory, without reading, parsing or writing.

    python benchmarks/encode_in_memory.py CORPUS.jsonl TOKENIZER_FOLDER

prints the seconds and the tokens as JSON. ``benchmarks/preprocessing.py`` runs it as one of its contenders.
"""

import json
import os
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir))

from benchmarks.corpus import lines_of, text_of
from megatron_bfp.commands.shared import Parser
from megatron_bfp.console import run
from megatron_bfp.errors import InputError

BATCH_BYTES = 1 << 26
"""Bytes of text per call of gigatoken's ``encode_batch``."""


def encode_in_memory(path: str, tokenizer_folder: str) -> dict[str, float]:
    """Encode all texts of a JSON Lines file with gigatoken.

    Returns:
        "seconds" of its calls, and "tokens".

    Raises:
        InputError: gigatoken is not installed or does not support the tokenizer.
    """
    try:
        import awkward
        import gigatoken
    except ImportError:
        raise InputError("gigatoken is not installed") from None
    try:
        tokenizer = gigatoken.Tokenizer(tokenizer_folder)
    except Exception as error:  # its errors have no common type
        raise InputError(f"gigatoken does not support this tokenizer: {error}") from None
    batches: list[list[str]] = [[]]
    num_bytes = 0
    for name, number, line in lines_of([path]):
        text = text_of(name, number, line)
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


def main() -> None:
    """Parse the command line, measure, print.

    Raises:
        InputError: gigatoken cannot be used.
    """
    parser = Parser(prog="benchmarks/encode_in_memory.py", description="gigatoken's encode_batch on texts in memory.")
    parser.add_argument("corpus", metavar="FILE", help="JSON Lines")
    parser.add_argument("tokenizer", metavar="FOLDER", help="of a tokenizer.json and its config")
    options = parser.parse_args()
    print(json.dumps(encode_in_memory(options.corpus, options.tokenizer)))


if __name__ == "__main__":
    sys.exit(run(main, "benchmarks/encode_in_memory.py"))
