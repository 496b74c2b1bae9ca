"""The ablation's corpus: the Python files of this machine, each text once, some of them held out, and a tokenizer."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from quickstart.data import EOD, source_texts, train_tokenizer

from megatron_bfp.errors import InputError
from megatron_bfp.files import write_whole
from megatron_bfp.indexed_dataset.format import idx_path
from megatron_bfp.indexed_dataset.reader import IndexedDataset
from megatron_bfp.indexed_dataset.writer import IndexedDatasetWriter

from ..training_runs import EXAMPLES, python_path, say

HELD_OUT = 0.1
"""Share of the files that are not trained on."""


class CorpusSize(NamedTuple):
    """How much of the files is used."""

    train_bytes: int
    """Text to train on; a run sees it once."""
    valid_documents: int
    longest: int
    """Bytes; longer files are left out."""
    vocab_size: int


class Corpus(NamedTuple):
    """Datasets and tokenizer on disk."""

    train: str
    """Prefix of a dataset."""
    valid: str
    tokenizer: str


def make_corpus(folder: str, size: CorpusSize, seq_length: int) -> Corpus:
    """Write the datasets and the tokenizer, unless they exist.

    Raises:
        InputError: there are too few files, or tokenizing failed.
    """
    corpus = Corpus(*(os.path.join(folder, name) for name in ("train", "valid", "tokenizer.json")))
    done = os.path.join(folder, "corpus.json")
    if not os.path.exists(done):
        say("collecting the Python files of this machine")
        os.makedirs(folder, exist_ok=True)
        train, valid = choose(((name, text) for name, _, text in source_texts()), size)
        for prefix, texts in ((corpus.train, train), (corpus.valid, valid)):
            with open(f"{prefix}.jsonl", "w", encoding="utf-8") as file:
                file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
        train_tokenizer(f"{corpus.train}.jsonl", corpus.tokenizer, size.vocab_size)
        for prefix in (corpus.train, corpus.valid):
            tokenize(prefix, corpus.tokenizer, seq_length)
        counts = {
            name: describe(f"{prefix}_text_document", seq_length)
            for name, prefix in corpus._asdict().items()
            if name != "tokenizer"
        }
        write_whole(done, json.dumps(counts).encode())
    with open(done, encoding="utf-8") as file:
        for name, count in json.load(file).items():
            say(f"{name}: " + ", ".join(f"{number:,} {what}" for what, number in count.items()))
    return corpus._replace(train=f"{corpus.train}_text_document", valid=f"{corpus.valid}_text_document")


def choose(files: Iterable[tuple[str, str]], size: CorpusSize) -> tuple[list[str], list[str]]:
    """The texts to train on, and those held out. A file's name alone decides which it is. Of files with the same text,
    one is used.

    Args:
        files: name and text of each.

    Raises:
        InputError: there are too few.
    """
    texts = {}
    for name, text in files:
        if len(text.encode()) <= size.longest:
            texts.setdefault(_hash(text), (_hash(name), text))
    in_order = sorted(texts.values())
    limit = f"{int(HELD_OUT * 16**8):08x}"
    valid = [text for number, text in in_order if number < limit][: size.valid_documents]
    train, num_bytes = [], 0
    for number, text in in_order:
        if number >= limit and num_bytes < size.train_bytes:
            train.append(text)
            num_bytes += len(text.encode())
    if num_bytes < size.train_bytes or len(valid) < size.valid_documents:
        raise InputError(
            f"the Python files of this machine, at most {size.longest:,} bytes each, have {num_bytes:,} bytes to train "
            f"on and {len(valid):,} held out; {size.train_bytes:,} and {size.valid_documents:,} are needed: install "
            "more packages, or take a smaller --size"
        )
    return train, valid


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def tokenize(prefix: str, tokenizer: str, seq_length: int) -> None:
    """Tokenize PREFIX.jsonl and build its index, all documents in one split.

    Raises:
        InputError: the tool failed.
    """
    command = [sys.executable, os.path.join(EXAMPLES, os.pardir, "tools", "preprocess_bfp.py"), "--overwrite"]
    command += ["--input", f"{prefix}.jsonl", "--output-prefix", prefix, "--tokenizer-model", tokenizer]
    command += ["--tokenizer-type", "HuggingFaceTokenizer", "--eod-token", EOD, "--append-eod", "--workers", "1"]
    command += ["--seq-length", str(seq_length), "--split", "1"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": python_path()})
    if done.returncode:
        raise InputError(f"{prefix}.jsonl: tokenizing failed: {done.stderr.strip()}")


def write_cut_documents(train: str, prefix: str, seq_length: int) -> None:
    """Write a dataset of documents that are cut as concatenation cuts them, each part a document of its own, unless it
    exists: ``train``'s documents in random order, cut wherever a sequence ends.

    Args:
        train: prefix of the dataset to read.
        prefix: of the dataset to write.
    """
    if os.path.exists(idx_path(prefix)):
        return
    dataset = IndexedDataset(train)
    order = np.random.default_rng(0).permutation(dataset.num_documents)
    documents = [dataset.document(int(document)) for document in order]
    ends = np.cumsum([len(document) for document in documents])
    cuts = np.union1d(ends, np.arange(seq_length, ends[-1], seq_length))
    with IndexedDatasetWriter(prefix, dataset.dtype) as writer:
        writer.add(np.concatenate(documents), np.diff(cuts, prepend=0).astype(np.int32))
        writer.finalize()


def describe(prefix: str, seq_length: int) -> dict[str, int]:
    """Counts of a dataset, by name."""
    dataset = IndexedDataset(prefix)
    longer = sum(int((lengths > seq_length).sum()) for lengths in dataset.checked_lengths())
    return {
        "documents": dataset.num_documents,
        "tokens": dataset.num_tokens,
        f"documents longer than {seq_length}": longer,
    }
