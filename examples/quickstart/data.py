"""The quickstart's corpus and tokenizer, from what every machine has: Python's library and the installed packages.

Usage: python examples/quickstart/data.py FOLDER, which writes FOLDER/corpus.jsonl and FOLDER/tokenizer.json.
"""

import json
import os
import sys
import sysconfig
from collections.abc import Iterator

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 8192
EOD = "<|endoftext|>"


def source_files() -> Iterator[tuple[str, str]]:
    """The .py files of the standard library and the installed packages, each once, in order: name inside its root, and
    path."""
    roots = {os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")}
    seen = set()
    for root in sorted(roots):
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = sorted(
                subfolder
                for subfolder in subfolders
                if subfolder not in ("site-packages", "dist-packages")  # other environments' packages
            )
            for name in sorted(names):
                path = os.path.realpath(os.path.join(folder, name))
                if name.endswith(".py") and path not in seen:
                    seen.add(path)
                    yield os.path.relpath(os.path.join(folder, name), root), path


def source_texts() -> Iterator[tuple[str, str, str]]:
    """Name, path and text of the source files. Files that are empty or cannot be read are left out."""
    for name, path in source_files():
        try:
            with open(path, encoding="utf-8") as file:
                text = file.read()
        except (UnicodeDecodeError, OSError):
            continue
        if text.strip():
            yield name, path, text


def write_corpus(path: str) -> int:
    """Write the source files as JSON Lines, one document each.

    Returns:
        The number of documents.
    """
    documents = 0
    with open(path, "w", encoding="utf-8") as corpus:
        for _, source, text in source_texts():
            corpus.write(json.dumps({"text": text, "path": source}) + "\n")
            documents += 1
    return documents


def train_tokenizer(corpus_path: str, path: str, vocab_size: int = VOCAB_SIZE) -> None:
    """Train a byte-level BPE on every fourth document."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with open(corpus_path, encoding="utf-8") as corpus:
        sample = (json.loads(line)["text"] for number, line in enumerate(corpus) if number % 4 == 0)
        tokenizer.train_from_iterator(sample, trainer)
    tokenizer.save(path)


def main(folder: str) -> None:
    """Write both files."""
    corpus_path, tokenizer_path = os.path.join(folder, "corpus.jsonl"), os.path.join(folder, "tokenizer.json")
    documents = write_corpus(corpus_path)
    print(f"corpus: {documents:,} source files, {os.path.getsize(corpus_path) / 1e6:.0f} MB", flush=True)
    train_tokenizer(corpus_path, tokenizer_path)
    print(f"tokenizer: byte-level BPE of {VOCAB_SIZE:,} tokens in {tokenizer_path}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
